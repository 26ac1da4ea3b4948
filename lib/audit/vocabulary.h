// The arithmetic of padded vocabularies: how many rows frameworks give an embedding, and what a wrong number of rows
// tells of how it was cut.
//
// Tensor parallelism wants the rows of the vocabulary to divide by its degree t, and kernels want them to divide by
// some m (make_vocab_size_divisible_by): V rows become P = ceil(V / (m t)) m t, and each rank holds P / t of them.
// (Megatron-LM, megatron/training/tokenizer/tokenizer.py, _vocab_size_with_padding, m = 128;
// ColossalAI, colossalai/shardformer/layer/embedding.py and linear.py, m = 64)
#pragma once

#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/checked.h"

namespace reshard {

// P for a vocabulary of `size` rows. All arguments are positive; at most 2^40, 2^20 and 2^20.
Index padded_vocabulary(Index size, Index multiple, Index tp);

// A way in which `rows` are what tensor parallelism leaves of a vocabulary.
struct VocabularyCut {
  Index multiple = 1;  // m
  Index tp = 1;        // t
  Index padded = 0;    // P

  friend bool operator==(const VocabularyCut&, const VocabularyCut&) = default;
};

// Every (m, t) for which a rank holds exactly `rows` (fewer than `size`) of the padded vocabulary, the likely ones
// first: m = 64, then other customary multiples; degrees that are powers of two. With `heads` > 0, only degrees that
// divide them, if there are any. Where no padding is needed at all, m is 1.
std::vector<VocabularyCut> explain_shard(Index rows, Index size, Index heads);

// Every customary (m, t) for which the whole padded vocabulary has `rows` (more than `size`), likewise.
std::vector<VocabularyCut> explain_padding(Index rows, Index size);

// A tensor whose rows are words.
struct VocabularyTensor {
  std::string name;
  Index rows = 0;
  Index row_bytes = 0;
};

struct VocabularyContext {
  std::string config_path;         // "config.json"
  Index size = 0;                  // as the config says
  Index heads = 0;                 // num_attention_heads; 0: not known
  bool optimizer_missing = false;  // Catalog::lacks_optimizer
};

// A finding for each wrong number of rows; tensors that agree share one.
std::vector<Finding> audit_vocabulary(const std::vector<VocabularyTensor>& tensors, const VocabularyContext& context);

}  // namespace reshard
