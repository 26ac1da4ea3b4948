// The walk that every run is: reads all elements of some tensors once, on several threads and, if the job has several
// ranks, on all of them.
#pragma once

#include <functional>
#include <vector>

#include "lib/device/digest.h"
#include "lib/engine/slabs.h"
#include "lib/output/output.h"

namespace reshard {

// What was seen of one planned tensor.
struct TensorProof {
  Digest source;  // of the source's elements, in the source's dtype
  Digest target;  // of what was written; equal to `source` where nothing was converted
};

// A slab that was read, and its digests before and after conversion.
struct SeenSlab {
  const WalkSlab& slab;
  Index bytes = 0;  // of the source
  Digest source, target;
};
// Receives a slab after conversion, in host memory. buffers.scratch is free to use; so is buffers.extra where nothing
// was converted.
using SlabSink = std::function<Status(const SeenSlab& seen, Bytes elements, const Buffers& buffers)>;

// Reads every element of the items once, digests it before and after conversion, and hands it on. `extra` is the room,
// in bytes for each byte of a slab, that conversion or the sink need beside it. With several ranks each takes its share
// of the slabs, of whole tensors where `whole_tensors`, and all get the proofs of everything. With a journal, which the
// sink tells what is finished (Output::journal), those slabs are left out that earlier runs have finished; the proofs
// cover them.
Result<std::vector<TensorProof>> walk(const std::vector<WalkItem>& items, TensorSource& source, Index extra,
                                      const RunOptions& options, const SlabSink& sink, bool whole_tensors = false,
                                      Output* journaled = nullptr);

// What a walk keeps of its items until it ends, bytes: how they are cut, their proofs, where their fragments lie, the
// checksums that were seen, and short tensors that an output holds.
Index kept_bytes(const std::vector<WalkItem>& items, const Catalog& source);

}  // namespace reshard
