// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/flat_runs.h"

namespace reshard {
std::vector<Fragment> fragments_of_run(const Dims& shape, Index begin, Index end, const StoredTensor& flat, Index at) {
  std::vector<Fragment> out;
  if (begin == end) return out;
  Fragment fragment = flat;
  fragment.strides = row_major_strides(shape);
  for (const Box& box : shape.rank() == 0 ? std::vector<Box>{whole(shape)} : boxes_of_run(shape, begin, end)) {
    Index first = 0;
    for (int d = 0; d < box.rank(); ++d) first += box.origin[d] * fragment.strides[d];
    fragment.box = box;
    fragment.start = flat.start + (at + first - begin) * byte_size(flat.dtype);
    out.push_back(fragment);
  }
  return out;
}

}  // namespace reshard
