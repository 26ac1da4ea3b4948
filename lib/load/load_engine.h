// The two ways of moving what a load needs (load.h): a walk over the boxes of one rank, and rounds of reading and
// sending in which all ranks take part.
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
  const LoadDestinations& landings;
  Index rank;
  RunOptions run;  // but `memory` is that of the buffers alone

  const Tensor& from(std::size_t planned) const { return source.catalog().tensors()[plan.tensors[planned].from]; }
  const Tensor& to(std::size_t planned) const { return target_view.tensors()[plan.tensors[planned].to]; }
};

// Digests of each planned tensor's elements, in the target's dtype.
struct LoadDigests {
  std::vector<Digest> read;    // by this rank
  std::vector<Digest> placed;  // in this rank's memory
  Index bytes_read = 0;
  Index bytes_received = 0;
};

// Reads what lands here and places it.
Result<LoadDigests> load_direct(const LoadJob& job);

// Every rank reads its share of all slabs, sends each piece to those who hold it, and places what it gets. All ranks
// call it, with the same plan, a target of all ranks, and `run.ranks`.
Result<LoadDigests> load_together(const LoadJob& job);

}  // namespace reshard
