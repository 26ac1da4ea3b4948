// SPDX-License-Identifier: Apache-2.0
// Implements placement.h.
#include "lib/model/placement.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard {

namespace {

// Returns a warning if tp splits attention heads, otherwise an empty string.
std::string heads_warning(const Mesh& mesh, const ModelConfig& config) {
  const Index tp = mesh.size("tp");
  if (config.num_key_value_heads() % tp == 0) return {};
  Index best = tp;
  while (config.num_key_value_heads() % best != 0) --best;
  return "tp=" + std::to_string(tp) + " does not divide num_key_value_heads " +
         std::to_string(config.num_key_value_heads()) + " of " + config.path +
         ": the checkpoint loads into any mesh, but the model does not run at that degree (tp=" + std::to_string(best) +
         " would)";
}

}  // namespace

std::vector<Placer::Of> Placer::of(const Catalog& catalog) {
  std::vector<Of> out;
  out.reserve(catalog.tensors().size());
  for (const Tensor& tensor : catalog.tensors()) out.push_back(of(tensor));
  return out;
}

Result<Placer> Placer::make(const Mesh& mesh, const Family* family, const ModelConfig* config,
                            const std::vector<Of>& model, StageRule stages) {
  if (mesh.size("ep") > 1)
    return usage_error("mesh " + mesh.to_string() + ": families have no rules for ep; describe it in a layout file");
  Placer placer(mesh, family, config, stages);
  if (family && config) placer.warning_ = heads_warning(mesh, *config);
  const bool has_optimizer = std::any_of(
      model.begin(), model.end(), [](const Of& tensor) { return state_kind(tensor.key) == StateKind::kOptimizer; });
  for (const Of& tensor : model) {
    const StateKey key = split_state_key(tensor.key);
    if (key.kind != StateKind::kModel) continue;
    if (has_optimizer) placer.parameter_shapes_.emplace(key.parameter, tensor.shape);
    placer.layers_ = std::max(placer.layers_, layer_number(key.parameter) + 1);
  }
  if (config) placer.layers_ = std::max(placer.layers_, config->num_hidden_layers());
  TRY(check_stages(stages, placer.layers_, mesh.size("pp")));
  return placer;
}

Placement Placer::place(const Of& tensor) const {
  const StateKey key = split_state_key(tensor.key);
  Placement placement;
  if (key.parameter.empty()) return placement;
  placement.stage = stage(key.parameter);
  if (tensor.is_uncut) return placement;
  if (key.kind == StateKind::kOptimizer) {
    const auto shape = parameter_shapes_.find(key.parameter);
    if (shape == parameter_shapes_.end() || shape->second != tensor.shape) return placement;
  }
  const auto parsed = family_ ? parse_name(*family_, key.parameter) : std::nullopt;
  if (tensor.shape.rank() == 0 || (parsed && parsed->rule->buffer)) return placement;
  if (const Split cut = tp_split(tensor, key.parameter); cut.dim >= 0) placement.splits.push_back(cut);
  placement.splits.push_back({{"dp_shard", "cp"}, 0});
  return placement;
}

// The result has dim -1 if tensor parallelism leaves the tensor whole.
Split Placer::tp_split(const Of& tensor, std::string_view parameter) const {
  Split cut{{"tp"}, -1};
  if (family_) {
    const auto by_shape = parse_tensor(*family_, parameter, tensor.shape, config_, tensor.name);
    const auto parsed = by_shape ? *by_shape : parse_name(*family_, parameter);
    const TensorParallelCut by_rule = parsed ? tensor_parallel_cut(*parsed) : TensorParallelCut{};
    if (by_rule.dim >= tensor.shape.rank()) return cut;
    // A scale for the whole dimension of the matrix is needed on every rank.
    if (by_rule.dim >= 0 && parsed->is_of_quantized() && tensor.shape[by_rule.dim] == 1) return cut;
    cut.dim = by_rule.dim;
    cut.groups = by_rule.sections;
    return cut;
  }
  if (tensor.shape.rank() < 2) return cut;
  cut.dim = 0;
  for (std::size_t i = 0; tensor.fragments && i < tensor.fragments->size() && cut.dim == 0; ++i) {
    const Box box = tensor.fragments->box(i);
    for (int d = box.rank() - 1; d > 0; --d)
      if (!box.empty() && box.shape[d] < tensor.shape[d]) cut.dim = d;
  }
  return cut;
}

Index Placer::stage(std::string_view parameter) const {
  const Index stages = mesh_.size("pp");
  if (stages <= 1) return -1;
  Index layer = layer_number(parameter);
  bool first = layer < 0 && parameter.find("embed") != std::string_view::npos;
  if (const auto parsed = family_ ? parse_name(*family_, parameter) : std::nullopt)
    first = parsed->rule->place == NameRule::Place::kFirst;
  if (layer >= 0) return stage_of_layer(stages_, layer, layers_, stages);
  return first ? 0 : stages - 1;
}

}  // namespace reshard
