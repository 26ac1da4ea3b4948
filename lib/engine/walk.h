// SPDX-License-Identifier: Apache-2.0
// The walk that every run is: reads all elements of some tensors once, on several threads and, if the job has several
// ranks, on all of them.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "lib/device/digest.h"
#include "lib/engine/slabs.h"
#include "lib/output/output.h"

namespace reshard {

// Digests of one tensor.
struct TensorProof {
  Digest source;  // of the source's elements, in the source's dtype
  Digest target;  // digest of the written values; equal to `source` if nothing was converted

  TensorProof& operator+=(const TensorProof& other);
};

// Adds up the proofs of all ranks, which have the same tensors. Every rank ends with the sums.
Status add_up(Transport* ranks, std::span<TensorProof> proofs);

// A slab that was read, with its digests before and after conversion.
struct SeenSlab {
  const WalkSlab& slab;
  Index bytes = 0;  // of the source
  Digest source, target;
};
// Receives a slab after conversion, in host memory. It may use buffers.scratch, and buffers.extra if nothing was
// converted.
using SlabSink = std::function<Status(const SeenSlab& seen, Bytes elements, const Buffers& buffers)>;

// The tensors to walk over, and how.
struct Walk {
  const std::vector<WalkItem>& items;
  TensorSource& source;
  Index extra = 0;              // bytes, for each byte of a slab, that conversion or the sink need in addition to it
  bool whole_tensors = false;   // give all slabs of a tensor to one rank
  Output* journaled = nullptr;  // whose journal records finished slabs; null: none
};

// Reads every element of the items once, computes its digests before and after conversion, and passes it to `sink`:
//
//   1. Divide the memory among the threads and choose the size of slabs, the same on all ranks.
//   2. If a journal of an earlier run exists, cut slabs as that run did and leave out those that it finished.
//   3. Divide the remaining slabs among the ranks.
//   4. On each thread: read a slab, convert it on the device, compute both digests, bring it back and call `sink`.
//      Ranks that read for each other receive their slabs by exchange (exchange.h), otherwise each reads its own.
//   5. Verify the checksums of items that were read in pieces, and add up the digests of all ranks.
//
// The sink reports finished slabs to the journal (Output::journal). Returns the proofs of all tensors on all ranks,
// including the slabs that an earlier run finished.
Result<std::vector<TensorProof>> run_walk(const Walk& walk, const RunOptions& options, const SlabSink& sink);

// Returns the bytes that a walk keeps until it ends: how the items are cut, their proofs, the index of their fragments,
// the checksums that were seen, and short tensors that an output buffers.
Index kept_bytes(const std::vector<WalkItem>& items, const Catalog& source);

}  // namespace reshard
