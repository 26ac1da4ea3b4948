// GPT-2. Its matrices are stored transposed, [in, out], so that columns are dimension 1; the query, key and value
// projections are one matrix, side by side. transformers/models/gpt2.
#include <array>

#include "lib/model/family.h"

namespace reshard {
namespace {

using enum NameRule::Place;

constexpr auto kRules = std::to_array<NameRule>({
    {.hf = "wte.weight", .shape = "vocab_size, hidden_size", .tp_dim = 0, .place = kFirst},
    {.hf = "wpe.weight", .shape = "max_position_embeddings, hidden_size", .place = kFirst},
    {.hf = "h.{}.ln_1.weight", .shape = "hidden_size"},
    {.hf = "h.{}.ln_1.bias", .shape = "hidden_size"},
    {.hf = "h.{}.attn.c_attn.weight",
     .shape = "hidden_size, 3*hidden_size",
     .tp_dim = 1,
     .heads = "num_attention_heads",
     .sections = 3},
    {.hf = "h.{}.attn.c_attn.bias",
     .shape = "3*hidden_size",
     .tp_dim = 0,
     .heads = "num_attention_heads",
     .sections = 3},
    {.hf = "h.{}.attn.c_proj.weight", .shape = "hidden_size, hidden_size", .tp_dim = 0, .heads = "num_attention_heads"},
    {.hf = "h.{}.attn.c_proj.bias", .shape = "hidden_size"},
    {.hf = "h.{}.ln_2.weight", .shape = "hidden_size"},
    {.hf = "h.{}.ln_2.bias", .shape = "hidden_size"},
    {.hf = "h.{}.mlp.c_fc.weight", .shape = "hidden_size, intermediate_size", .tp_dim = 1},
    {.hf = "h.{}.mlp.c_fc.bias", .shape = "intermediate_size", .tp_dim = 0},
    {.hf = "h.{}.mlp.c_proj.weight", .shape = "intermediate_size, hidden_size", .tp_dim = 0},
    {.hf = "h.{}.mlp.c_proj.bias", .shape = "hidden_size"},
    {.hf = "ln_f.weight", .shape = "hidden_size", .place = kLast},
    {.hf = "ln_f.bias", .shape = "hidden_size", .place = kLast},
    {.hf = "lm_head.weight", .shape = "vocab_size, hidden_size", .tp_dim = 0, .place = kLast, .tied_to = "wte.weight"},
    {.hf = "h.{}.attn.bias", .rows = Rows::kDropped},         // the causal mask, in files of old versions
    {.hf = "h.{}.attn.masked_bias", .rows = Rows::kDropped},  // likewise
});

// Megatron's matrices are [out, in], and the rows of its query, key and value stand together head by head.
constexpr auto kMegatron = std::to_array<StoredRule>({
    {"embedding.word_embeddings.weight", Form::kSame, {"wte.weight"}},
    {"embedding.position_embeddings.weight", Form::kSame, {"wpe.weight"}},
    {"decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight", Form::kSame, {"h.{}.ln_1.weight"}},
    {"decoder.layers.{}.self_attention.linear_qkv.layer_norm_bias", Form::kSame, {"h.{}.ln_1.bias"}},
    {"decoder.layers.{}.input_layernorm.weight", Form::kSame, {"h.{}.ln_1.weight"}},
    {"decoder.layers.{}.input_layernorm.bias", Form::kSame, {"h.{}.ln_1.bias"}},
    {"decoder.layers.{}.self_attention.linear_qkv.weight", Form::kTransposedQkv, {"h.{}.attn.c_attn.weight"}},
    {"decoder.layers.{}.self_attention.linear_qkv.bias", Form::kTransposedQkv, {"h.{}.attn.c_attn.bias"}},
    {"decoder.layers.{}.self_attention.linear_proj.weight", Form::kTransposed, {"h.{}.attn.c_proj.weight"}},
    {"decoder.layers.{}.self_attention.linear_proj.bias", Form::kSame, {"h.{}.attn.c_proj.bias"}},
    {"decoder.layers.{}.mlp.linear_fc1.layer_norm_weight", Form::kSame, {"h.{}.ln_2.weight"}},
    {"decoder.layers.{}.mlp.linear_fc1.layer_norm_bias", Form::kSame, {"h.{}.ln_2.bias"}},
    {"decoder.layers.{}.pre_mlp_layernorm.weight", Form::kSame, {"h.{}.ln_2.weight"}},
    {"decoder.layers.{}.pre_mlp_layernorm.bias", Form::kSame, {"h.{}.ln_2.bias"}},
    {"decoder.layers.{}.mlp.linear_fc1.weight", Form::kTransposed, {"h.{}.mlp.c_fc.weight"}},
    {"decoder.layers.{}.mlp.linear_fc1.bias", Form::kSame, {"h.{}.mlp.c_fc.bias"}},
    {"decoder.layers.{}.mlp.linear_fc2.weight", Form::kTransposed, {"h.{}.mlp.c_proj.weight"}},
    {"decoder.layers.{}.mlp.linear_fc2.bias", Form::kSame, {"h.{}.mlp.c_proj.bias"}},
    {"decoder.final_layernorm.weight", Form::kSame, {"ln_f.weight"}},
    {"decoder.final_layernorm.bias", Form::kSame, {"ln_f.bias"}},
    {"output_layer.weight", Form::kSame, {"lm_head.weight"}},
});
constexpr ConventionTable kConventionTables[] = {{Convention::kMegatron, kMegatron}};

constexpr std::string_view kModelTypes[] = {"gpt2"};
constexpr ConfigDefault kDefaults[] = {
    {"hidden_size", "n_embd"},
    {"num_attention_heads", "n_head"},
    {"num_hidden_layers", "n_layer"},
    {"max_position_embeddings", "n_positions"},
    {"max_position_embeddings", "1024"},
    {"intermediate_size", "n_inner"},
    {"intermediate_size", "4*hidden_size"},
    {"tie_word_embeddings", "1"},
};

}  // namespace

const Family kGpt2Family = {"gpt2", "GPT-2", kModelTypes, kDefaults, kRules, "transformer.", kConventionTables};

}  // namespace reshard
