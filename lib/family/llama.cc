// Llama 2 and 3, and Mistral, which has the same parameters, in torchtitan's and Hugging Face's words.
// torchtitan/models/llama3/model/state_dict_adapter.py, transformers/models/llama/modeling_llama.py; torchtitan's names
// changed in April 2026.
#include "lib/family/family.h"

namespace reshard {
namespace {

using enum Rows;
using enum NameRule::Place;

constexpr NameRule kRules[] = {
    {.hf = "model.embed_tokens.weight",
     .torchtitan = "tok_embeddings.weight",
     .torchtitan_2026 = "tok_embeddings.weight",
     .shape = "vocab_size, hidden_size",
     .tp_dim = 0,
     .place = kFirst},
    {.hf = "model.layers.{}.self_attn.q_proj.weight",
     .torchtitan = "layers.{}.attention.wq.weight",
     .torchtitan_2026 = "layers.{}.attention.qkv_linear.wq.weight",
     .shape = "num_attention_heads*head_dim, hidden_size",
     .rows = kRotaryQuery,
     .tp_dim = 0,
     .heads = "num_attention_heads"},
    {.hf = "model.layers.{}.self_attn.k_proj.weight",
     .torchtitan = "layers.{}.attention.wk.weight",
     .torchtitan_2026 = "layers.{}.attention.qkv_linear.wk.weight",
     .shape = "num_key_value_heads*head_dim, hidden_size",
     .rows = kRotaryKey,
     .tp_dim = 0,
     .heads = "num_key_value_heads"},
    {.hf = "model.layers.{}.self_attn.v_proj.weight",
     .torchtitan = "layers.{}.attention.wv.weight",
     .torchtitan_2026 = "layers.{}.attention.qkv_linear.wv.weight",
     .shape = "num_key_value_heads*head_dim, hidden_size",
     .tp_dim = 0,
     .heads = "num_key_value_heads"},
    {.hf = "", .torchtitan = "layers.{}.attention.qkv_linear.wqkv.weight", .rows = kFusedQkv, .tp_dim = 0},
    {.hf = "model.layers.{}.self_attn.o_proj.weight",
     .torchtitan = "layers.{}.attention.wo.weight",
     .torchtitan_2026 = "layers.{}.attention.wo.weight",
     .shape = "hidden_size, num_attention_heads*head_dim",
     .tp_dim = 1,
     .heads = "num_attention_heads"},
    {.hf = "model.layers.{}.mlp.gate_proj.weight",
     .torchtitan = "layers.{}.feed_forward.w1.weight",
     .torchtitan_2026 = "layers.{}.feed_forward.w1.weight",
     .shape = "intermediate_size, hidden_size",
     .tp_dim = 0},
    {.hf = "model.layers.{}.mlp.down_proj.weight",
     .torchtitan = "layers.{}.feed_forward.w2.weight",
     .torchtitan_2026 = "layers.{}.feed_forward.w2.weight",
     .shape = "hidden_size, intermediate_size",
     .tp_dim = 1},
    {.hf = "model.layers.{}.mlp.up_proj.weight",
     .torchtitan = "layers.{}.feed_forward.w3.weight",
     .torchtitan_2026 = "layers.{}.feed_forward.w3.weight",
     .shape = "intermediate_size, hidden_size",
     .tp_dim = 0},
    {.hf = "model.layers.{}.input_layernorm.weight",
     .torchtitan = "layers.{}.attention_norm.weight",
     .torchtitan_2026 = "layers.{}.attention_norm.weight",
     .shape = "hidden_size"},
    {.hf = "model.layers.{}.post_attention_layernorm.weight",
     .torchtitan = "layers.{}.ffn_norm.weight",
     .torchtitan_2026 = "layers.{}.ffn_norm.weight",
     .shape = "hidden_size"},
    {.hf = "model.norm.weight",
     .torchtitan = "norm.weight",
     .torchtitan_2026 = "norm.weight",
     .shape = "hidden_size",
     .place = kLast},
    {.hf = "lm_head.weight",
     .torchtitan = "output.weight",
     .torchtitan_2026 = "lm_head.weight",
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
    {.hf = "model.layers.{}.self_attn.rotary_emb.inv_freq", .torchtitan = "freqs_cis", .rows = kDropped},
};

constexpr std::string_view kLlamaTypes[] = {"llama"};
constexpr std::string_view kMistralTypes[] = {"mistral"};
constexpr ConfigDefault kMistralDefaults[] = {{"num_key_value_heads", "8"}};

}  // namespace

const Family kLlamaFamily = {"llama", "Llama", kLlamaTypes, {}, kRules};
const Family kMistralFamily = {"mistral", "Mistral", kMistralTypes, kMistralDefaults, kRules};

}  // namespace reshard
