// The tensors of torch_dist that hold a parameter of all layers, or of all experts, at once (dist_reader.cc draws
// them).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lib/checkpoint/catalog.h"

namespace reshard::megatron {

inline constexpr Index kPartsPerPiece =
    16;  // layers and experts, or flat pieces, that a stored piece may hold, on average

// How a stored tensor is made of parameters.
struct Stack {
  std::string before, between, after;  // "decoder.layers." layer "mlp.experts.local_experts." expert ".linear_fc1..."
  bool by_layer = false, by_expert = false;
  std::optional<Index> half;  // of the rows of a gated one, whose gate and up are tensors of their own
  std::string name(Index layer, Index expert) const {
    return before + (by_layer ? std::to_string(layer) : "") + between + (by_expert ? std::to_string(expert) : "") +
           after;
  }
};

// Of the tensor with this key (an optimizer's state has its parameter's), without the wrapper's prefix, and the
// parameter's stored shape. `stored` tells whether the norm before experts is part of another tensor.
Stack stack_of(const Catalog& stored, const std::string& wrapper, std::string_view key, const Dims& shape);

// Whether there are no more layers and experts than a model has, and than the pieces can be of.
bool can_split(const Tensor& tensor, const Stack& stack, const Dims& shape);

// "chained_1." stands before the state of the second of several optimizers, which have different parameters.
std::string_view without_chain(std::string_view name);
Index parse_chain(std::string_view name);  // 0 without one

}  // namespace reshard::megatron
