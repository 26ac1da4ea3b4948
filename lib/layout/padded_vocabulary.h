// How many rows frameworks give a vocabulary: tensor parallelism wants them to divide by its degree t, and kernels want
// them to divide by some m (make_vocab_size_divisible_by), so that V words have ceil(V / (m t)) m t rows. Rows beyond
// the words are padding.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "lib/base/checked.h"

namespace reshard {

// Nothing where they are too many to count. `multiple` and `tp` are at least 1.
inline std::optional<Index> padded_vocabulary(Index words, Index multiple, Index tp) {
  const auto unit = checked_mul(multiple, tp);
  return unit ? checked_round_up(words, *unit) : std::nullopt;
}

// The m that are met, the likeliest first, and whose they are unless told otherwise.
// (Megatron-LM: megatron/training/tokenizer/tokenizer.py, _vocab_size_with_padding;
// ColossalAI: colossalai/shardformer/layer/embedding.py and linear.py)
struct UsualMultiple {
  Index multiple = 1;
  std::string_view framework = {};
};
inline constexpr std::array<UsualMultiple, 7> kUsualMultiples = {
    {{64, "ColossalAI"}, {128, "Megatron-LM"}, {32}, {16}, {8}, {256}, {1}}};

}  // namespace reshard
