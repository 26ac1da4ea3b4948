// SPDX-License-Identifier: Apache-2.0
#include "formats/bin/nano_gpt.h"

#include <utility>

#include "lib/base/checked.h"

namespace reshard::bin {
namespace {

constexpr Index kEndOfText = 50'256;  // GPT-2's token, even if the vocabulary is padded

}  // namespace

std::optional<Json> config_of_nano_gpt(const pickle::Value& args, DType dtype) {
  const auto size = [&](std::string_view key) -> std::optional<Index> {
    const auto value = args.find(key);
    const auto n = value ? value->as_int() : std::nullopt;
    return n && *n > 0 ? n : std::nullopt;
  };
  const auto layers = size("n_layer"), heads = size("n_head"), width = size("n_embd"), positions = size("block_size"),
             words = size("vocab_size");
  const auto bias = args.find("bias"), dropout = args.find("dropout");
  const auto has_bias = bias ? bias->as_bool() : std::nullopt;
  if (!layers || !heads || !width || !positions || !words || !has_bias) return std::nullopt;
  const double dropped = dropout ? dropout->as_float().value_or(0) : 0;
  const Json end = *words > kEndOfText ? Json(kEndOfText) : Json();
  Json architectures = Json::array();
  architectures.push_back("GPT2LMHeadModel");
  Json config = Json::object();
  config
      .set("activation_function", "gelu")  // the exact GELU; GPT-2 uses "gelu_new"
      .set("architectures", std::move(architectures))
      .set("attn_pdrop", dropped);
  if (!*has_bias) config.set("bias", false);
  config.set("bos_token_id", end)
      .set("embd_pdrop", dropped)
      .set("eos_token_id", end)
      .set("layer_norm_epsilon", 1e-5)
      .set("model_type", "gpt2")
      .set("n_embd", *width)
      .set("n_head", *heads)
      .set("n_layer", *layers)
      .set("n_positions", *positions)
      .set("resid_pdrop", dropped)
      .set("tie_word_embeddings", true)
      .set("torch_dtype", info(dtype).torch_name)
      .set("vocab_size", *words);
  return config;
}

}  // namespace reshard::bin
