// Tensors that were flattened, and their elements cut into runs: what ZeRO and FSDP1 store of a parameter is a stretch
// of its elements in row-major order.
#pragma once

#include <vector>

#include "formats/encoding/stored_tensor.h"
#include "lib/layout/flat_boxes.h"

namespace reshard {

// The elements [begin, end) of a row-major tensor (boxes_of_run) as pieces of a tensor of that shape, stored one after
// the other in `flat` (a vector of stride 1), the first
// of them `at` elements into it. None where begin = end; a shape without dimensions has one element.
std::vector<Fragment> fragments_of_run(const Dims& shape, Index begin, Index end, const StoredTensor& flat, Index at);

}  // namespace reshard
