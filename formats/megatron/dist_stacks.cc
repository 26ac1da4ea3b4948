// SPDX-License-Identifier: Apache-2.0
#include "formats/megatron/dist_stacks.h"

#include "formats/megatron/names.h"
#include "lib/base/text.h"

namespace reshard::megatron {

std::string_view without_chain(std::string_view name) {
  std::string_view rest = name;
  return take(rest, "chained_") && take_number(rest) && take(rest, ".") ? rest : name;
}

Index parse_chain(std::string_view name) { return take(name, "chained_") ? take_number(name).value_or(0) : 0; }

Stack stack_of(const Catalog& stored, const std::string& wrapper, std::string_view key, const Dims& shape) {
  Stack out;
  std::string_view rest = key;
  std::string prefix;
  if (take(rest, kLayers)) {
    out.before = kLayers;
    const std::string_view after = rest;
    if (const auto layer = take_number(rest); layer && take(rest, ".")) {
      out.before += std::to_string(*layer) + ".";
      prefix = out.before;
    } else {
      rest = after;
      out.by_layer = true;
      out.between = ".";
      prefix = kLayers;
    }
  }
  int axis = out.by_layer ? 1 : 0;
  constexpr std::string_view kNorm = "mlp.linear_fc1.layer_norm_", kExperts = "mlp.experts.experts.";
  std::string tail(rest);
  if (!prefix.empty() && rest.starts_with(kNorm) && !stored.find(wrapper + prefix + "mlp.linear_fc1.weight") &&
      !stored.find(wrapper + prefix + "mlp.linear_fc1.weight_w"))
    tail = "pre_mlp_layernorm." + std::string(rest.substr(kNorm.size()));  // the norm before experts
  std::string& last = out.by_layer || !prefix.empty() ? out.between : out.before;
  if (!prefix.empty() && rest.starts_with(kExperts)) {
    const std::string_view after = rest.substr(kExperts.size());
    std::string_view unnumbered = after;
    if (take_number(unnumbered)) {  // with singleton_local_shards: "experts.experts.3.linear_fc1.weight"
      out.between += "mlp.experts.local_experts.";
      out.after = after;
    } else if (const std::size_t at = after.find(".weight");
               at != std::string_view::npos && at + 7 < after.size() && is_digits(after.substr(at + 7, 1))) {
      out.between += "mlp.experts.";  // Transformer Engine's name: "experts.experts.linear_fc1.weight3"
      out.after = after;
    } else {
      out.between += "mlp.experts.local_experts.";
      out.by_expert = true;
      out.after = "." + std::string(after);
      ++axis;
    }
  } else {
    last += tail;
  }
  // With singleton_local_shards, gate and up are separate tensors.
  std::string& end = out.after.empty() ? last : out.after;
  for (const std::string_view half : {"_w", "_v"})
    if (end.ends_with(half) && key.find("linear_fc1.") != std::string_view::npos && shape.rank() > axis) {
      end.erase(end.size() - half.size());
      out.half = half == "_w" ? 0 : shape[axis];
    }
  return out;
}

bool can_split(const Tensor& tensor, const Stack& stack, const Dims& shape) {
  Index parts = 1;
  int axis = 0;
  for (const bool is_split : {stack.by_layer, stack.by_expert}) {
    if (!is_split) continue;
    if (shape.rank() <= axis || shape[axis] < 1 || shape[axis] > kMaxStack) return false;
    parts *= shape[axis++];
  }
  return volume(tensor.shape) > 0 && parts <= kPartsPerPiece * std::ssize(tensor.fragments);
}

}  // namespace reshard::megatron
