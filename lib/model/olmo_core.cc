// SPDX-License-Identifier: Apache-2.0
#include "lib/model/olmo_core.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

Error no_such_model(const std::string& what) {
  return unsupported("OLMo-core's config describes a model that is not transformers' OLMo 2 or 3, which have no " +
                     what + "; give the model's own config.json with --config");
}

// Checks a member that says how a model computes. If it is absent or null, it has the first of the wanted values.
Status expect(const Json& of, std::string_view where, std::string_view key, const std::vector<std::string>& wanted) {
  const Json* const value = of.find(key);
  if (!value || value->is_null()) return {};
  const std::string got = value->is_string() ? std::string(*value->as_string()) : to_text(*value);
  if (std::find(wanted.begin(), wanted.end(), got) != wanted.end()) return {};
  return no_such_model(std::string(where) + "." + std::string(key) + " '" + printable(got) + "'");
}

// Fails if a member is set that the models in transformers do not have.
Status expect_none(const Json& of, std::string_view where, const std::vector<std::string_view>& keys) {
  for (const std::string_view key : keys) TRY(expect(of, where, key, {"false"}));
  return {};
}

Result<const Json*> object_at(const Json& of, std::string_view where, std::string_view key) {
  const Json* const value = of.find(key);
  if (!value || !value->is_object()) return no_such_model(std::string(where) + " without " + std::string(key));
  return value;
}

Result<double> norm_eps(const Json& of, std::string_view where, std::string_view key) {
  const Json& norm = *TRY(object_at(of, where, key));
  TRY(expect(norm, key, "name", {"rms", "fused_rms"}));
  TRY(expect(norm, key, "elementwise_affine", {"true"}));
  TRY(expect_none(norm, key, {"bias"}));
  constexpr double kUsual = 1e-5;  // the default of LayerNormConfig
  return norm.contains("eps") ? norm.find("eps")->as_double() : kUsual;
}

// The layer types (full attention or a window), and the size of the window.
struct Windows {
  Json types = Json::array();
  std::optional<Index> size;
};
Result<Windows> windows_of(const Json& config, Index layers) {
  Windows out;
  const auto pattern = TRY(config.get_array("pattern"));
  if (pattern.empty()) return no_such_model("empty pattern of windows");
  const auto is_forced = [&](std::string_view key) -> Result<bool> {
    return config.contains(key) ? config.get_bool(key) : Result<bool>(true);
  };
  const bool first = TRY(is_forced("force_full_attention_on_first_layer"));
  const bool last = TRY(is_forced("force_full_attention_on_last_layer"));
  for (Index layer = 0; layer < layers; ++layer) {
    const bool is_full = (first && layer == 0) || (last && layer == layers - 1);
    const auto at = static_cast<std::size_t>(layer - (first ? 1 : 0)) % pattern.size();
    const Index size = is_full ? -1 : TRY(pattern[at].as_index());
    out.types.push_back(size == -1 ? "full_attention" : "sliding_attention");
    if (size == -1) continue;
    if (out.size.value_or(size) != size) return no_such_model("windows of several sizes");
    out.size = size;
  }
  return out;
}

// Returns the scaling of rotary embeddings as transformers describes it, or null if there is none.
// (olmo_core/nn/rope.py, to_hf_config of each class)
Result<Json> rope_scaling(const Json* scaling) {
  if (!scaling || scaling->is_null()) return Json();
  TRY(expect(*scaling, "scaling", "attention_rescale_factor", {"1.0", "1"}));
  const auto number = [&](std::string_view key, double usual) {
    return scaling->contains(key) ? scaling->find(key)->as_double() : Result<double>(usual);
  };
  const auto whole = [&](std::string_view key, Index usual) {
    return scaling->contains(key) ? scaling->get_index(key) : Result<Index>(usual);
  };
  const std::string name(scaling->contains("_CLASS_") ? TRY(scaling->get_string("_CLASS_")) : "");
  const auto is = [&](std::string_view type) { return name.ends_with("." + std::string(type) + "RoPEScalingConfig"); };
  Json out = Json::object();
  if (is("YaRN")) {
    const double factor = TRY(number("factor", 8));
    return std::move(out.set("attention_factor", 0.1 * std::log(factor) + 1)
                         .set("beta_fast", TRY(whole("beta_fast", 32)))
                         .set("beta_slow", TRY(whole("beta_slow", 1)))
                         .set("factor", factor)
                         .set("original_max_position_embeddings", TRY(whole("old_context_len", 8192)))
                         .set("rope_type", "yarn"));
  }
  if (is("PI")) return std::move(out.set("factor", TRY(number("factor", 2))).set("rope_type", "linear"));
  if (is("Stepwise"))
    return std::move(out.set("factor", TRY(number("factor", 32)))
                         .set("high_freq_factor", 1 / TRY(number("high_freq_proportion", 0.25)))
                         .set("low_freq_factor", 1 / (1 - TRY(number("low_freq_proportion", 0))))
                         .set("original_max_position_embeddings", TRY(whole("old_context_len", 8192)))
                         .set("rope_type", "llama3"));
  return no_such_model("scaling of rotary embeddings " + printable(name));
}

// Returns whether two values are equal except for members of this name. Absent and null are the same.
bool are_same_but(const Json& a, const Json& b, std::string_view name) {
  if (!a.is_object() || !b.is_object()) return to_text(a) == to_text(b);
  const auto is_in = [&](const Json::Member& member, const Json& other) {
    static const Json none;
    const Json* const same = other.find(member.key);
    return member.key == name || are_same_but(member.value, same ? *same : none, name);
  };
  const auto all_are_in = [&](const Json& of, const Json& other) {
    const auto members = *of.as_object();
    return std::all_of(members.begin(), members.end(), [&](const Json::Member& m) { return is_in(m, other); });
  };
  return all_are_in(a, b) && all_are_in(b, a);
}

// Returns the scaling in layers with their own block, which must be all layers with full attention.
Result<Json> scaling_of_overrides(const Json& overrides, const Json& block, std::string_view mixer,
                                  const std::vector<bool>& is_full) {
  Json out;
  const auto members = TRY(overrides.as_object());
  for (const Json::Member& layer : members) {
    const auto number = is_digits(layer.key) ? parse_number(layer.key) : std::nullopt;
    const bool is_layer = number && *number < std::ssize(is_full) && is_full[*number];
    if (!is_layer || !are_same_but(layer.value, block, "scaling"))
      return no_such_model("block of its own in layer " + printable(layer.key));
    const Json scaling = TRY(rope_scaling(layer.value.find(mixer)->find("rope")->find("scaling")));
    if (&layer == members.data()) out = scaling;
    if (to_text(scaling) != to_text(out)) return no_such_model("scaling of rotary embeddings of several kinds");
  }
  const auto full = std::count(is_full.begin(), is_full.end(), true);
  if (!out.is_null() && std::ssize(members) != full)
    return no_such_model("scaling of rotary embeddings in some of the layers that attend to everything");
  return out;
}

Result<const Json*> only_block(const Json& model) {
  TRY(expect(model, "model", "name", {"default"}));
  TRY(expect_none(model, "model", {"block_pattern", "embedding_norm", "embed_scale"}));
  const Json* const block = TRY(object_at(model, "model", "block"));
  if (!block->contains("name")) return no_such_model("block without a name");
  TRY(expect(*block, "block", "name", {"reordered_norm"}));
  TRY(expect_none(*block, "block", {"feed_forward_moe", "attention_residual_alpha", "feed_forward_residual_alpha"}));
  return block;
}

std::string_view mixer_name(const Json& block) { return block.contains("attention") ? "attention" : "sequence_mixer"; }

Result<const Json*> only_attention(const Json& block) {
  const Json& mixer = *TRY(object_at(block, "block", mixer_name(block)));
  TRY(expect(mixer, "attention", "type", {"attention"}));
  TRY(expect(mixer, "attention", "name", {"default"}));
  TRY(expect_none(mixer, "attention",
                  {"bias", "gate", "clip_qkv", "use_head_qk_norm", "scalable_softmax", "attention_sinks",
                   "qk_norm_per_head_gains"}));
  const Json& rope = *TRY(object_at(mixer, "attention", "rope"));
  TRY(expect(rope, "rope", "name", {"default"}));
  TRY(expect(rope, "rope", "partial_rotary_factor", {"1.0", "1"}));
  TRY(expect_none(rope, "rope", {"no_global_rope"}));
  return &mixer;
}

}  // namespace

bool is_config_of_olmo_core(const Json& json) {
  const Json* const model = json.find("model");
  const Json* const of = model ? model->find("_CLASS_") : nullptr;
  return of && of->is_string() && of->as_string()->starts_with("olmo_core.");
}

Result<Json> config_of_olmo_core(const Json& json) {
  const Json& model = *json.find("model");
  const Json& block = *TRY(only_block(model));
  const Json& mixer = *TRY(only_attention(block));
  const Json& rope = *mixer.find("rope");
  const Json& network = *TRY(object_at(block, "block", "feed_forward"));
  TRY(expect(network, "feed_forward", "name", {"default"}));
  TRY(expect(network, "feed_forward", "activation", {"silu"}));
  TRY(expect_none(network, "feed_forward", {"bias"}));
  const Json& head = *TRY(object_at(model, "model", "lm_head"));
  TRY(expect(head, "lm_head", "name", {"default"}));
  TRY(expect_none(head, "lm_head", {"bias"}));
  const double eps = TRY(norm_eps(block, "block", "layer_norm"));
  if (TRY(norm_eps(mixer, "attention", "qk_norm")) != eps || TRY(norm_eps(head, "lm_head", "layer_norm")) != eps)
    return no_such_model("norms with an eps of their own");
  const Index layers = TRY(model.get_index("n_layers")), heads = TRY(mixer.get_index("n_heads"));
  constexpr Index kMostLayers = 100'000;
  if (layers < 1 || layers > kMostLayers) return no_such_model("n_layers " + std::to_string(layers));

  const auto or_null = [](const Json* of, std::string_view key) {
    const Json* const value = of ? of->find(key) : nullptr;
    return value ? *value : Json();
  };
  const auto has = [](const Json& of, std::string_view key) { return of.contains(key) && !of.find(key)->is_null(); };
  Windows windows;
  if (has(mixer, "sliding_window")) windows = TRY(windows_of(*mixer.find("sliding_window"), layers));
  const std::string version = windows.size ? "3" : "2";
  Json scaling = TRY(rope_scaling(rope.find("scaling")));
  if (!scaling.is_null() && windows.size) return no_such_model("scaled rotary embeddings in layers with windows");
  if (has(model, "block_overrides")) {
    if (!scaling.is_null()) return no_such_model("scaling of rotary embeddings of several kinds");
    std::vector<bool> is_full(layers, true);
    const auto types = TRY(windows.types.as_array());
    for (std::size_t i = 0; i < types.size(); ++i) is_full[i] = *types[i].as_string() == "full_attention";
    scaling = TRY(scaling_of_overrides(*model.find("block_overrides"), block, mixer_name(block), is_full));
  }
  const Json* const dataset = json.find("dataset");
  const Json* const tokenizer = dataset ? dataset->find("tokenizer") : nullptr;
  Json positions = or_null(json.find("train_module"), "max_sequence_length");
  if (positions.is_null()) positions = or_null(dataset, "sequence_length");

  Json architectures = Json::array();
  architectures.push_back("Olmo" + version + "ForCausalLM");
  Json out = Json::object();
  out.set("architectures", std::move(architectures))
      .set("attention_bias", false)
      .set("bos_token_id", or_null(tokenizer, "bos_token_id"))
      .set("eos_token_id", or_null(tokenizer, "eos_token_id"));
  if (has(mixer, "head_dim")) out.set("head_dim", TRY(mixer.get_index("head_dim")));
  out.set("hidden_act", "silu")
      .set("hidden_size", TRY(model.get_index("d_model")))
      .set("intermediate_size", TRY(network.get_index("hidden_size")));
  if (windows.size) out.set("layer_types", std::move(windows.types));
  if (!positions.is_null()) out.set("max_position_embeddings", TRY(positions.as_index()));
  out.set("model_type", "olmo" + version)
      .set("num_attention_heads", heads)
      .set("num_hidden_layers", layers)
      .set("num_key_value_heads", has(mixer, "n_kv_heads") ? TRY(mixer.get_index("n_kv_heads")) : heads)
      .set("pad_token_id", or_null(tokenizer, "pad_token_id"))
      .set("rms_norm_eps", eps);
  if (!scaling.is_null()) out.set("rope_scaling", std::move(scaling));
  out.set("rope_theta", has(rope, "theta") ? *rope.find("theta") : Json(500'000));
  if (windows.size) out.set("sliding_window", *windows.size);
  out.set("tie_word_embeddings", has(model, "tie_word_embeddings") ? TRY(model.get_bool("tie_word_embeddings")) : false)
      .set("torch_dtype", has(model, "dtype") ? *model.find("dtype") : Json("float32"))
      .set("vocab_size", TRY(model.get_index("vocab_size")));
  return out;
}

}  // namespace reshard
