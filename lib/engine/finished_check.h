// Whether what a killed run finished of an output is still on the disk as it was written.
//
// The journal (journal.h) records a digest of each tensor's finished slabs. Before a run resumes it reads these slabs
// from the work directory again and compares: bytes that were changed meanwhile, by a disk, a copy or a person, would
// otherwise be published with the digests of what they were.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/engine/slabs.h"
#include "lib/output/output.h"

namespace reshard {

// How earlier runs cut slabs and which they finished, the same for all ranks. `finished` is empty where there were
// none.
struct Continued {
  SlabCut cut;
  std::map<Index, Index> finished;
};
// Every rank calls it. Without an earlier run's journal the cut is `cut`.
Result<Continued> continued(SlabCut cut, const Output& output, Transport* ranks);

// Where a planned tensor is stored in the output.
struct StoredItem {
  const Tensor* tensor = nullptr;         // of the target's view
  const FragmentIndex* index = nullptr;   // of its fragments
  const FragmentIndex* copies = nullptr;  // of its replicas
};

// Reads what earlier runs finished of the output, each rank a share of it, on the threads and within the memory that
// `memory` plans for a copy with `extra` (plan_memory). Returns the name of the first tensor, in the order of `items`,
// that is not what the journal recorded; nothing where all are. Corrupt where the journal lists slabs that `items` do
// not have. Every rank calls it, after Output::create() and before the first write.
Result<std::optional<std::string>> find_changed(const std::vector<WalkItem>& items,
                                                const std::vector<StoredItem>& stored, const Catalog& source,
                                                Output& output, const MemoryPlan& memory, Index extra,
                                                const RunOptions& options);

}  // namespace reshard
