// SPDX-License-Identifier: Apache-2.0
#include "lib/source/checked_source.h"

#include <algorithm>

#include "lib/base/text.h"
#include "lib/device/crc32.h"

namespace reshard {

Status CheckedSource::read_pieces(std::size_t number, const Box& box, const PieceFilter& wanted, MutableBytes out,
                                  MutableBytes scratch) {
  const Tensor& tensor = catalog().tensors()[number];
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i)
    if (!intersect(tensor.fragments.box(i), box).empty()) TRY(check(tensor, i, scratch));
  return stored_.read_pieces(number, box, wanted, out, scratch);
}

Status CheckedSource::check(const Tensor& tensor, std::size_t number, MutableBytes scratch) {
  const Fragment fragment = tensor.fragments.get(number);
  if (!fragment.crc) return {};
  const std::lock_guard lock(mutex_);
  const auto [begin, end] = seen_.equal_range(fragment.extent.offset);
  for (auto seen = begin; seen != end; ++seen)
    if (seen->second.extent == fragment.extent) return seen->second.error ? Status(*seen->second.error) : Status();
  const std::uint32_t got = TRY(crc_of(fragment.extent, scratch).context(tensor_text(tensor.name)));
  CheckedItem seen{fragment.extent, std::nullopt};
  if (got != *fragment.crc) seen.error = crc_mismatch(catalog(), tensor, fragment, got);
  seen_.emplace(fragment.extent.offset, seen);
  return seen.error ? Status(*seen.error) : Status();
}

Result<std::uint32_t> CheckedSource::crc_of(const Extent& extent, MutableBytes scratch) {
  const auto file = TRY(files_.open(catalog().file_path(extent.file)));
  std::uint32_t crc = 0;
  for (Index done = 0; done < extent.length;) {
    const MutableBytes part = scratch.first(std::min(extent.length - done, std::ssize(scratch)));
    TRY(file->read_at(extent.offset + done, part));
    crc = crc32(crc, part);
    done += std::ssize(part);
  }
  return crc;
}

}  // namespace reshard
