// SPDX-License-Identifier: Apache-2.0
#include "formats/megatron/arguments.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "formats/megatron/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/layout/layout.h"
#include "lib/model/config.h"

namespace reshard::megatron {

using pickle::Kind;
using pickle::Value;

Arguments Arguments::read(Value value) {
  Arguments out;
  const Value members = value.kind() == Kind::kObject ? value.state() : value;
  if (members.kind() != Kind::kDict) return out;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto name = members.key(i).as_string();
    if (!name) continue;
    const Value v = members.value(i);
    std::string key(*name);
    if (const auto flag = v.as_bool())
      out.values_.insert_or_assign(std::move(key), *flag);
    else if (const auto number = v.as_int())
      out.values_.insert_or_assign(std::move(key), *number);
    else if (const auto real = v.as_float())
      out.values_.insert_or_assign(std::move(key), *real);
    else if (const auto text = v.as_string())
      out.values_.insert_or_assign(std::move(key), std::string(*text));
  }
  return out;
}

std::vector<std::pair<std::string, Value>> sample_counts(Value state) {
  std::vector<std::pair<std::string, Value>> out;
  const auto args = state.kind() == Kind::kDict ? state.find("args") : std::nullopt;
  const auto members = args && args->kind() == Kind::kObject ? std::optional(args->state()) : args;
  if (!members || members->kind() != Kind::kDict) return out;
  for (const std::string_view name : kSampleCounts)
    if (const auto count = members->find(name); count && count->as_int()) out.emplace_back(name, *count);
  return out;
}

std::optional<Index> Arguments::number(std::string_view name) const {
  const auto found = values_.find(name);
  const auto* n = found == values_.end() ? nullptr : std::get_if<Index>(&found->second);
  return n != nullptr && *n > 0 ? std::optional<Index>(*n) : std::nullopt;
}

std::optional<double> Arguments::real(std::string_view name) const {
  const auto found = values_.find(name);
  if (found == values_.end()) return std::nullopt;
  if (const auto* n = std::get_if<Index>(&found->second)) return static_cast<double>(*n);
  const auto* x = std::get_if<double>(&found->second);
  return x != nullptr ? std::optional<double>(*x) : std::nullopt;
}

bool Arguments::flag(std::string_view name) const {
  const auto found = values_.find(name);
  const auto* b = found == values_.end() ? nullptr : std::get_if<bool>(&found->second);
  return b != nullptr && *b;
}

std::string Arguments::text(std::string_view name) const {
  const auto found = values_.find(name);
  const auto* s = found == values_.end() ? nullptr : std::get_if<std::string>(&found->second);
  return s != nullptr ? *s : std::string();
}

void Arguments::write_members(pickle::PickleWriter& w) const {
  pickle::Dict members(w);
  for (const auto& [name, value] : values_)
    if (const auto* flag = std::get_if<bool>(&value))
      members.flag(name, *flag);
    else if (const auto* n = std::get_if<Index>(&value))
      members.integer(name, *n);
    else if (const auto* x = std::get_if<double>(&value))
      members.number(name, *x);
    else
      members.text(name, std::get<std::string>(value));
}

void Arguments::write(pickle::PickleWriter& w) const {
  w.global("argparse", "Namespace");
  w.empty_tuple();
  w.new_object();
  write_members(w);
  w.build();
}

Result<Degrees> degrees_of(const Arguments& args) {
  Degrees out;
  const auto degree = [&](std::string_view name, Index otherwise) { return args.number(name).value_or(otherwise); };
  out.tp = degree("tensor_model_parallel_size", 1);
  out.pp = degree("pipeline_model_parallel_size", 1);
  out.vpp = degree("virtual_pipeline_model_parallel_size", 1);
  out.ep = degree("expert_model_parallel_size", 1);
  out.etp = degree("expert_tensor_parallel_size", out.tp);
  out.dp = degree("data_parallel_size", 1);
  for (const Index n : {out.tp, out.pp, out.vpp, out.ep, out.etp, out.dp})
    if (n > kMaxMeshRanks)
      return corrupt("args: expected degrees of parallelism of at most " + with_commas(kMaxMeshRanks) + ", got " +
                     with_commas(n));
  if (out.tp % out.etp != 0)
    return unsupported("args: an expert_tensor_parallel_size of " + std::to_string(out.etp) +
                       ", which does not divide the tensor_model_parallel_size of " + std::to_string(out.tp));
  return out;
}

std::string mesh_text(const Degrees& d) {
  std::vector<std::string> out;
  if (d.pp > 1) out.push_back("pp=" + std::to_string(d.pp));
  if (d.vpp > 1) out.push_back("chunks of a stage=" + std::to_string(d.vpp));
  if (d.dp > 1) out.push_back("dp=" + std::to_string(d.dp));
  if (d.tp > 1) out.push_back("tp=" + std::to_string(d.tp));
  if (d.ep > 1) out.push_back("ep=" + std::to_string(d.ep));
  if (d.etp != d.tp) out.push_back("the experts' tp=" + std::to_string(d.etp));
  return out.empty() ? "one rank" : join(out, ", ");
}

Index vocabulary_of(const Arguments& args, const Catalog& catalog) {
  const auto words = args.number("vocab_size");
  const auto embedding = catalog.find(kEmbedding);
  if (!words || !embedding) return 0;
  const Dims& shape = catalog.tensors()[*embedding].shape;
  return shape.rank() > 0 && shape[0] >= *words ? *words : 0;
}

std::string vocabulary_text(const Arguments& args, const Catalog& catalog) {
  const Index words = vocabulary_of(args, catalog);
  if (words == 0) return {};
  const Index rows = catalog.tensors()[*catalog.find(kEmbedding)].shape[0];
  return rows > words ? "; " + count_of(words, "token") + ", padded to " + count_of(rows, "row") : std::string();
}

namespace {

// Returns a feature of the model that no family has, or an empty text.
std::string unknown_part(const Arguments& args) {
  const auto differs = [&](std::string_view name, std::string_view usual) {
    const std::string is = args.text(name);
    return !is.empty() && is != usual;
  };
  if (differs("position_embedding_type", "rope"))
    return "position_embedding_type is " + args.text("position_embedding_type");
  if (differs("normalization", "RMSNorm")) return "normalization is " + args.text("normalization");
  if (!args.flag("swiglu")) return "its MLP is not SwiGLU";
  if (args.real("rotary_percent").value_or(1) != 1) return "rotary_percent is not 1";
  static constexpr std::array<std::string_view, 10> kFlags = {"multi_latent_attention",
                                                              "rotary_interleaved",
                                                              "layernorm_zero_centered_gamma",
                                                              "qk_l2_norm",
                                                              "moe_shared_expert_gate",
                                                              "apply_residual_connection_post_layernorm",
                                                              "is_hybrid_model",
                                                              "moe_router_enable_expert_bias",
                                                              "apply_layernorm_1p",
                                                              "experimental_attention_variant"};
  for (const std::string_view name : kFlags)
    if (args.flag(name)) return std::string(name) + " is set";
  static constexpr std::array<std::string_view, 4> kNumbers = {"moe_shared_expert_intermediate_size", "mtp_num_layers",
                                                               "moe_latent_size", "window_size"};
  for (const std::string_view name : kNumbers)
    if (args.number(name)) return std::string(name) + " is " + std::to_string(*args.number(name));
  return {};
}

}  // namespace

MadeConfig make_config(const Arguments& args, const Catalog& catalog) {
  if (args.empty()) return {std::nullopt, "the checkpoint has no args"};
  static constexpr std::array<std::string_view, 4> kNeeded = {"hidden_size", "num_layers", "num_attention_heads",
                                                              "ffn_hidden_size"};
  // Megatron-SWIFT saves arguments of the training alone.
  if (std::none_of(kNeeded.begin(), kNeeded.end(), [&](std::string_view name) { return args.number(name); }))
    return {std::nullopt,
            "args does not describe the model (no hidden_size, num_layers, num_attention_heads or "
            "ffn_hidden_size)"};
  if (const std::string unknown = unknown_part(args); !unknown.empty()) return {std::nullopt, unknown};
  const auto has = [&](std::string_view ending) {
    return std::any_of(catalog.tensors().begin(), catalog.tensors().end(), [&](const Tensor& t) {
      return t.name.ends_with(ending) && split_state_key(t.name).kind == StateKind::kModel;
    });
  };
  const bool has_experts = args.number("num_experts").has_value();
  const bool has_qkv_bias = has("self_attention.linear_qkv.bias"),
             has_qk_norm = has("self_attention.q_layernorm.weight");
  if (has("self_attention.linear_proj.bias") || has("mlp.linear_fc1.bias") || has("mlp.linear_fc2.bias"))
    return {std::nullopt, "its linear layers have biases"};
  if (has_qkv_bias && (has_qk_norm || has_experts))
    return {std::nullopt, "its queries have biases together with norms or experts"};
  if (has_experts && (has("mlp.linear_fc1.weight") || has("mlp.linear_fc2.weight")))
    return {std::nullopt, "some of its layers have experts and others do not (moe_layer_freq)"};

  const auto need = [&](std::string_view name) { return args.number(name); };
  for (const std::string_view name : kNeeded)
    if (!need(name)) return {std::nullopt, "args has no " + std::string(name)};
  const auto embedding = catalog.find(kEmbedding);
  if (!embedding || catalog.tensors()[*embedding].shape.rank() != 2) return {std::nullopt, "it has no embedding"};
  const Tensor& words = catalog.tensors()[*embedding];

  const std::string_view type = has_experts    ? (has_qk_norm ? "qwen3_moe" : "mixtral")
                                : has_qk_norm  ? "qwen3"
                                : has_qkv_bias ? "qwen2"
                                               : "llama";
  const std::string_view architecture = type == "qwen3_moe" ? "Qwen3MoeForCausalLM"
                                        : type == "mixtral" ? "MixtralForCausalLM"
                                        : type == "qwen3"   ? "Qwen3ForCausalLM"
                                        : type == "qwen2"   ? "Qwen2ForCausalLM"
                                                            : "LlamaForCausalLM";
  const Index heads = *need("num_attention_heads"), hidden = *need("hidden_size");
  const Index groups = args.flag("group_query_attention") ? need("num_query_groups").value_or(heads) : heads;
  const Index ffn = *need("ffn_hidden_size"), expert_ffn = need("moe_ffn_hidden_size").value_or(ffn);
  Json architectures = Json::array();
  architectures.push_back(architecture);
  Json config = Json::object();
  config.set("architectures", std::move(architectures));
  if (type != "mixtral") config.set("attention_bias", type == "qwen2");
  config.set("head_dim", need("kv_channels").value_or(hidden / heads))
      .set("hidden_act", "silu")
      .set("hidden_size", hidden)
      .set("intermediate_size", type == "mixtral" ? expert_ffn : ffn)
      .set("max_position_embeddings", need("max_position_embeddings").value_or(4096));
  if (type == "llama") config.set("mlp_bias", false);
  config.set("model_type", type);
  if (has_experts) {
    const Index topk = need("moe_router_topk").value_or(2);
    if (type == "qwen3_moe") {
      config.set("decoder_sparse_step", 1)
          .set("moe_intermediate_size", expert_ffn)
          .set("norm_topk_prob", !args.flag("moe_router_pre_softmax"))
          .set("num_experts", *need("num_experts"));
    } else {
      config.set("num_local_experts", *need("num_experts"));
    }
    config.set("num_experts_per_tok", topk);
  }
  const auto epsilon = args.real("norm_epsilon");
  config.set("num_attention_heads", heads)
      .set("num_hidden_layers", *need("num_layers"))
      .set("num_key_value_heads", groups)
      .set("rms_norm_eps", epsilon ? *epsilon : args.real("layernorm_epsilon").value_or(1e-5));
  if (args.flag("use_rope_scaling"))  // as in megatron/core/models/common/embeddings/rotary_pos_embedding.py
    config.set("rope_scaling", llama3_rope_scaling(args.real("rope_scaling_factor").value_or(8)));
  config.set("rope_theta", args.real("rotary_base").value_or(10'000))
      .set("tie_word_embeddings", !args.flag("untie_embeddings_and_output_weights"))
      .set("torch_dtype", info(words.model_dtype.value_or(words.dtype)).torch_name)
      .set("vocab_size", args.number("vocab_size").value_or(words.shape[0]));
  return {std::move(config), {}};
}

namespace {

// A model class that args can describe.
struct ModelType {
  std::string_view name;
  bool has_qkv_bias = false, has_qk_norm = false;
  std::string_view expert_ffn = {};  // the member with the width of an expert; empty without experts
  Index topk = 0;
  double rope_theta = 10'000;
};
constexpr std::array<ModelType, 6> kModelTypes = {{
    {"llama"},
    {"mistral"},
    {"qwen2", true},
    {"qwen3", false, true},
    {"mixtral", false, false, "intermediate_size", 2, 1'000'000},
    {"qwen3_moe", false, true, "moe_intermediate_size", 8},
}};

// Returns a setting of the rotary embedding. transformers 5 keeps these in rope_parameters.
const Json* rope_member(const Json& json, std::string_view name) {
  for (const std::string_view place : {"rope_parameters", "rope_scaling"})
    if (const Json* inner = json.find(place))
      if (const Json* member = inner->find(name)) return member;
  return json.find(name);
}

std::string_view text_of(const Json* member) {
  return member != nullptr && member->is_string() ? *member->as_string() : std::string_view();
}
double real_of(const Json* member, double otherwise) {
  return member != nullptr && member->is_number() ? *member->as_double() : otherwise;
}

// Returns a feature of a config that args cannot express, or an empty text.
std::string without_words(const Json& json, const ModelConfig& config, const ModelType& type) {
  if (config.number("mlp_bias") != 0 || (config.number("attention_bias") != 0 && !type.has_qkv_bias))
    return "its linear layers have biases";
  if (config.number("sliding_window") != 0 && config.find("use_sliding_window") != 0) return "sliding_window is set";
  for (Index i = 0; i < config.num_hidden_layers() && !type.expert_ffn.empty(); ++i)
    if (!config.is_sparse_layer(i)) return "some of its layers have experts and others do not";
  if (const auto act = text_of(json.find("hidden_act")); !act.empty() && act != "silu")
    return "hidden_act is " + printable(act);
  for (const std::string_view name : {"rope_type", "type"})
    if (const auto word = text_of(rope_member(json, name)); !word.empty() && word != "default" && word != "llama3")
      return "its rotary embedding is stretched (" + printable(word) + ")";
  return {};
}

}  // namespace

Result<Arguments> arguments_of(const Json& json) {
  const ModelConfig config = TRY(ModelConfig::parse(json, std::string(kConfigFile)));
  const auto* type = std::find_if(kModelTypes.begin(), kModelTypes.end(),
                                  [&](const ModelType& t) { return t.name == config.model_type; });
  if (type == kModelTypes.end())
    return unsupported("model_type '" + printable(config.model_type) + "': its Megatron args are unknown");
  TRY(config.check());
  if (const std::string why = without_words(json, config, *type); !why.empty())
    return unsupported("Megatron's args cannot describe this model: " + why);
  const auto flag = [&](std::string_view name) { return config.number(name) != 0; };
  Arguments out;
  out.set("num_layers", config.num_hidden_layers());
  out.set("hidden_size", config.hidden_size());
  out.set("ffn_hidden_size", config.number("intermediate_size"));
  out.set("num_attention_heads", config.num_attention_heads());
  out.set("group_query_attention", config.num_key_value_heads() != config.num_attention_heads());
  out.set("num_query_groups", config.num_key_value_heads());
  out.set("kv_channels", config.head_dim());
  out.set("max_position_embeddings", config.find("max_position_embeddings").value_or(4096));
  out.set("vocab_size", config.vocab_size());
  out.set("position_embedding_type", "rope");
  out.set("add_position_embedding",
          true);  // Megatron's default, which it compares on loading, although rope has no such embedding
  out.set("rotary_percent", 1.0);
  out.set("rotary_interleaved", false);
  const double theta = real_of(rope_member(json, "rope_theta"), type->rope_theta);
  if (theta == std::floor(theta) && theta > 0 && theta < 1e15)
    out.set("rotary_base", static_cast<Index>(theta));
  else
    out.set("rotary_base", theta);
  const bool is_stretched = text_of(rope_member(json, "rope_type")) == "llama3";
  out.set("use_rope_scaling", is_stretched);
  if (is_stretched) out.set("rope_scaling_factor", real_of(rope_member(json, "factor"), 8));
  out.set("norm_epsilon", real_of(json.find("rms_norm_eps"), 1e-6));
  out.set("normalization", "RMSNorm");
  out.set("apply_layernorm_1p", false);
  out.set("swiglu", true);
  out.set("squared_relu", false);
  out.set("add_bias_linear", false);
  out.set("add_qkv_bias", type->has_qkv_bias);
  out.set("qk_layernorm", type->has_qk_norm);
  out.set("attention_dropout", 0.0);
  out.set("hidden_dropout", 0.0);
  out.set("untie_embeddings_and_output_weights", !config.tie_word_embeddings());
  if (type->expert_ffn.empty()) return out;
  out.set("num_experts", config.number("num_experts"));
  out.set("moe_ffn_hidden_size", config.number(type->expert_ffn));
  out.set("moe_router_topk", config.find("num_experts_per_tok").value_or(type->topk));
  out.set("moe_router_pre_softmax", type->has_qk_norm && !flag("norm_topk_prob"));
  out.set("moe_router_score_function", "softmax");
  out.set("moe_grouped_gemm", true);
  out.set("moe_layer_freq", Index{1});
  return out;
}

}  // namespace reshard::megatron
