// Parts that the tables of several families have in common, in Hugging Face's words, and join(), which makes a table of
// parts. Which dimension tensor parallelism cuts is transformers' base_model_tp_plan.
#pragma once

#include <algorithm>
#include <array>

#include "lib/model/family.h"

namespace reshard::rules {

// One table of several parts.
template <class Rule, std::size_t... N>
constexpr auto join(const std::array<Rule, N>&... parts) {
  std::array<Rule, (N + ...)> out{};
  auto at = out.begin();
  ((at = std::copy(parts.begin(), parts.end(), at)), ...);
  return out;
}

// The embedding, the last norm, and the head.
inline constexpr auto kEnds = std::to_array<NameRule>({
    {.hf = "model.embed_tokens.weight",
     .shape = "vocab_size, hidden_size",
     .tp_dim = 0,
     .place = NameRule::Place::kFirst},
    {.hf = "model.norm.weight", .shape = "hidden_size", .place = NameRule::Place::kLast},
    {.hf = "lm_head.weight",
     .shape = "vocab_size, hidden_size",
     .tp_dim = 0,
     .place = NameRule::Place::kLast,
     .tied_to = "model.embed_tokens.weight"},
});

inline constexpr auto kNorms = std::to_array<NameRule>({
    {.hf = "model.layers.{}.input_layernorm.weight", .shape = "hidden_size"},
    {.hf = "model.layers.{}.post_attention_layernorm.weight", .shape = "hidden_size"},
});

inline constexpr auto kAttention = std::to_array<NameRule>({
    {.hf = "model.layers.{}.self_attn.q_proj.weight",
     .shape = "num_attention_heads*head_dim, hidden_size",
     .tp_dim = 0,
     .heads = "num_attention_heads",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.k_proj.weight",
     .shape = "num_key_value_heads*head_dim, hidden_size",
     .tp_dim = 0,
     .heads = "num_key_value_heads",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.v_proj.weight",
     .shape = "num_key_value_heads*head_dim, hidden_size",
     .tp_dim = 0,
     .heads = "num_key_value_heads",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.o_proj.weight",
     .shape = "hidden_size, num_attention_heads*head_dim",
     .tp_dim = 1,
     .heads = "num_attention_heads",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.rotary_emb.inv_freq", .rows = Rows::kDropped},
});

// The biases of q, k and v, under a condition or always ("").
constexpr std::array<NameRule, 3> qkv_biases(std::string_view when) {
  return {{
      {.hf = "model.layers.{}.self_attn.q_proj.bias",
       .shape = "num_attention_heads*head_dim",
       .tp_dim = 0,
       .heads = "num_attention_heads",
       .when = when},
      {.hf = "model.layers.{}.self_attn.k_proj.bias",
       .shape = "num_key_value_heads*head_dim",
       .tp_dim = 0,
       .heads = "num_key_value_heads",
       .when = when},
      {.hf = "model.layers.{}.self_attn.v_proj.bias",
       .shape = "num_key_value_heads*head_dim",
       .tp_dim = 0,
       .heads = "num_key_value_heads",
       .when = when},
  }};
}

// Those of all four projections.
inline constexpr auto kAttentionBiases =
    join(qkv_biases("attention_bias"),
         std::to_array<NameRule>(
             {{.hf = "model.layers.{}.self_attn.o_proj.bias", .shape = "hidden_size", .when = "attention_bias"}}));

// Norms over the width of one head.
inline constexpr auto kQueryKeyNorms = std::to_array<NameRule>({
    {.hf = "model.layers.{}.self_attn.q_norm.weight", .shape = "head_dim"},
    {.hf = "model.layers.{}.self_attn.k_norm.weight", .shape = "head_dim"},
});

// The feed-forward network of dense layers: of all of them where a model has no experts.
inline constexpr auto kMlp = std::to_array<NameRule>({
    {.hf = "model.layers.{}.mlp.gate_proj.weight",
     .shape = "intermediate_size, hidden_size",
     .tp_dim = 0,
     .layers = Layers::kDense,
     .quantized = true},
    {.hf = "model.layers.{}.mlp.up_proj.weight",
     .shape = "intermediate_size, hidden_size",
     .tp_dim = 0,
     .layers = Layers::kDense,
     .quantized = true},
    {.hf = "model.layers.{}.mlp.down_proj.weight",
     .shape = "hidden_size, intermediate_size",
     .tp_dim = 1,
     .layers = Layers::kDense,
     .quantized = true},
});

// The router of sparse layers, and their experts.
inline constexpr auto kExperts = std::to_array<NameRule>({
    {.hf = "model.layers.{}.mlp.gate.weight", .shape = "num_experts, hidden_size", .layers = Layers::kSparse},
    {.hf = "model.layers.{}.mlp.experts.{}.gate_proj.weight",
     .shape = "moe_intermediate_size, hidden_size",
     .tp_dim = 0,
     .layers = Layers::kSparse,
     .quantized = true},
    {.hf = "model.layers.{}.mlp.experts.{}.up_proj.weight",
     .shape = "moe_intermediate_size, hidden_size",
     .tp_dim = 0,
     .layers = Layers::kSparse,
     .quantized = true},
    {.hf = "model.layers.{}.mlp.experts.{}.down_proj.weight",
     .shape = "hidden_size, moe_intermediate_size",
     .tp_dim = 1,
     .layers = Layers::kSparse,
     .quantized = true},
});

}  // namespace reshard::rules
