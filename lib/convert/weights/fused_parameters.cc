// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/fused_parameters.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "lib/base/text.h"
#include "lib/model/packing.h"

namespace reshard {
namespace {

// Returns the tensors of the view as transformers holds them, or each by itself for a model of no family.
Result<std::vector<PackedGroup>> in_memory(const Catalog& view, const Model& model) {
  std::vector<std::size_t> all(view.tensors().size());
  std::iota(all.begin(), all.end(), 0);
  if (model.family) return pack(*model.family, Convention::kTransformers, view, all);
  std::vector<PackedGroup> out;
  for (const std::size_t i : all) out.push_back({view.tensors()[i].name, nullptr, {i}});
  return out;
}

// Fills in the shape and the parts of a parameter that is made of the tensors of `group`.
Status describe(FusedParameter& out, const PackedGroup& group, const Catalog& view, const Model& model) {
  const auto& tensors = view.tensors();
  if (!group.stored) {
    out.shape = tensors[group.parts[0]].shape;
    out.parts = {{group.parts[0]}};
    return {};
  }
  std::vector<Dims> shapes;
  for (const std::size_t part : group.parts) shapes.push_back(tensors[part].shape);
  out.shape = TRY(packed_shape(*group.stored, shapes, model.config_or_null()));
  const auto parsed = parse_name(*model.family, group.name);
  if (!parsed || !parsed->stored || out.shape.rank() != 3) return {};
  for (const PackedPart& part : TRY(parts_of(*parsed, out.shape, model.config_or_null(), true, group.name))) {
    const auto weight = view.find(part.name);
    const bool is_section = part.rows.empty() || (part.rows.size() == 1 && part.rows[0].step == 1);
    if (!weight || !is_section) return unsupported(tensor_text(group.name) + ": expected rows in sections");
    out.parts.push_back({*weight, part.index, part.rows.empty() ? 0 : part.rows[0].stored, part.transposed});
  }
  return {};
}

// Returns the position of a parameter in the family's tables, which have the order in which transformers defines the
// parameters of a module.
std::size_t definition(const PackedGroup& group, const Catalog& view, const Model& model) {
  if (!model.family) return 0;
  const auto parsed = parse_name(*model.family, view.tensors()[group.parts[0]].name);
  return parsed ? static_cast<std::size_t>(parsed->rule - model.family->rules.data()) : 0;
}

// Returns whether the shape of a parameter's bias, [experts, outputs], shows that the rows of its matrices are inputs.
bool biases_say_input_first(const FusedParameter& parameter, const Catalog& view) {
  const auto bias = view.find(parameter.module + "." + parameter.name + "_bias");
  if (!bias || view.tensors()[*bias].shape.rank() != 2) return false;
  const Index outputs = view.tensors()[*bias].shape[1];
  return parameter.shape[2] == outputs && parameter.shape[1] != outputs;
}

}  // namespace

Result<std::vector<FusedParameter>> fused_parameters(const Catalog& view, const Model& model) {
  std::vector<std::pair<std::size_t, FusedParameter>> found;
  std::set<std::string> input_first;  // modules
  for (const PackedGroup& group : TRY(in_memory(view, model))) {
    const std::size_t dot = group.name.rfind('.');
    if (dot == std::string::npos || group.name.ends_with(".weight")) continue;
    FusedParameter parameter{group.name.substr(0, dot), group.name.substr(dot + 1), {}, false, {}};
    TRY(describe(parameter, group, view, model).context(view.root));
    if (parameter.shape.rank() != 3) continue;
    if (biases_say_input_first(parameter, view)) input_first.insert(parameter.module);
    found.emplace_back(definition(group, view, model), std::move(parameter));
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<FusedParameter> out;
  for (auto& [at, parameter] : found) {
    parameter.input_first = input_first.contains(parameter.module);
    out.push_back(std::move(parameter));
  }
  return out;
}

}  // namespace reshard
