// SPDX-License-Identifier: Apache-2.0
// Flattened tensors: a range of a tensor's elements in row-major order as boxes.
//
//   elements [3, 13) of a [4, 4]:   . . . x
//                                   x x x x
//                                   x x x x
//                                   x . . .      boxes [0:1, 3:4], [1:3, 0:4], [3:4, 0:1]
#pragma once

#include <vector>

#include "lib/layout/box.h"

namespace reshard {

// Returns the boxes of a row-major tensor that hold its elements [begin, end), in order: at most one, plus two for each
// dimension but the last. Requires begin < end <= volume(shape) and at least one dimension.
std::vector<Box> boxes_of_run(const Dims& shape, Index begin, Index end);

}  // namespace reshard
