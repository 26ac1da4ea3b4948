// SPDX-License-Identifier: Apache-2.0
#include "lib/layout/flat_boxes.h"

namespace reshard {
namespace {

void cover(const Dims& shape, int d, Index begin, Index end, Box box, std::vector<Box>& out) {
  Index inner = 1;
  for (int k = d + 1; k < shape.rank(); ++k) inner *= shape[k];
  const auto inside = [&](Index row, Index from, Index to) {
    Box part = box;
    part.origin[d] = row;
    part.shape[d] = 1;
    cover(shape, d + 1, from, to, part, out);
  };
  Index row = begin / inner;
  if (row == (end - 1) / inner && end - begin < inner) return inside(row, begin - row * inner, end - row * inner);
  if (begin % inner != 0) {
    inside(row, begin % inner, inner);
    ++row;
  }
  const Index last = end / inner;
  if (last > row) {
    Box rows = box;
    rows.origin[d] = row;
    rows.shape[d] = last - row;
    out.push_back(rows);
  }
  if (end % inner != 0) inside(last, 0, end % inner);
}

}  // namespace

std::vector<Box> boxes_of_run(const Dims& shape, Index begin, Index end) {
  std::vector<Box> out;
  cover(shape, 0, begin, end, whole(shape), out);
  return out;
}

}  // namespace reshard
