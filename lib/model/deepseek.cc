// DeepSeek-V3 and R1: latent attention, where queries, keys and values come out of narrow projections; experts beside
// shared ones; layers after the last that predict a second token; matrices in FP8 as published.
// transformers/models/deepseek_v3, torchtitan/models/deepseek_v3 for tensor parallelism of the attention.
#include "lib/model/namings.h"

namespace reshard {
namespace {

constexpr auto kLatentAttention = std::to_array<NameRule>({
    {.hf = "model.layers.{}.self_attn.q_proj.weight",
     .shape = "num_attention_heads*qk_nope_head_dim + num_attention_heads*qk_rope_head_dim, hidden_size",
     .tp_dim = 0,
     .heads = "num_attention_heads",
     .when = "!q_lora_rank",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.q_a_proj.weight",
     .shape = "q_lora_rank, hidden_size",
     .when = "q_lora_rank",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.q_a_proj.bias", .shape = "q_lora_rank", .when = "attention_bias*q_lora_rank"},
    {.hf = "model.layers.{}.self_attn.q_a_layernorm.weight", .shape = "q_lora_rank", .when = "q_lora_rank"},
    {.hf = "model.layers.{}.self_attn.q_b_proj.weight",
     .shape = "num_attention_heads*qk_nope_head_dim + num_attention_heads*qk_rope_head_dim, q_lora_rank",
     .tp_dim = 0,
     .heads = "num_attention_heads",
     .when = "q_lora_rank",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight",
     .shape = "kv_lora_rank + qk_rope_head_dim, hidden_size",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.kv_a_proj_with_mqa.bias",
     .shape = "kv_lora_rank + qk_rope_head_dim",
     .when = "attention_bias"},
    {.hf = "model.layers.{}.self_attn.kv_a_layernorm.weight", .shape = "kv_lora_rank"},
    {.hf = "model.layers.{}.self_attn.kv_b_proj.weight",
     .shape = "num_attention_heads*qk_nope_head_dim + num_attention_heads*v_head_dim, kv_lora_rank",
     .tp_dim = 0,
     .heads = "num_attention_heads",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.o_proj.weight",
     .shape = "hidden_size, num_attention_heads*v_head_dim",
     .tp_dim = 1,
     .heads = "num_attention_heads",
     .quantized = true},
    {.hf = "model.layers.{}.self_attn.o_proj.bias", .shape = "hidden_size", .when = "attention_bias"},
    {.hf = "model.layers.{}.self_attn.rotary_emb.inv_freq", .rows = Rows::kDropped},
});

constexpr auto kSharedExperts = std::to_array<NameRule>({
    {.hf = "model.layers.{}.mlp.gate.e_score_correction_bias",
     .shape = "num_experts",
     .layers = Layers::kSparse,
     .dtype = "float32"},
    {.hf = "model.layers.{}.mlp.shared_experts.gate_proj.weight",
     .shape = "n_shared_experts*moe_intermediate_size, hidden_size",
     .tp_dim = 0,
     .layers = Layers::kSparse,
     .when = "n_shared_experts",
     .quantized = true},
    {.hf = "model.layers.{}.mlp.shared_experts.up_proj.weight",
     .shape = "n_shared_experts*moe_intermediate_size, hidden_size",
     .tp_dim = 0,
     .layers = Layers::kSparse,
     .when = "n_shared_experts",
     .quantized = true},
    {.hf = "model.layers.{}.mlp.shared_experts.down_proj.weight",
     .shape = "hidden_size, n_shared_experts*moe_intermediate_size",
     .tp_dim = 1,
     .layers = Layers::kSparse,
     .when = "n_shared_experts",
     .quantized = true},
});

// What the layers after the last have besides; the embedding and the head are copies of the model's.
constexpr auto kPrediction = std::to_array<NameRule>({
    {.hf = "model.layers.{}.embed_tokens.weight",
     .shape = "vocab_size, hidden_size",
     .tp_dim = 0,
     .layers = Layers::kPrediction},
    {.hf = "model.layers.{}.enorm.weight", .shape = "hidden_size", .layers = Layers::kPrediction},
    {.hf = "model.layers.{}.hnorm.weight", .shape = "hidden_size", .layers = Layers::kPrediction},
    {.hf = "model.layers.{}.eh_proj.weight", .shape = "hidden_size, 2*hidden_size", .layers = Layers::kPrediction},
    {.hf = "model.layers.{}.shared_head.norm.weight", .shape = "hidden_size", .layers = Layers::kPrediction},
    {.hf = "model.layers.{}.shared_head.head.weight",
     .shape = "vocab_size, hidden_size",
     .tp_dim = 0,
     .layers = Layers::kPrediction},
});

constexpr auto kRules = rules::join(rules::kEnds, rules::kNorms, kLatentAttention, rules::kMlp, rules::kExperts,
                                    kSharedExperts, kPrediction);

constexpr auto kTitanLatent = std::to_array<StoredRule>({
    {"layers.{}.attention.wq.weight", Form::kSame, {"model.layers.{}.self_attn.q_proj.weight"}},
    {"layers.{}.attention.wq_a.weight", Form::kSame, {"model.layers.{}.self_attn.q_a_proj.weight"}},
    {"layers.{}.attention.q_norm.weight", Form::kSame, {"model.layers.{}.self_attn.q_a_layernorm.weight"}},
    {"layers.{}.attention.wq_b.weight", Form::kSame, {"model.layers.{}.self_attn.q_b_proj.weight"}},
    {"layers.{}.attention.wkv_a.weight", Form::kSame, {"model.layers.{}.self_attn.kv_a_proj_with_mqa.weight"}},
    {"layers.{}.attention.kv_norm.weight", Form::kSame, {"model.layers.{}.self_attn.kv_a_layernorm.weight"}},
    {"layers.{}.attention.wkv_b.weight", Form::kSame, {"model.layers.{}.self_attn.kv_b_proj.weight"}},
    {"layers.{}.moe.shared_experts.w1.weight", Form::kSame, {"model.layers.{}.mlp.shared_experts.gate_proj.weight"}},
    {"layers.{}.moe.shared_experts.w2.weight", Form::kSame, {"model.layers.{}.mlp.shared_experts.down_proj.weight"}},
    {"layers.{}.moe.shared_experts.w3.weight", Form::kSame, {"model.layers.{}.mlp.shared_experts.up_proj.weight"}},
});
constexpr std::string_view kBias = "model.layers.{}.mlp.gate.e_score_correction_bias";
constexpr auto kTitan =
    rules::join(rules::kTitanCommon, rules::kTitanHead, rules::kTitanRouter, rules::kTitanExperts, kTitanLatent,
                std::to_array<StoredRule>({{"layers.{}.moe.expert_bias", Form::kSame, {kBias}}}));
constexpr auto kTitan2026 =
    rules::join(rules::kTitanCommon, rules::kTitanHead2026, rules::kTitanRouter, rules::kTitanExperts2026, kTitanLatent,
                std::to_array<StoredRule>({{"layers.{}.moe.expert_bias_E", Form::kSame, {kBias}}}));
constexpr ConventionTable kConventionTables[] = {{Convention::kTorchtitan, kTitan},
                                                 {Convention::kTorchtitan2026, kTitan2026}};

constexpr std::string_view kModelTypes[] = {"deepseek_v3"};
constexpr ConfigDefault kDefaults[] = {
    {"num_experts", "n_routed_experts"},
    {"num_experts", "256"},
    {"n_shared_experts", "1"},
    {"moe_intermediate_size", "2048"},
    {"first_k_dense_replace", "3"},
    {"q_lora_rank", "1536"},
    {"kv_lora_rank", "512"},
    {"qk_rope_head_dim", "64"},
    {"qk_nope_head_dim", "128"},
    {"v_head_dim", "128"},
    {"head_dim", "qk_rope_head_dim"},
    {"num_nextn_predict_layers", "num_mtp_layers"},
    {"num_nextn_predict_layers", "1"},
};

}  // namespace

const Family kDeepseekV3Family = {"deepseek_v3", "DeepSeek-V3", kModelTypes, kDefaults, kRules, {}, kConventionTables};

}  // namespace reshard
