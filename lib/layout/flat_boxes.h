// Tensors that were flattened: a stretch of a tensor's elements in row-major order is up to a handful of boxes.
//
//   elements [3, 13) of a [4, 4]:   . . . x
//                                   x x x x
//                                   x x x x
//                                   x . . .      boxes [0:1, 3:4], [1:3, 0:4], [3:4, 0:1]
#pragma once

#include <vector>

#include "lib/layout/box.h"

namespace reshard {

// The boxes of a row-major tensor that hold its elements [begin, end) in order, up to two for each dimension but the
// last, and one. begin < end <= volume(shape); shape has a dimension at least.
std::vector<Box> boxes_of_run(const Dims& shape, Index begin, Index end);

}  // namespace reshard
