// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "formats/meta/meta.h"
#include "lib/base/checked.h"
#include "lib/base/text.h"
#include "lib/model/config.h"

namespace reshard::meta {
namespace {

constexpr Index kMaxSize = Index{1} << 40;
constexpr Index kLlama3Vocabulary = 128'256;

// Returns a positive number, or nothing if it is missing, null, or Meta's -1.
Result<std::optional<Index>> size_of(const Json& params, std::string_view key) {
  const Json* value = params.find(key);
  if (value == nullptr || value->is_null()) return std::optional<Index>();
  const Index n = TRY(value->as_index().context(std::string(key)));
  if (n > kMaxSize) return corrupt(std::string(key) + ": expected at most " + with_commas(kMaxSize));
  return n > 0 ? std::optional<Index>(n) : std::nullopt;
}

Result<Index> need(const Json& params, std::string_view key) {
  const auto n = TRY(size_of(params, key));
  if (!n) return corrupt(std::string(key) + ": expected a positive number, got none");
  return *n;
}

// Computes the hidden size as FeedForward in llama/model.py does.
Result<Index> hidden_size(const Json& params, Index dim) {
  const Index whole = 2 * (4 * dim) / 3;  // rounded down before the multiplier, as in llama/model.py
  auto hidden = static_cast<double>(whole);
  if (const Json* factor = params.find("ffn_dim_multiplier"); factor && !factor->is_null())
    hidden *= TRY(factor->as_double().context("ffn_dim_multiplier"));
  const Index multiple = TRY(need(params, "multiple_of"));
  if (!(hidden >= 1) || hidden > static_cast<double>(kMaxSize))
    return corrupt("ffn_dim_multiplier: " + std::to_string(hidden) + " hidden units");
  return *checked_round_up(static_cast<Index>(hidden), multiple);
}

Result<Index> vocabulary(const Json& params, const Catalog& catalog) {
  if (const auto stated = TRY(size_of(params, "vocab_size"))) return *stated;
  for (const std::string_view name : {"output.weight", "tok_embeddings.weight"})
    if (const auto found = catalog.find(name))
      if (const Tensor& t = catalog.tensors()[*found]; t.shape.rank() == 2) return t.shape[0];
  return corrupt("vocab_size: expected it here, or a tensor 'output.weight'");
}

}  // namespace

std::string unknown_part(const Json& params) {
  static constexpr std::array<std::string_view, 9> kOthers = {"moe",          "moe_args",          "vision_encoder",
                                                              "vision_args",  "vision_chunk_size", "lora_args",
                                                              "quantization", "quantization_args", "yarn"};
  for (const std::string_view key : kOthers)
    if (const Json* value = params.find(key); value && !value->is_null()) return std::string(key);
  return {};
}

Result<Json> make_config(const Json& params, const Catalog& catalog, const std::string& path) {
  const auto made = [&]() -> Result<Json> {
    const auto hidden = TRY(size_of(params, "hidden_dim"));
    const bool is_mistral = hidden.has_value();
    const Index dim = TRY(need(params, "dim")), heads = TRY(need(params, "n_heads"));
    const Index head_dim = TRY(size_of(params, "head_dim")).value_or(dim / heads);
    const Index words = TRY(vocabulary(params, catalog));
    const bool is_llama3 = !is_mistral && words == kLlama3Vocabulary;
    const Json* const flag = params.find("use_scaled_rope");
    const bool is_scaled = flag && flag->is_bool() && TRY(flag->as_bool());
    const Json *const theta = params.find("rope_theta"), *const epsilon = params.find("norm_eps");
    auto positions = TRY(size_of(params, "max_position_embeddings"));
    if (!positions) positions = TRY(size_of(params, "max_seq_len"));
    if (!positions) positions = is_mistral ? 32'768 : is_scaled ? 131'072 : is_llama3 ? 8192 : 4096;
    Json architectures = Json::array();
    architectures.push_back(is_mistral ? "MistralForCausalLM" : "LlamaForCausalLM");
    Json config = Json::object();
    config.set("architectures", std::move(architectures));
    if (!is_mistral) config.set("attention_bias", false);
    config.set("bos_token_id", is_llama3 ? 128'000 : 1)
        .set("eos_token_id", is_llama3 ? 128'001 : 2)
        .set("head_dim", head_dim)
        .set("hidden_act", "silu")
        .set("hidden_size", dim)
        .set("intermediate_size", hidden ? *hidden : TRY(hidden_size(params, dim)))
        .set("max_position_embeddings", *positions)
        .set("model_type", is_mistral ? "mistral" : "llama")
        .set("num_attention_heads", heads)
        .set("num_hidden_layers", TRY(need(params, "n_layers")))
        .set("num_key_value_heads", TRY(size_of(params, "n_kv_heads")).value_or(heads))
        .set("rms_norm_eps", epsilon && epsilon->is_number() ? *epsilon : Json(1e-5))
        .set("rope_theta", theta && theta->is_number() ? *theta : Json(10'000.0));
    // Llama 3.2's two small models use a larger factor (huggingface/transformers,
    // models/llama/convert_llama_weights_to_hf.py).
    if (is_scaled) config.set("rope_scaling", llama3_rope_scaling(dim <= 3072 ? 32 : 8));
    if (is_mistral) {
      const auto window = TRY(size_of(params, "sliding_window"));
      config.set("sliding_window", window ? Json(*window) : Json());
    }
    const auto norm = catalog.find("norm.weight");
    config.set("tie_word_embeddings", !catalog.find("output.weight"));
    if (norm) config.set("torch_dtype", info(catalog.tensors()[*norm].dtype).torch_name);
    config.set("vocab_size", words);
    return config;
  };
  return made().context(path);
}

}  // namespace reshard::meta
