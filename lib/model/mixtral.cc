// Mixtral: Mistral's attention, and experts in every layer. transformers/models/mixtral; the names are those of its
// files, where each expert has its own three matrices (transformers 5 stacks them in memory).
#include "lib/model/namings.h"

namespace reshard {
namespace {

constexpr auto kRules = rules::join(rules::kEnds, rules::kNorms, rules::kAttention,
                                    std::to_array<NameRule>({
                                        {.hf = "model.layers.{}.block_sparse_moe.gate.weight",
                                         .shape = "num_experts, hidden_size",
                                         .layers = Layers::kSparse},
                                        {.hf = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
                                         .shape = "intermediate_size, hidden_size",
                                         .tp_dim = 0,
                                         .layers = Layers::kSparse,
                                         .quantized = true},
                                        {.hf = "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
                                         .shape = "hidden_size, intermediate_size",
                                         .tp_dim = 1,
                                         .layers = Layers::kSparse,
                                         .quantized = true},
                                        {.hf = "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
                                         .shape = "intermediate_size, hidden_size",
                                         .tp_dim = 0,
                                         .layers = Layers::kSparse,
                                         .quantized = true},
                                    }));

constexpr auto kMegatron =
    rules::join(rules::kMegatronEnds, rules::kMegatronAttention,
                rules::megatron_experts("model.layers.{}.block_sparse_moe.gate.weight",
                                        "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
                                        "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
                                        "model.layers.{}.block_sparse_moe.experts.{}.w2.weight"));
constexpr ConventionTable kConventionTables[] = {{Convention::kMegatron, kMegatron}};

constexpr std::string_view kModelTypes[] = {"mixtral"};
constexpr ConfigDefault kDefaults[] = {
    {"num_key_value_heads", "8"}, {"num_experts", "num_local_experts"}, {"num_experts", "8"}};

}  // namespace

const Family kMixtralFamily = {"mixtral", "Mixtral", kModelTypes, kDefaults, kRules, {}, kConventionTables};

}  // namespace reshard
