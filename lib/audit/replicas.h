// SPDX-License-Identifier: Apache-2.0
// `verify --replicas`: compares copies. A checkpoint may store the same box of a tensor several times, saved by the
// ranks of a replica group. The rest of the program reads only the first copy; this reads and compares all.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/engine/run.h"

namespace reshard {

struct ReplicaReport {
  Index tensors = 0;  // that have further copies
  Index copies = 0;   // further copies compared, without the first one of each box
  Index bytes = 0;    // of the further copies
  Index shared = 0;   // entries that refer to the bytes of the first copy, so there is nothing to compare
  Index checksums_checked = 0;
  std::vector<Finding> findings;  // "replicas-disagree" for each tensor with different copies, "replicas-shared"
};

// Compares every copy in Tensor::replicas with the first one, byte for byte. The tensors must be located; `files` must
// be the reader's pool. Memory is limited by `options`. Fails if bytes cannot be read or a checksum does not match.
Result<ReplicaReport> compare_replicas(const Catalog& catalog, FilePool& files, const RunOptions& options);

}  // namespace reshard
