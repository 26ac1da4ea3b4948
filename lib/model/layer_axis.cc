// SPDX-License-Identifier: Apache-2.0
#include "lib/model/layer_axis.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace reshard {
namespace {

bool is_layers(const StoredAxis& axis) { return axis.of == StoredAxis::Of::kLayers; }

// Returns whether all stacked tensors can have their layers first, and one of them cannot have them where the family
// has them.
bool has_layers_first(const Catalog& catalog, const Family& family) {
  bool is_certain = false;
  for (const Tensor& t : catalog.tensors()) {
    const StateKey key = split_state_key(t.key());
    const auto parsed = key.kind == StateKind::kModel ? parse_name(family, key.parameter) : std::nullopt;
    if (!parsed || !parsed->stored || !parsed->stored->has_layers()) continue;
    const std::vector<StoredAxis>& axes = parsed->stored->axes;
    const auto at = std::find_if(axes.begin(), axes.end(), is_layers) - axes.begin();
    const Index layers = parsed->stored->layers.count();
    if (t.shape.rank() != std::ssize(axes) || t.shape[0] != layers) return false;
    is_certain = is_certain || t.shape[static_cast<int>(at)] != layers;
  }
  return is_certain;
}

}  // namespace

const Family& with_axes_of(const Catalog& catalog, const Family& family, Convention convention) {
  static std::mutex mutex;
  static auto* const made = new std::map<const Family*, Family>;
  const bool has_stacks = std::any_of(family.conventions.begin(), family.conventions.end(), [&](const auto& table) {
    return table.convention == convention && std::any_of(table.rules.begin(), table.rules.end(),
                                                         [](const StoredRule& rule) { return rule.has_layers(); });
  });
  if (family.layers == 0 || !has_stacks || !has_layers_first(catalog, family)) return family;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = made->try_emplace(&family, family);
  if (!is_new) return found->second;
  for (ConventionTable& table : found->second.conventions)
    for (StoredRule& rule : table.rules) rule.put_layers_first();
  return found->second;
}

}  // namespace reshard
