// Names of other conventions than Hugging Face's, as far as several families share them; rules::join makes a table of
// parts. Of the names for one parameter the first is written.
//
//   torchtitan/models/{llama3,qwen3,deepseek_v3}/state_dict_adapter.py and its history: q, k and v moved under
//   qkv_linear in April 2026, the head became lm_head, and the experts' matrices moved twice until July.
//   megatron/core/models/gpt/gpt_model.py, with the modules of Transformer Engine (whose linear layers hold the norm
//   before them) and without. Layers are numbered through all stages.
#pragma once

#include "lib/model/rules.h"

namespace reshard::rules {

// ---- torchtitan, whatever the year

inline constexpr auto kTitanCommon = std::to_array<StoredRule>({
    {"tok_embeddings.weight", Form::kSame, {"model.embed_tokens.weight"}},
    {"layers.{}.attention.wo.weight", Form::kSame, {"model.layers.{}.self_attn.o_proj.weight"}},
    {"layers.{}.feed_forward.w1.weight", Form::kSame, {"model.layers.{}.mlp.gate_proj.weight"}},
    {"layers.{}.feed_forward.w2.weight", Form::kSame, {"model.layers.{}.mlp.down_proj.weight"}},
    {"layers.{}.feed_forward.w3.weight", Form::kSame, {"model.layers.{}.mlp.up_proj.weight"}},
    {"layers.{}.attention_norm.weight", Form::kSame, {"model.layers.{}.input_layernorm.weight"}},
    {"layers.{}.ffn_norm.weight", Form::kSame, {"model.layers.{}.post_attention_layernorm.weight"}},
    {"norm.weight", Form::kSame, {"model.norm.weight"}},
    {"freqs_cis", Form::kDropped},
});

inline constexpr auto kTitanQueryKeyNorms = std::to_array<StoredRule>({
    {"layers.{}.attention.q_norm.weight", Form::kSame, {"model.layers.{}.self_attn.q_norm.weight"}},
    {"layers.{}.attention.k_norm.weight", Form::kSame, {"model.layers.{}.self_attn.k_norm.weight"}},
});

inline constexpr auto kTitanRouter = std::to_array<StoredRule>({
    {"layers.{}.moe.router.gate.weight", Form::kSame, {"model.layers.{}.mlp.gate.weight"}},
});

// ---- torchtitan, until April 2026

inline constexpr auto kTitanHead = std::to_array<StoredRule>({{"output.weight", Form::kSame, {"lm_head.weight"}}});

inline constexpr auto kTitanProjections = std::to_array<StoredRule>({
    {"layers.{}.attention.wq.weight", Form::kSame, {"model.layers.{}.self_attn.q_proj.weight"}},
    {"layers.{}.attention.wk.weight", Form::kSame, {"model.layers.{}.self_attn.k_proj.weight"}},
    {"layers.{}.attention.wv.weight", Form::kSame, {"model.layers.{}.self_attn.v_proj.weight"}},
});

inline constexpr auto kTitanExperts = std::to_array<StoredRule>({
    {"layers.{}.moe.experts.w1", Form::kStacked, {"model.layers.{}.mlp.experts.{}.gate_proj.weight"}},
    {"layers.{}.moe.experts.w2", Form::kStacked, {"model.layers.{}.mlp.experts.{}.down_proj.weight"}},
    {"layers.{}.moe.experts.w3", Form::kStacked, {"model.layers.{}.mlp.experts.{}.up_proj.weight"}},
});

// ---- torchtitan since

inline constexpr auto kTitanHead2026 = std::to_array<StoredRule>({{"lm_head.weight", Form::kSame, {"lm_head.weight"}}});

inline constexpr auto kTitanProjections2026 = std::to_array<StoredRule>({
    {"layers.{}.attention.qkv_linear.wq.weight", Form::kSame, {"model.layers.{}.self_attn.q_proj.weight"}},
    {"layers.{}.attention.qkv_linear.wk.weight", Form::kSame, {"model.layers.{}.self_attn.k_proj.weight"}},
    {"layers.{}.attention.qkv_linear.wv.weight", Form::kSame, {"model.layers.{}.self_attn.v_proj.weight"}},
    {"layers.{}.attention.qkv_linear.wqkv.weight",
     Form::kQkvByGroup,
     {"model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.self_attn.k_proj.weight",
      "model.layers.{}.self_attn.v_proj.weight"}},
});

inline constexpr auto kTitanExperts2026 = std::to_array<StoredRule>({
    {"layers.{}.moe.routed_experts.inner_experts.w1_EFD",
     Form::kStacked,
     {"model.layers.{}.mlp.experts.{}.gate_proj.weight"}},
    {"layers.{}.moe.routed_experts.inner_experts.w2_EDF",
     Form::kStacked,
     {"model.layers.{}.mlp.experts.{}.down_proj.weight"}},
    {"layers.{}.moe.routed_experts.inner_experts.w3_EFD",
     Form::kStacked,
     {"model.layers.{}.mlp.experts.{}.up_proj.weight"}},
    {"layers.{}.moe.experts.w1_EFD", Form::kStacked, {"model.layers.{}.mlp.experts.{}.gate_proj.weight"}},
    {"layers.{}.moe.experts.w2_EDF", Form::kStacked, {"model.layers.{}.mlp.experts.{}.down_proj.weight"}},
    {"layers.{}.moe.experts.w3_EFD", Form::kStacked, {"model.layers.{}.mlp.experts.{}.up_proj.weight"}},
});

// ---- Megatron core

inline constexpr auto kMegatronEnds = std::to_array<StoredRule>({
    {"embedding.word_embeddings.weight", Form::kSame, {"model.embed_tokens.weight"}},
    {"decoder.final_layernorm.weight", Form::kSame, {"model.norm.weight"}},
    {"output_layer.weight", Form::kSame, {"lm_head.weight"}},
});

inline constexpr auto kMegatronAttention = std::to_array<StoredRule>({
    {"decoder.layers.{}.self_attention.linear_qkv.weight",
     Form::kQkvByGroup,
     {"model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.self_attn.k_proj.weight",
      "model.layers.{}.self_attn.v_proj.weight"}},
    {"decoder.layers.{}.self_attention.linear_proj.weight", Form::kSame, {"model.layers.{}.self_attn.o_proj.weight"}},
    {"decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight",
     Form::kSame,
     {"model.layers.{}.input_layernorm.weight"}},
    {"decoder.layers.{}.input_layernorm.weight", Form::kSame, {"model.layers.{}.input_layernorm.weight"}},
});

inline constexpr auto kMegatronAttentionBiases = std::to_array<StoredRule>({
    {"decoder.layers.{}.self_attention.linear_qkv.bias",
     Form::kQkvByGroup,
     {"model.layers.{}.self_attn.q_proj.bias", "model.layers.{}.self_attn.k_proj.bias",
      "model.layers.{}.self_attn.v_proj.bias"}},
    {"decoder.layers.{}.self_attention.linear_proj.bias", Form::kSame, {"model.layers.{}.self_attn.o_proj.bias"}},
});

inline constexpr auto kMegatronQueryKeyNorms = std::to_array<StoredRule>({
    {"decoder.layers.{}.self_attention.q_layernorm.weight", Form::kSame, {"model.layers.{}.self_attn.q_norm.weight"}},
    {"decoder.layers.{}.self_attention.k_layernorm.weight", Form::kSame, {"model.layers.{}.self_attn.k_norm.weight"}},
});

// A network in every layer, whose first matrix holds the norm before it.
inline constexpr auto kMegatronMlp = std::to_array<StoredRule>({
    {"decoder.layers.{}.mlp.linear_fc1.layer_norm_weight",
     Form::kSame,
     {"model.layers.{}.post_attention_layernorm.weight"}},
    {"decoder.layers.{}.pre_mlp_layernorm.weight", Form::kSame, {"model.layers.{}.post_attention_layernorm.weight"}},
    {"decoder.layers.{}.mlp.linear_fc1.weight",
     Form::kSections,
     {"model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"}},
    {"decoder.layers.{}.mlp.linear_fc2.weight", Form::kSame, {"model.layers.{}.mlp.down_proj.weight"}},
});

// Experts in every layer; `gate`, `up` and `down` are their matrices, `router` what chooses among them.
constexpr std::array<StoredRule, 6> megatron_experts(std::string_view router, std::string_view gate,
                                                     std::string_view up, std::string_view down) {
  return {{
      {"decoder.layers.{}.pre_mlp_layernorm.weight", Form::kSame, {"model.layers.{}.post_attention_layernorm.weight"}},
      {"decoder.layers.{}.mlp.router.weight", Form::kSame, {router}},
      {"decoder.layers.{}.mlp.experts.linear_fc1.weight{}", Form::kSections, {gate, up}},
      {"decoder.layers.{}.mlp.experts.linear_fc2.weight{}", Form::kSame, {down}},
      {"decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight", Form::kSections, {gate, up}},
      {"decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc2.weight", Form::kSame, {down}},
  }};
}

}  // namespace reshard::rules
