// Llama 2 and 3, and Mistral, which has the same parameters. transformers/models/llama/modeling_llama.py.
#include "lib/model/namings.h"

namespace reshard {
namespace {

using enum Rows;
using enum NameRule::Place;

constexpr NameRule kRules[] = {
    {.hf = "model.embed_tokens.weight", .shape = "vocab_size, hidden_size", .tp_dim = 0, .place = kFirst},
    {.hf = "model.layers.{}.self_attn.q_proj.weight",
     .shape = "num_attention_heads*head_dim, hidden_size",
     .rows = kRotaryQuery,
     .tp_dim = 0,
     .heads = "num_attention_heads"},
    {.hf = "model.layers.{}.self_attn.k_proj.weight",
     .shape = "num_key_value_heads*head_dim, hidden_size",
     .rows = kRotaryKey,
     .tp_dim = 0,
     .heads = "num_key_value_heads"},
    {.hf = "model.layers.{}.self_attn.v_proj.weight",
     .shape = "num_key_value_heads*head_dim, hidden_size",
     .tp_dim = 0,
     .heads = "num_key_value_heads"},
    {.hf = "model.layers.{}.self_attn.o_proj.weight",
     .shape = "hidden_size, num_attention_heads*head_dim",
     .tp_dim = 1,
     .heads = "num_attention_heads"},
    {.hf = "model.layers.{}.mlp.gate_proj.weight", .shape = "intermediate_size, hidden_size", .tp_dim = 0},
    {.hf = "model.layers.{}.mlp.down_proj.weight", .shape = "hidden_size, intermediate_size", .tp_dim = 1},
    {.hf = "model.layers.{}.mlp.up_proj.weight", .shape = "intermediate_size, hidden_size", .tp_dim = 0},
    {.hf = "model.layers.{}.input_layernorm.weight", .shape = "hidden_size"},
    {.hf = "model.layers.{}.post_attention_layernorm.weight", .shape = "hidden_size"},
    {.hf = "model.norm.weight", .shape = "hidden_size", .place = kLast},
    {.hf = "lm_head.weight",
     .shape = "vocab_size, hidden_size",
     .tp_dim = 0,
     .place = kLast,
     .tied_to = "model.embed_tokens.weight"},
    {.hf = "model.layers.{}.self_attn.q_proj.bias",
     .shape = "num_attention_heads*head_dim",
     .tp_dim = 0,
     .heads = "num_attention_heads",
     .when = "attention_bias"},
    {.hf = "model.layers.{}.self_attn.k_proj.bias",
     .shape = "num_key_value_heads*head_dim",
     .tp_dim = 0,
     .heads = "num_key_value_heads",
     .when = "attention_bias"},
    {.hf = "model.layers.{}.self_attn.v_proj.bias",
     .shape = "num_key_value_heads*head_dim",
     .tp_dim = 0,
     .heads = "num_key_value_heads",
     .when = "attention_bias"},
    {.hf = "model.layers.{}.self_attn.o_proj.bias", .shape = "hidden_size", .when = "attention_bias"},
    {.hf = "model.layers.{}.mlp.gate_proj.bias", .shape = "intermediate_size", .tp_dim = 0, .when = "mlp_bias"},
    {.hf = "model.layers.{}.mlp.up_proj.bias", .shape = "intermediate_size", .tp_dim = 0, .when = "mlp_bias"},
    {.hf = "model.layers.{}.mlp.down_proj.bias", .shape = "hidden_size", .when = "mlp_bias"},
    {.hf = "model.layers.{}.self_attn.rotary_emb.inv_freq", .rows = kDropped},
};

constexpr auto kTitan = rules::join(rules::kTitanCommon, rules::kTitanProjections, rules::kTitanHead);
constexpr auto kTitan2026 = rules::join(rules::kTitanCommon, rules::kTitanProjections2026, rules::kTitanHead2026);
constexpr auto kMegatron =
    rules::join(rules::kMegatronEnds, rules::kMegatronAttention, rules::kMegatronAttentionBiases, rules::kMegatronMlp,
                std::to_array<StoredRule>({
                    {"decoder.layers.{}.mlp.linear_fc1.bias",
                     Form::kSections,
                     {"model.layers.{}.mlp.gate_proj.bias", "model.layers.{}.mlp.up_proj.bias"}},
                    {"decoder.layers.{}.mlp.linear_fc2.bias", Form::kSame, {"model.layers.{}.mlp.down_proj.bias"}},
                }));
constexpr ConventionTable kConventionTables[] = {
    {Convention::kTorchtitan, kTitan}, {Convention::kTorchtitan2026, kTitan2026}, {Convention::kMegatron, kMegatron}};

constexpr std::string_view kLlamaTypes[] = {"llama"};
constexpr std::string_view kMistralTypes[] = {"mistral"};
constexpr ConfigDefault kMistralDefaults[] = {{"num_key_value_heads", "8"}};

}  // namespace

const Family kLlamaFamily = {"llama", "Llama", kLlamaTypes, {}, kRules, {}, kConventionTables};
const Family kMistralFamily = {"mistral", "Mistral", kMistralTypes, kMistralDefaults, kRules, {}, kConventionTables};

}  // namespace reshard
