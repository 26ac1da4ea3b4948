// What the numbers in a checkpoint say of its health: NaN and infinities, weights and rows that training never reached
// or wiped out, values that no longer fit their type. lib/device/health.h counts; here the counts are judged, by what a
// tensor is: zeros are ordinary in a moment of the optimizer and alarming in a projection.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/checkpoint/catalog.h"
#include "lib/device/health.h"
#include "lib/engine/run.h"

namespace reshard {

// What the caller knows of the model, and wants to know.
struct ValueContext {
  std::vector<std::string> vocabulary = {};  // names of the tensors with a row for each token: embedding and head
  Index vocab_size = 0;                      // true size, without padding; 0: not known
  bool exponents = false;                    // whether elements are counted by their exponents
};

// The row from which on a tensor's rows pad the vocabulary; -1: none do. For HealthScan.
Index padding_begins(const Tensor& tensor, const ValueContext& context);

// One finding for each kind of trouble: `tensors` lists all that have it, `why` the worst few with their counts.
// health[i] belongs to catalog.tensors()[i] and was split at padding_begins().
//   error    non-finite-weights, non-finite-optimizer
//   warning  zero-weights, constant-weights, zero-rows, constant-rows
//   note     unused-tokens, padding-rows, near-overflow, large-values
// Biases, norms that are all one or zero, scales, tables of positions and integers are not judged by their zeros.
std::vector<Finding> judge_values(const Catalog& catalog, const std::vector<TensorHealth>& health,
                                  const ValueContext& context);

// One tensor's line in a table of values.
struct ValueRow {
  std::string name;
  // Tensors of one kind have values of one order of magnitude: "weights"; of an optimizer what it keeps, "exp_avg";
  // "other".
  std::string kind;
  TensorHealth health;

  double zero_percent() const;  // of its elements; 0 when it has none
};

std::string value_kind(std::string_view key);

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

// "128,256..128,511; 130,000 and 7 more": the first few ranges, and how many rows are in the others.
std::string rows_text(const RowSet& rows);

}  // namespace reshard
