// SPDX-License-Identifier: Apache-2.0
// The padded number of vocabulary rows. Tensor parallelism requires it to be divisible by its degree t, and kernels by
// some m (make_vocab_size_divisible_by), so V words have ceil(V / (m t)) m t rows. The rows after the words are
// padding.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "lib/base/checked.h"

namespace reshard {

// Returns nothing on overflow. `multiple` and `tp` must be at least 1.
inline std::optional<Index> padded_vocabulary(Index words, Index multiple, Index tp) {
  const auto unit = checked_mul(multiple, tp);
  return unit ? checked_round_up(words, *unit) : std::nullopt;
}

// The common values of m, the likeliest first, and the frameworks that use them by default.
// (Megatron-LM: megatron/training/tokenizer/tokenizer.py, _vocab_size_with_padding;
// ColossalAI: colossalai/shardformer/layer/embedding.py and linear.py)
struct DefaultMultiple {
  Index multiple = 1;
  std::string_view framework = {};
};
inline constexpr std::array<DefaultMultiple, 7> kUsualMultiples = {
    {{64, "ColossalAI"}, {128, "Megatron-LM"}, {32}, {16}, {8}, {256}, {1}}};

}  // namespace reshard
