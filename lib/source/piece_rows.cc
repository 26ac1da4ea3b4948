// SPDX-License-Identifier: Apache-2.0
#include "lib/source/piece_rows.h"

#include <algorithm>
#include <optional>

namespace reshard {
namespace {

// Returns the dimension along which `next` follows `last` in the same fragment, if each is one index of it.
std::optional<int> row_dimension(const Piece& last, const Piece& next) {
  if (last.fragment != next.fragment || last.box.shape != next.box.shape) return std::nullopt;
  std::optional<int> out;
  for (int d = 0; d < last.box.rank(); ++d) {
    if (last.box.begin(d) == next.box.begin(d)) continue;
    if (out || last.box.shape[d] != 1 || next.box.begin(d) != last.box.begin(d) + 1) return std::nullopt;
    out = d;
  }
  return out;
}

}  // namespace

std::size_t take_rows(std::span<const PieceGroup> groups, Index element_bytes, Index room, Piece& rows) {
  const Index length = groups[0].length();
  const auto most = std::min(groups.size(), static_cast<std::size_t>(room / std::max<Index>(length, 1)));
  std::optional<int> along;
  std::size_t n = 1;
  for (; n < most && groups[n - 1].pieces.size() == 1 && groups[n].pieces.size() == 1; ++n) {
    const auto d = row_dimension(groups[n - 1].pieces[0], groups[n].pieces[0]);
    if (!d || (along && along != d)) break;
    along = d;
  }
  if (!along) return 1;
  rows.box.shape[*along] = static_cast<Index>(n);
  rows.strides[*along] = length / element_bytes;
  return n;
}

}  // namespace reshard
