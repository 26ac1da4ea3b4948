// SPDX-License-Identifier: Apache-2.0
// Runs of flattened tensors. ZeRO and FSDP1 flatten a parameter in row-major order and store a run of its elements on
// each rank.
#pragma once

#include <vector>

#include "formats/encoding/stored_tensor.h"
#include "lib/layout/flat_boxes.h"

namespace reshard {

// Returns the elements [begin, end) of a row-major tensor of this shape as fragments of the tensor (boxes_of_run). They
// are stored one after the other in `flat`, a vector of stride 1, starting at its element `at`. Returns none if
// begin = end. A shape without dimensions has one element.
std::vector<Fragment> fragments_of_run(const Dims& shape, Index begin, Index end, const StoredTensor& flat, Index at);

}  // namespace reshard
