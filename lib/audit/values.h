// What the numbers in a checkpoint say of its health: NaN and infinities, weights and rows that training never reached
// or wiped out, values that no longer fit their type. lib/device/health.h counts; here the counts are judged, by what a
// tensor is: zeros are ordinary in a moment of the optimizer and alarming in a projection.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/checkpoint/catalog.h"
#include "lib/device/health.h"

namespace reshard {

// What the caller knows of the model.
struct ValueContext {
  std::vector<std::string> vocabulary;  // names of the tensors with a row for each token: embedding and head
  Index vocab_size = 0;                 // true size, without padding; 0: not known
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

// "128,256..128,511; 130,000 and 7 more": the first few ranges, and how many rows are in the others.
std::string rows_text(const RowSet& rows);

}  // namespace reshard
