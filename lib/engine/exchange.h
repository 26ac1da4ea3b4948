// Ranks that read for each other: each byte of the source is read by one rank, once, and sent to the rank that needs
// it.
//
// The source's bytes, in the order of its files, are dealt out to the ranks in equal parts: a rank reads files from end
// to end. Work goes in steps that all ranks take together. In a step each rank has some slabs of its own share; every
// rank derives who sends which pieces of which slabs to whom from the plan (rounds.h). Where the transport moves device
// memory, the device packs and unpacks; otherwise the host does.
#pragma once

#include "lib/engine/slabs.h"

namespace reshard {

// Room for messages.
struct Staging {
  Index bytes = 0;  // of each of the four buffers
  Index total() const { return 4 * bytes; }

  // What this rank's memory leaves for messages: nothing where the run is no exchange. `largest_group` as in
  // plan_memory().
  static Staging plan(const RunOptions& options, Index largest_group);
};

// Whether ranks read for each other.
bool exchanges(const RunOptions& options);

// Visits the slabs of this rank's share (SlabList::shares), and reads for the others. One buffer for each thread; each
// holds the list's largest slab.
Status exchange_slabs(const std::vector<WalkItem>& items, const SlabList& list, const std::vector<Index>& shares,
                      TensorSource& source, const Staging& staging, const RunOptions& options,
                      const std::vector<Buffers>& buffers, const SlabVisit& visit);

// Which rank reads what: the bytes that some tensors need of their files, in the order of the files, in n equal parts.
class ReaderMap {
 public:
  ReaderMap(const std::vector<WalkItem>& items, const Catalog& catalog, int n);
  int reader(const StoredPiece& piece) const;

 private:
  std::vector<std::pair<std::uint32_t, Index>> borders_;  // file and offset of the first byte of rank 1, 2, ...
};

}  // namespace reshard
