// SPDX-License-Identifier: Apache-2.0
// Reading the slabs of one rank.
#pragma once

#include <vector>

#include "lib/engine/slabs.h"

namespace reshard {

// Reads the slabs [first, end) of `list` on this rank and visits each. Runs one thread per element of `buffers`, each
// of which must hold the list's largest slab. If the source is behind a URL, up to `ahead` bytes are
// fetched ahead.
Status read_slabs(const std::vector<WalkItem>& items, const SlabList& list, Index first, Index end,
                  TensorSource& source, const RunOptions& options, const std::vector<Buffers>& buffers,
                  const SlabVisit& visit, Index ahead = 0);

}  // namespace reshard
