// Bloom. Query, key and value are one matrix whose rows stand together head by head, so that a plain cut of its rows
// falls between heads. transformers/models/bloom.
#include <array>

#include "lib/model/family.h"

namespace reshard {
namespace {

using enum NameRule::Place;

constexpr auto kRules = std::to_array<NameRule>({
    {.hf = "word_embeddings.weight", .shape = "vocab_size, hidden_size", .tp_dim = 0, .place = kFirst},
    {.hf = "word_embeddings_layernorm.weight", .shape = "hidden_size", .place = kFirst},
    {.hf = "word_embeddings_layernorm.bias", .shape = "hidden_size", .place = kFirst},
    {.hf = "h.{}.input_layernorm.weight", .shape = "hidden_size"},
    {.hf = "h.{}.input_layernorm.bias", .shape = "hidden_size"},
    {.hf = "h.{}.self_attention.query_key_value.weight",
     .shape = "3*hidden_size, hidden_size",
     .tp_dim = 0,
     .heads = "num_attention_heads"},
    {.hf = "h.{}.self_attention.query_key_value.bias",
     .shape = "3*hidden_size",
     .tp_dim = 0,
     .heads = "num_attention_heads"},
    {.hf = "h.{}.self_attention.dense.weight",
     .shape = "hidden_size, hidden_size",
     .tp_dim = 1,
     .heads = "num_attention_heads"},
    {.hf = "h.{}.self_attention.dense.bias", .shape = "hidden_size"},
    {.hf = "h.{}.post_attention_layernorm.weight", .shape = "hidden_size"},
    {.hf = "h.{}.post_attention_layernorm.bias", .shape = "hidden_size"},
    {.hf = "h.{}.mlp.dense_h_to_4h.weight", .shape = "4*hidden_size, hidden_size", .tp_dim = 0},
    {.hf = "h.{}.mlp.dense_h_to_4h.bias", .shape = "4*hidden_size", .tp_dim = 0},
    {.hf = "h.{}.mlp.dense_4h_to_h.weight", .shape = "hidden_size, 4*hidden_size", .tp_dim = 1},
    {.hf = "h.{}.mlp.dense_4h_to_h.bias", .shape = "hidden_size"},
    {.hf = "ln_f.weight", .shape = "hidden_size", .place = kLast},
    {.hf = "ln_f.bias", .shape = "hidden_size", .place = kLast},
    {.hf = "lm_head.weight",
     .shape = "vocab_size, hidden_size",
     .tp_dim = 0,
     .place = kLast,
     .tied_to = "word_embeddings.weight"},
});

constexpr std::string_view kModelTypes[] = {"bloom"};
constexpr ConfigDefault kDefaults[] = {
    {"hidden_size", "n_embed"},
    {"num_attention_heads", "n_head"},
    {"num_hidden_layers", "n_layer"},
    {"intermediate_size", "4*hidden_size"},
    {"num_key_value_heads", "num_attention_heads"},
    {"tie_word_embeddings", "1"},
};

}  // namespace

const Family kBloomFamily = {"bloom", "Bloom", kModelTypes, kDefaults, kRules, "transformer."};

}  // namespace reshard
