// SPDX-License-Identifier: Apache-2.0
// The arithmetic of padded vocabularies: how many rows frameworks give an embedding, and how a wrong number of rows
// shows in which way it was cut.
//
// Tensor parallelism of degree t pads V rows to P, the next multiple of m t (padded_vocabulary.h), and each rank holds
// P / t of them.
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/checked.h"

namespace reshard {

// One explanation of a number of rows by tensor parallelism.
struct VocabularyCut {
  Index multiple = 1;  // m
  Index tp = 1;        // t
  Index padded = 0;    // P

  friend bool operator==(const VocabularyCut&, const VocabularyCut&) = default;
};

// Returns every (m, t) for which a rank holds exactly `rows` (fewer than `size`) of the padded vocabulary, the likely
// ones first: m = 64, then other customary multiples; degrees that are powers of two. If `heads` > 0, only degrees that
// divide it, if there are any. If no padding is needed, m is 1.
std::vector<VocabularyCut> explain_shard(Index rows, Index size, Index heads);

// Returns every customary (m, t) for which the whole padded vocabulary has `rows` (more than `size`), in the same
// order.
std::vector<VocabularyCut> explain_padding(Index rows, Index size);

// A tensor whose rows are words.
struct VocabularyTensor {
  std::string name;
  Index rows = 0;
  Index row_bytes = 0;
};

struct VocabularyContext {
  std::string config_path;         // "config.json"
  Index size = 0;                  // from the config
  Index heads = 0;                 // num_attention_heads; 0: unknown
  bool optimizer_missing = false;  // Catalog::lacks_optimizer
  std::string field = "vocab_size";
};

// Returns a finding for each wrong number of rows; tensors with the same number share one.
std::vector<Finding> audit_vocabulary(const std::vector<VocabularyTensor>& tensors, const VocabularyContext& context);

}  // namespace reshard
