// Tensors that were flattened, and their elements cut into runs: what ZeRO and FSDP1 store of a parameter is a stretch
// of its elements in row-major order, which is up to a handful of boxes.
//
//   elements [3, 13) of a [4, 4]:   . . . x
//                                   x x x x
//                                   x x x x
//                                   x . . .      boxes [0:1, 3:4], [1:3, 0:4], [3:4, 0:1]
#pragma once

#include <vector>

#include "formats/encoding/stored_tensor.h"

namespace reshard {

// The boxes of a row-major tensor that hold its elements [begin, end) in order, up to two for each dimension but the
// last, and one. begin < end <= volume(shape); shape has a dimension at least.
std::vector<Box> boxes_of_run(const Dims& shape, Index begin, Index end);

// The same as pieces of a tensor of that shape, stored one after the other in `flat` (a vector of stride 1), the first
// of them `at` elements into it. None where begin = end; a shape without dimensions has one element.
std::vector<Fragment> fragments_of_run(const Dims& shape, Index begin, Index end, const StoredTensor& flat, Index at);

}  // namespace reshard
