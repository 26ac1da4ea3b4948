// Llama 2 and 3 in torchtitan's and Hugging Face's words. torchtitan/models/llama3/model/state_dict_adapter.py,
// transformers/models/llama/modeling_llama.py; torchtitan's names changed in April 2026.
#include <array>

#include "lib/family/family.h"

namespace reshard {
namespace {

using enum Rows;
using enum Size;
using Place = NameRule::Place;

constexpr std::array<NameRule, 14> kRules = {{
    {"model.embed_tokens.weight",
     "tok_embeddings.weight",
     "tok_embeddings.weight",
     kPlain,
     0,
     {kVocab, kHidden},
     Place::kFirst},
    {"model.layers.{}.self_attn.q_proj.weight",
     "layers.{}.attention.wq.weight",
     "layers.{}.attention.qkv_linear.wq.weight",
     kRotaryQuery,
     0,
     {kQuery, kHidden}},
    {"model.layers.{}.self_attn.k_proj.weight",
     "layers.{}.attention.wk.weight",
     "layers.{}.attention.qkv_linear.wk.weight",
     kRotaryKey,
     0,
     {kKeyValue, kHidden}},
    {"model.layers.{}.self_attn.v_proj.weight",
     "layers.{}.attention.wv.weight",
     "layers.{}.attention.qkv_linear.wv.weight",
     kPlain,
     0,
     {kKeyValue, kHidden}},
    {"", "layers.{}.attention.qkv_linear.wqkv.weight", "", kFusedQkv, 0, {kNone, kHidden}},
    {"model.layers.{}.self_attn.o_proj.weight",
     "layers.{}.attention.wo.weight",
     "layers.{}.attention.wo.weight",
     kPlain,
     1,
     {kHidden, kQuery}},
    {"model.layers.{}.mlp.gate_proj.weight",
     "layers.{}.feed_forward.w1.weight",
     "layers.{}.feed_forward.w1.weight",
     kPlain,
     0,
     {kIntermediate, kHidden}},
    {"model.layers.{}.mlp.down_proj.weight",
     "layers.{}.feed_forward.w2.weight",
     "layers.{}.feed_forward.w2.weight",
     kPlain,
     1,
     {kHidden, kIntermediate}},
    {"model.layers.{}.mlp.up_proj.weight",
     "layers.{}.feed_forward.w3.weight",
     "layers.{}.feed_forward.w3.weight",
     kPlain,
     0,
     {kIntermediate, kHidden}},
    {"model.layers.{}.input_layernorm.weight",
     "layers.{}.attention_norm.weight",
     "layers.{}.attention_norm.weight",
     kPlain,
     -1,
     {kHidden, kNone}},
    {"model.layers.{}.post_attention_layernorm.weight",
     "layers.{}.ffn_norm.weight",
     "layers.{}.ffn_norm.weight",
     kPlain,
     -1,
     {kHidden, kNone}},
    {"model.norm.weight", "norm.weight", "norm.weight", kPlain, -1, {kHidden, kNone}, Place::kLast},
    {"lm_head.weight", "output.weight", "lm_head.weight", kPlain, 0, {kVocab, kHidden}, Place::kLast},
    {"model.layers.{}.self_attn.rotary_emb.inv_freq", "freqs_cis", "", kDropped, -1, {kNone, kNone}},
}};

}  // namespace

const Family kLlamaFamily = {"llama", "Llama", "llama", kRules};

}  // namespace reshard
