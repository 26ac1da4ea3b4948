// GPT-2. Its matrices are stored transposed, [in, out], so that columns are dimension 1; the query, key and value
// projections are one matrix, side by side. transformers/models/gpt2.
#include <array>

#include "lib/family/family.h"

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

const Family kGpt2Family = {"gpt2", "GPT-2", kModelTypes, kDefaults, kRules, "transformer."};

}  // namespace reshard
