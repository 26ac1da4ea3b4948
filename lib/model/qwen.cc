// Qwen 2 (and 2.5), Qwen 3, and Qwen 3 with experts. transformers/models/{qwen2,qwen3,qwen3_moe}.
#include "lib/model/namings.h"

namespace reshard {
namespace {

constexpr auto kQwen2Rules =
    rules::join(rules::kEnds, rules::kNorms, rules::kAttention, rules::qkv_biases(""), rules::kMlp);
constexpr auto kQwen3Rules = rules::join(rules::kEnds, rules::kNorms, rules::kAttention, rules::kAttentionBiases,
                                         rules::kQueryKeyNorms, rules::kMlp);
constexpr auto kQwen3MoeRules = rules::join(kQwen3Rules, rules::kExperts);

// Torchtitan rotates Qwen's queries and keys as Hugging Face does: their rows are in the same order.
constexpr auto kTitan = rules::join(rules::kTitanCommon, rules::kTitanProjections, rules::kTitanHead,
                                    rules::kTitanQueryKeyNorms, rules::kTitanRouter, rules::kTitanExperts);
constexpr auto kTitan2026 = rules::join(rules::kTitanCommon, rules::kTitanProjections2026, rules::kTitanHead2026,
                                        rules::kTitanQueryKeyNorms, rules::kTitanRouter, rules::kTitanExperts2026);
constexpr auto kMegatronDense =
    rules::join(rules::kMegatronEnds, rules::kMegatronAttention, rules::kMegatronAttentionBiases,
                rules::kMegatronQueryKeyNorms, rules::kMegatronMlp);
constexpr auto kMegatronMoe = rules::join(
    rules::kMegatronEnds, rules::kMegatronAttention, rules::kMegatronAttentionBiases, rules::kMegatronQueryKeyNorms,
    rules::megatron_experts("model.layers.{}.mlp.gate.weight", "model.layers.{}.mlp.experts.{}.gate_proj.weight",
                            "model.layers.{}.mlp.experts.{}.up_proj.weight",
                            "model.layers.{}.mlp.experts.{}.down_proj.weight"));
constexpr ConventionTable kQwen2Conventions[] = {{Convention::kMegatron, kMegatronDense}};
constexpr ConventionTable kQwen3Conventions[] = {{Convention::kTorchtitan, kTitan},
                                                 {Convention::kTorchtitan2026, kTitan2026},
                                                 {Convention::kMegatron, kMegatronDense}};
constexpr ConventionTable kQwen3MoeConventions[] = {{Convention::kTorchtitan, kTitan},
                                                    {Convention::kTorchtitan2026, kTitan2026},
                                                    {Convention::kMegatron, kMegatronMoe}};

constexpr std::string_view kQwen2Types[] = {"qwen2"};
constexpr std::string_view kQwen3Types[] = {"qwen3"};
constexpr std::string_view kQwen3MoeTypes[] = {"qwen3_moe"};

constexpr ConfigDefault kQwen2Defaults[] = {{"num_key_value_heads", "32"}};
constexpr ConfigDefault kQwen3Defaults[] = {{"num_key_value_heads", "32"}, {"head_dim", "128"}};
constexpr ConfigDefault kQwen3MoeDefaults[] = {
    {"num_key_value_heads", "4"},
    {"num_experts", "num_local_experts"},
    {"num_experts", "128"},
    {"moe_intermediate_size", "768"},
};

}  // namespace

const Family kQwen2Family = {"qwen2", "Qwen 2", kQwen2Types, kQwen2Defaults, kQwen2Rules, {}, kQwen2Conventions};
const Family kQwen3Family = {"qwen3", "Qwen 3", kQwen3Types, kQwen3Defaults, kQwen3Rules, {}, kQwen3Conventions};
const Family kQwen3MoeFamily = {"qwen3_moe",    "Qwen 3 MoE", kQwen3MoeTypes,      kQwen3MoeDefaults,
                                kQwen3MoeRules, {},           kQwen3MoeConventions};

}  // namespace reshard
