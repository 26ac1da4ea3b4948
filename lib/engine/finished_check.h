// SPDX-License-Identifier: Apache-2.0
// Checks that the slabs which a killed run finished are still on the disk as they were written.
//
// The journal (journal.h) records a digest of each tensor's finished slabs. Before a run resumes, it reads these slabs
// from the work directory again and compares the digests. Otherwise bytes that a disk, a copy or a person changed in
// the meantime would be published with the digests of the original bytes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/engine/slabs.h"
#include "lib/output/output.h"

namespace reshard {

// How earlier runs cut slabs, and which slabs they finished; the same on all ranks. `finished` is empty if there were
// no earlier runs.
struct FinishedWork {
  SlabCut cut;
  std::map<Index, Index> finished;
};
// Returns what the journal of an earlier run records, or `cut` and no finished slabs if there is none. All ranks must
// call it.
Result<FinishedWork> read_finished_work(SlabCut cut, const Output& output, Transport* ranks);

// The location of a planned tensor in the output.
struct StoredItem {
  const Tensor* tensor = nullptr;         // of the target's view
  const FragmentIndex* index = nullptr;   // of its fragments
  const FragmentIndex* copies = nullptr;  // of its replicas
};

// Reads the slabs that earlier runs finished, each rank a share, on the threads and within the memory that `memory`
// plans for a copy with `extra` (plan_memory). Returns the name of the first tensor, in the order of `items`, that
// differs from what the journal recorded; nothing if none does. Fails (corrupt) if the journal lists slabs that `items`
// do not have. All ranks must call it, after Output::create() and before the first write.
Result<std::optional<std::string>> find_changed(const std::vector<WalkItem>& items,
                                                const std::vector<StoredItem>& stored, const Catalog& source,
                                                Output& output, const MemoryPlan& memory, Index extra,
                                                const RunOptions& options);

}  // namespace reshard
