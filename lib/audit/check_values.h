// `verify --values`: one pass over a checkpoint that checks its checksums, digests every tensor and looks at its
// values.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/values.h"
#include "lib/engine/run.h"

namespace reshard {

// One tensor's line in a table of values.
struct ValueRow {
  std::string name;
  TensorHealth health;

  double zero_percent() const;  // of its elements; 0 when it has none
};

struct ValueReport {
  std::vector<TensorProof> proofs;  // one for each of the view's tensors, as digest_tensors gives them
  std::vector<ValueRow> tensors;    // likewise
  std::vector<Finding> findings;    // of judge_values
  Index checksums_checked = 0;
};

// Reads every tensor of `view` once. Its tensors must be located; `files` is its reader's pool. An error where the
// bytes cannot be read or a checksum does not hold.
Result<ValueReport> check_values(const Catalog& view, FilePool& files, const ValueContext& context,
                                 const RunOptions& options);

}  // namespace reshard
