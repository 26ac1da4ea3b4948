// `verify --replicas`: a checkpoint may hold the same box of a tensor several times, saved by the ranks of a replica
// group. The rest of the program reads the first copy; here all copies are read and compared.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/engine/run.h"

namespace reshard {

struct ReplicaReport {
  Index tensors = 0;  // that have further copies
  Index copies = 0;   // further copies compared, beside the first one of each box
  Index bytes = 0;    // of those
  Index shared = 0;   // entries that point at the bytes of the first copy: there is nothing to compare
  Index checksums_checked = 0;
  std::vector<Finding> findings;  // "replicas-disagree" for each tensor whose copies differ, "replicas-shared"
};

// Compares every copy in Tensor::replicas with the first one, byte for byte. The tensors must be located; `files` is
// the reader's pool. Memory is bounded as in every run. An error where bytes cannot be read or a checksum does not
// hold.
Result<ReplicaReport> compare_replicas(const Catalog& catalog, FilePool& files, const RunOptions& options);

}  // namespace reshard
