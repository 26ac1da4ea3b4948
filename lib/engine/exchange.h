// SPDX-License-Identifier: Apache-2.0
// Ranks that read for each other: one rank reads each byte of the source, once, and sends it to the rank that needs it.
//
//   1. The bytes of the source, in the order of its files, are divided equally among the ranks (ReaderMap). So each
//      rank reads its files from one end to the other.
//   2. All ranks take the same steps together. In a step each rank processes some slabs of its own share.
//   3. Every rank computes from the plan which pieces of which slabs each rank sends to which other (rounds.h). Only
//      elements are sent, no requests.
//   4. The device packs and unpacks messages if the transport moves device memory, otherwise the host does.
#pragma once

#include "lib/engine/slabs.h"

namespace reshard {

// Memory for messages.
struct Staging {
  Index bytes = 0;  // of each of the four buffers
  Index total() const { return 4 * bytes; }

  // Returns the size of this rank's buffers: each has a twelfth of `options.memory`, at most 32 MiB, but at least
  // kMinSlab and `largest_group` (as in plan_memory()), so that the largest slab fits. 0 if the ranks do not exchange.
  static Staging plan(const RunOptions& options, Index largest_group);
};

// Returns whether the ranks read for each other.
bool exchanges(const RunOptions& options);

// Visits the slabs of this rank's share (SlabList::shares) and reads for the other ranks. Runs one thread per element
// of `buffers`, each of which must hold the list's largest slab.
Status exchange_slabs(const std::vector<WalkItem>& items, const SlabList& list, const std::vector<Index>& shares,
                      TensorSource& source, const Staging& staging, const RunOptions& options,
                      const std::vector<Buffers>& buffers, const SlabVisit& visit);

// Maps the bytes that some tensors need, in the order of their files, to the ranks that read them: `n` equal parts.
class ReaderMap {
 public:
  ReaderMap(const std::vector<WalkItem>& items, const Catalog& catalog, int n);
  int reader(const StoredPiece& piece) const;

 private:
  std::vector<std::pair<std::uint32_t, Index>> borders_;  // file and offset of the first byte of rank 1, 2, ...
};

}  // namespace reshard
