// Lays out the files of ranks. See ranks.h.
#pragma once

#include <memory>

#include "lib/checkpoint/format.h"

namespace reshard {

// One file for each rank of request.mesh, a stage's tensors on its ranks only, replicated tensors in the file of every
// rank that holds them; and the descriptor, which names every tensor.
Result<std::unique_ptr<Target>> lay_out_ranks(LayoutRequest request);

}  // namespace reshard
