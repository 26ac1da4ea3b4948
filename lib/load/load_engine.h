// SPDX-License-Identifier: Apache-2.0
// The two ways of loading (load.h): a pass over the boxes of one rank, or rounds of reading and sending in which all
// ranks take part.
#pragma once

#include <vector>

#include "lib/device/digest.h"
#include "lib/engine/run_options.h"
#include "lib/load/load_destinations.h"
#include "lib/source/tensor_source.h"

namespace reshard {

struct LoadJob {
  const Plan& plan;
  TensorSource& source;
  const Catalog& target_view;
  const MemoryTarget& target;
  const LoadDestinations& destinations;
  Index rank;
  RunOptions run;  // `memory` is that of the buffers alone

  const Tensor& from(std::size_t planned) const { return source.catalog().tensors()[plan.tensors[planned].from]; }
  const Tensor& to(std::size_t planned) const { return target_view.tensors()[plan.tensors[planned].to]; }
};

// The digests of each planned tensor's elements, in the target's dtype.
struct LoadDigests {
  std::vector<Digest> read;    // of elements read by this rank
  std::vector<Digest> placed;  // of elements in this rank's memory
  Index bytes_read = 0;
  Index bytes_received = 0;
};

// Reads what this rank holds and places it.
Result<LoadDigests> load_direct(const LoadJob& job);

// Reads this rank's share of all slabs, sends each piece to the ranks that hold it, and places what it receives. All
// ranks must call it with the same plan, a target of all ranks, and `run.ranks`.
Result<LoadDigests> load_together(const LoadJob& job);

}  // namespace reshard
