// SPDX-License-Identifier: Apache-2.0
#include "formats/vllm/layout.h"

#include <algorithm>
#include <array>
#include <map>

#include "lib/base/text.h"
#include "lib/layout/stages.h"

namespace reshard::vllm {

enum class Cut {
  kWhole,
  kRows,        // equal parts of dimension 0
  kColumns,     // equal parts of dimension 1
  kQueryHeads,  // parts of dimension 0, cut between heads
  kKeyHeads,    // the same; with more workers than heads, several hold the same one
  kVocabulary,  // equal parts of dimension 0 after padding
};

// A parameter of a Hugging Face model, and vLLM's parameter that contains it.
struct Rule {
  std::string_view hf;
  std::string_view vllm;
  Cut cut = Cut::kWhole;
  int place = 0;  // position among the stacked parts
};

namespace {

constexpr Index kVocabularyUnit = 64;  // DEFAULT_VOCAB_PADDING_SIZE

// The parameters below "model.layers.N.".
constexpr std::array<Rule, 18> kLayerRules = {{
    {"self_attn.q_proj.weight", "self_attn.qkv_proj.weight", Cut::kQueryHeads, 0},
    {"self_attn.k_proj.weight", "self_attn.qkv_proj.weight", Cut::kKeyHeads, 1},
    {"self_attn.v_proj.weight", "self_attn.qkv_proj.weight", Cut::kKeyHeads, 2},
    {"self_attn.q_proj.bias", "self_attn.qkv_proj.bias", Cut::kQueryHeads, 0},
    {"self_attn.k_proj.bias", "self_attn.qkv_proj.bias", Cut::kKeyHeads, 1},
    {"self_attn.v_proj.bias", "self_attn.qkv_proj.bias", Cut::kKeyHeads, 2},
    {"self_attn.o_proj.weight", "self_attn.o_proj.weight", Cut::kColumns},
    {"self_attn.o_proj.bias", "self_attn.o_proj.bias"},
    {"self_attn.q_norm.weight", "self_attn.q_norm.weight"},
    {"self_attn.k_norm.weight", "self_attn.k_norm.weight"},
    {"mlp.gate_proj.weight", "mlp.gate_up_proj.weight", Cut::kRows, 0},
    {"mlp.up_proj.weight", "mlp.gate_up_proj.weight", Cut::kRows, 1},
    {"mlp.gate_proj.bias", "mlp.gate_up_proj.bias", Cut::kRows, 0},
    {"mlp.up_proj.bias", "mlp.gate_up_proj.bias", Cut::kRows, 1},
    {"mlp.down_proj.weight", "mlp.down_proj.weight", Cut::kColumns},
    {"mlp.down_proj.bias", "mlp.down_proj.bias"},
    {"input_layernorm.weight", "input_layernorm.weight"},
    {"post_attention_layernorm.weight", "post_attention_layernorm.weight"},
}};
constexpr std::array<Rule, 3> kOtherRules = {{
    {"model.embed_tokens.weight", "model.embed_tokens.weight", Cut::kVocabulary},
    {"model.norm.weight", "model.norm.weight"},
    {"lm_head.weight", "lm_head.weight", Cut::kVocabulary},
}};
// A worker's share of one dimension: [begin, begin + held) of the tensor, in a local extent of `length`.
struct Share {
  Index begin = 0;
  Index held = 0;
  Index length = 0;
};

Error refusal(const TargetTensor& tensor, const std::string& why) {
  return unsupported(tensor_text(tensor.name) + " " + to_string(tensor.shape) + ": " + why);
}

Result<Share> share(const LayoutRequest& request, const TargetTensor& t, Cut cut, Index worker) {
  const Index workers = request.mesh.size("tp");
  const int d = cut == Cut::kColumns ? 1 : 0;
  const Index size = t.shape[d];
  if (cut == Cut::kWhole) return Share{0, size, size};
  if (cut == Cut::kVocabulary) {
    const auto padded = checked_round_up(size, kVocabularyUnit);
    if (!padded || *padded % workers != 0)
      return refusal(t, "vLLM pads the vocabulary to a multiple of " + std::to_string(kVocabularyUnit) +
                            ", which tp=" + std::to_string(workers) + " does not divide");
    const Index length = *padded / workers, begin = std::min(size, worker * length);
    return Share{begin, std::min(size - begin, length), length};
  }
  Index parts = workers, part = worker;
  if (cut == Cut::kKeyHeads && request.heads && workers > request.heads->key_value) {
    parts = request.heads->key_value;
    part = worker / (workers / parts);
  }
  if (size % parts != 0)
    return refusal(t, "dimension " + std::to_string(d) + " is not divided by " + std::to_string(parts));
  return Share{part * (size / parts), size / parts, size / parts};
}

}  // namespace

namespace {

constexpr std::array<std::string_view, 4> kScales = {"_k_scale", "_prob_scale", "_q_scale", "_v_scale"};
constexpr std::string_view kAttention = ".self_attn.attn.";

}  // namespace

bool is_scale(std::string_view parameter) {
  const std::size_t at = parameter.find(kAttention);
  return at != std::string_view::npos &&
         std::find(kScales.begin(), kScales.end(), parameter.substr(at + kAttention.size())) != kScales.end();
}

std::vector<LocalTensor> scales_of(Index layer) {
  const std::string one("\0\0\x80\x3f", 4);
  std::vector<LocalTensor> out;
  for (const std::string_view scale : kScales)
    out.push_back({"model.layers." + std::to_string(layer) + std::string(kAttention) + std::string(scale),
                   DType::kFloat32,
                   {},
                   {},
                   one});
  return out;
}

std::optional<RuleMatch> find_rule(std::string_view name) {
  for (const Rule& rule : kOtherRules)
    if (rule.hf == name) return RuleMatch{&rule, std::string(rule.vllm)};
  const Index layer = layer_number(name);
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  if (layer < 0 || !name.starts_with(prefix)) return std::nullopt;
  for (const Rule& rule : kLayerRules)
    if (rule.hf == name.substr(prefix.size())) return RuleMatch{&rule, prefix + std::string(rule.vllm)};
  return std::nullopt;
}

Result<VllmLayout> VllmLayout::make(LayoutRequest request) {
  VllmLayout layout(std::move(request));
  TRY(layout.check());
  TRY(layout.stack());
  return layout;
}

Result<LocalTensor> VllmLayout::local(const Stack& p, Index rank) const {
  LocalTensor out;
  out.name = p.name;
  out.dtype = request_.tensors[p.tensors.front()].dtype;
  Index row = 0;
  for (const std::size_t i : p.tensors) {
    const TargetTensor& t = request_.tensors[i];
    const int d = rules_[i]->cut == Cut::kColumns ? 1 : 0;
    const Share mine = TRY(share(request_, t, rules_[i]->cut, rank));
    LocalPart part{i, {whole(t.shape), Dims::filled(t.shape.rank(), 0)}};
    part.place.box.origin[d] = mine.begin;
    part.place.box.shape[d] = mine.held;
    part.place.at[0] = row;
    out.shape = t.shape;
    out.shape[d] = mine.length;
    row += out.shape[0];
    out.parts.push_back(part);
  }
  out.shape[0] = row;
  const auto elements = checked_volume(out.shape);
  if (!elements || !checked_mul(*elements, byte_size(out.dtype)))
    return refusal(request_.tensors[p.tensors.front()], "2^63 bytes or more with its padding");
  return out;
}

Status VllmLayout::check() const {
  if (request_.mesh.ranks() != stages_ * ranks_)
    return unsupported(
        "vLLM names the files of sharded_state by pipeline stage and tensor-parallel rank: expected a "
        "mesh of pp and tp, got " +
        request_.mesh.to_string());
  if (request_.layout)
    return usage_error("--to vllm cuts tensors as vLLM does: expected --mesh tp=N and no layout, got '" +
                       printable(request_.layout->name) + "'");
  if (request_.container != Container::kSafetensors)
    return unsupported("vLLM's sharded_state is safetensors: --shard-format bin is for other formats");
  if (!request_.blobs.empty())
    return internal_error("vLLM's sharded_state holds tensors only: got object '" +
                          printable(request_.blobs.front().name) + "'");
  if (ranks_ == 1) return {};
  if (!request_.heads)
    return usage_error("--to vllm with tp=" + std::to_string(ranks_) +
                       " needs the number of attention heads, and no config.json gives it; add one with --config");
  const auto [query, key_value] = *request_.heads;
  const bool fits = query % ranks_ == 0 && (ranks_ >= key_value ? ranks_ % key_value == 0 : key_value % ranks_ == 0);
  if (fits) return {};
  return unsupported("vLLM does not run this model with tp=" + std::to_string(ranks_) + ": expected one that divides " +
                     std::to_string(query) + " attention heads, and divides or is a multiple of " +
                     std::to_string(key_value) + " key-value heads");
}

Index VllmLayout::stage_of(std::string_view parameter, Index layers) const {
  const Index layer = layer_number(parameter);
  if (layer >= 0) return stage_of_layer(StageRule::kVllm, layer, layers, stages_);
  return parameter == kEmbedding ? 0 : stages_ - 1;
}

Status VllmLayout::stack() {
  Index layers = 0;
  for (const TargetTensor& t : request_.tensors) layers = std::max(layers, layer_number(t.name) + 1);
  if (stages_ > 1) TRY(check_stages(StageRule::kVllm, layers, stages_));
  std::map<std::string, std::size_t> number;
  const bool tied = std::none_of(request_.tensors.begin(), request_.tensors.end(),
                                 [](const TargetTensor& t) { return t.name == kHead; });
  for (std::size_t i = 0; i < request_.tensors.size(); ++i) {
    const TargetTensor& t = request_.tensors[i];
    auto known = find_rule(t.name);
    if (!known)
      return refusal(
          t, "is not a parameter of the models whose layout in vLLM is supported: llama, mistral, qwen2, qwen3");
    if (byte_size(t.dtype) == 1)
      return refusal(t, "quantized models have another layout in vLLM, which is not supported");
    rules_.push_back(known->rule);
    if (tied && t.name == kEmbedding) {
      known->parameter = kHead;
      if (stages_ > 1) parameters_.push_back({std::string(kEmbedding), {i}, 0});
    }
    const auto [it, is_new] = number.emplace(known->parameter, parameters_.size());
    if (is_new) parameters_.push_back({known->parameter, {}, stage_of(known->parameter, layers)});
    parameters_[it->second].tensors.push_back(i);
  }
  for (Stack& p : parameters_) {
    std::sort(p.tensors.begin(), p.tensors.end(),
              [&](std::size_t a, std::size_t b) { return rules_[a]->place < rules_[b]->place; });
    TRY(check_stack(p));
  }
  return {};
}

// Fails unless a stacked parameter has all of its parts and their shapes fit.
Status VllmLayout::check_stack(const Stack& p) const {
  const TargetTensor& first = request_.tensors[p.tensors.front()];
  const bool is_qkv = p.name.find("qkv_proj") != std::string::npos;
  const bool is_gate_up = p.name.find("gate_up_proj") != std::string::npos;
  const std::size_t wanted = is_qkv ? 3 : is_gate_up ? 2 : 1;
  if (p.tensors.size() != wanted)
    return refusal(first, "vLLM stacks " + count_of(wanted, "tensor") + " to " + p.name + ", got " +
                              std::to_string(p.tensors.size()));
  for (const std::size_t i : p.tensors) {
    const TargetTensor& t = request_.tensors[i];
    const bool alike = t.dtype == first.dtype && t.shape.rank() == first.shape.rank() && t.shape.rank() >= 1 &&
                       t.shape.rank() <= 2 && (t.shape.rank() == 1 || wanted == 1 || t.shape[1] == first.shape[1]);
    if (!alike || (rules_[i]->cut == Cut::kColumns && t.shape.rank() != 2))
      return refusal(t, "does not stack with '" + printable(first.name) + "' " + to_string(first.shape));
  }
  return {};
}

}  // namespace reshard::vllm
