// SPDX-License-Identifier: Apache-2.0
// Tensors of torch_dist that hold a parameter of all layers, or of all experts (drawn in dist_reader.h).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lib/checkpoint/catalog.h"

namespace reshard::megatron {

inline constexpr Index kPartsPerPiece =
    16;  // limit for the layers and experts, or flat pieces, in a stored piece on average

// The names of the parameters in a stored tensor.
struct Stack {
  std::string before, between, after;  // "decoder.layers." layer "mlp.experts.local_experts." expert ".linear_fc1..."
  bool by_layer = false, by_expert = false;
  std::optional<Index> half;  // half of the rows of a gated matrix, if gate and up are separate tensors
  std::string name(Index layer, Index expert) const {
    return before + (by_layer ? std::to_string(layer) : "") + between + (by_expert ? std::to_string(expert) : "") +
           after;
  }
};

// Returns the stack of the tensor with this key, without the wrapper's prefix. An optimizer's state has its parameter's
// key and stored shape. `stored` is needed to see whether the norm before experts is part of another tensor.
Stack stack_of(const Catalog& stored, const std::string& wrapper, std::string_view key, const Dims& shape);

// Returns whether the numbers of layers and experts are plausible for a model and for the number of stored pieces.
bool can_split(const Tensor& tensor, const Stack& stack, const Dims& shape);

// Returns the name without "chained_1.", the prefix of states of the second of several optimizers, which have different
// parameters.
std::string_view without_chain(std::string_view name);
Index parse_chain(std::string_view name);  // the number in that prefix; 0 if there is none

}  // namespace reshard::megatron
