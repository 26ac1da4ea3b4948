// Placement on a mesh. See placement.h.
#include "lib/family/placement.h"

#include <algorithm>
#include <charconv>

#include "lib/base/text.h"

namespace reshard {

Index stage_of_layer(Index layer, Index layers, Index stages) {
  // Virtual layers: one for the embedding, one for the head.
  const Index total = layers + 2, each = total / stages, extra = total % stages;
  const Index at = layer + 1;
  // The first `extra` stages take one more.
  if (at < extra * (each + 1)) return at / (each + 1);
  return std::min(stages - 1, extra + (at - extra * (each + 1)) / std::max<Index>(1, each));
}

namespace {

// The number after the first dot that is followed by one: "layers.7.attention" -> 7. For models without a family.
Index layer_number(std::string_view name) {
  for (const std::string& part : split(name, '.')) {
    Index n = 0;
    const auto parsed = std::from_chars(part.data(), part.data() + part.size(), n);
    if (parsed.ec == std::errc() && parsed.ptr == part.data() + part.size()) return n;
  }
  return -1;
}

// What a user should know before cutting attention heads apart; empty where none is.
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

Result<Placer> Placer::make(const Mesh& mesh, const Family* family, const ModelConfig* config, const Catalog& source) {
  Placer placer(mesh, family);
  if (family && config) placer.warning_ = heads_warning(mesh, *config);
  for (const Tensor& tensor : source.tensors()) {
    const StateKey key = split_state_key(tensor.name);
    if (key.kind != StateKind::kModel) continue;
    placer.parameter_shapes_.emplace(key.parameter, tensor.shape);
    placer.layers_ = std::max(placer.layers_, layer_number(key.parameter) + 1);
  }
  const Index stages = mesh.size("pp");
  if (stages > placer.layers_ + 2)
    return usage_error("pp=" + std::to_string(stages) + " is more stages than the model has parts: " +
                       std::to_string(placer.layers_) + " layers, the embedding and the head");
  return placer;
}

Placement Placer::place(const Tensor& tensor) const {
  const StateKey key = split_state_key(tensor.name);
  Placement placement;
  if (key.parameter.empty()) return placement;
  placement.stage = stage(key.parameter);
  if (key.kind == StateKind::kOptimizer) {
    const auto shape = parameter_shapes_.find(key.parameter);
    if (shape == parameter_shapes_.end() || shape->second != tensor.shape) return placement;
  }
  if (tensor.shape.rank() == 0) return placement;
  if (const int dim = tp_dim(tensor, key.parameter); dim >= 0) placement.splits.push_back({{"tp"}, dim});
  placement.splits.push_back({{"dp_shard", "cp"}, 0});
  return placement;
}

int Placer::tp_dim(const Tensor& tensor, std::string_view parameter) const {
  if (family_) {
    if (const auto parsed = parse_name(*family_, parameter)) return parsed->rule->tp_dim;
    return -1;
  }
  if (tensor.shape.rank() < 2) return -1;
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i) {
    const Box box = tensor.fragments.box(i);
    for (int d = 1; d < box.rank(); ++d)
      if (!box.empty() && box.shape[d] < tensor.shape[d]) return d;
  }
  return 0;
}

Index Placer::stage(std::string_view parameter) const {
  const Index stages = mesh_.size("pp");
  if (stages <= 1) return -1;
  Index layer = layer_number(parameter);
  bool first = layer < 0 && parameter.find("embed") != std::string_view::npos;
  if (const auto parsed = family_ ? parse_name(*family_, parameter) : std::nullopt)
    first = parsed->rule->place == NameRule::Place::kFirst;
  if (layer >= 0) return stage_of_layer(layer, layers_, stages);
  return first ? 0 : stages - 1;
}

}  // namespace reshard
