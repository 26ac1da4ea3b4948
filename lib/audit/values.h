// SPDX-License-Identifier: Apache-2.0
// Judges the values in a checkpoint: NaN and infinities, weights and rows that training never reached or wiped out,
// values beyond the range of their type. lib/device/health.h counts; this code judges the counts by what a tensor is:
// zeros are normal in an optimizer's moment and alarming in a projection.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/checkpoint/catalog.h"
#include "lib/device/health.h"
#include "lib/engine/run.h"

namespace reshard {

// What the caller knows about the model, and requests.
struct ValueContext {
  std::vector<std::string> vocabulary = {};  // tensors with a row for each token: embedding and head
  Index vocab_size = 0;                      // without padding; 0: unknown
  bool exponents = false;                    // whether to count elements by exponent
};

// Returns the first row of a tensor that pads the vocabulary, or -1. For HealthScan.
Index padding_begins(const Tensor& tensor, const ValueContext& context);

// Returns one finding for each kind of problem: `tensors` lists all that have it, `why` the worst few with their
// counts. health[i] belongs to catalog.tensors()[i] and must have been split at padding_begins().
//   error    non-finite-weights, non-finite-optimizer
//   warning  zero-weights, constant-weights, zero-rows, constant-rows
//   note     unused-tokens, padding-rows, near-overflow, large-values
// Zeros are not judged in biases, norms that are all one or zero, scales, position tables and integers.
std::vector<Finding> judge_values(const Catalog& catalog, const std::vector<TensorHealth>& health,
                                  const ValueContext& context);

// A tensor's line in a table of values.
struct ValueRow {
  std::string name;
  // Tensors of one kind have values of similar magnitude: "weights", an optimizer's "exp_avg", "other".
  std::string kind;
  TensorHealth health;

  double zero_percent() const;  // of its elements; 0 if it has none
};

std::string value_kind(std::string_view key);

struct ValueReport {
  std::vector<TensorProof> proofs;  // one for each of the view's tensors, from digest_tensors()
  std::vector<ValueRow> tensors;    // one for each of the view's tensors
  std::vector<Finding> findings;    // of judge_values
  Index checksums_checked = 0;
};

// Reads every tensor of `view` once. The tensors must be located; `files` must be their reader's pool. Fails if bytes
// cannot be read or a checksum does not match.
Result<ValueReport> check_values(const Catalog& view, FilePool& files, const ValueContext& context,
                                 const RunOptions& options);

// Returns "128,256..128,511; 130,000 and 7 more": the first few ranges, and the number of further rows.
std::string rows_text(const RowSet& rows);

}  // namespace reshard
