// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/pipeline_names.h"

#include <algorithm>
#include <optional>
#include <set>

#include "lib/base/text.h"
#include "lib/model/family.h"

namespace reshard::deepspeed {
namespace {

constexpr std::string_view kLayer = "{}.";

using Layer = std::map<std::string_view, const Dims*>;  // shapes of its parameters, by name

std::optional<std::map<Index, Layer>> layers_of(const std::map<std::string, Dims>& parameters) {
  std::map<Index, Layer> out;
  for (const auto& [name, shape] : parameters) {
    std::string_view rest = name;
    const auto number = take_number(rest);
    if (!number || !take(rest, ".") || rest.empty()) return std::nullopt;
    out[*number].emplace(rest, &shape);
  }
  return out;
}

bool same_names(const Layer& a, const Layer& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.first == y.first; });
}

std::string_view last_part(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// Returns the only rule that satisfies a condition, or null if there is none or more than one.
template <class IsIt>
const NameRule* only_rule(const Family& family, const IsIt& is_it) {
  const NameRule* found = nullptr;
  for (const NameRule& rule : family.rules) {
    if (rule.is_dropped() || rule.is_per_expert() || !is_it(rule)) continue;
    if (found) return nullptr;
    found = &rule;
  }
  return found;
}

const NameRule* rule_in_layer(const Family& family, std::string_view name) {
  return only_rule(family, [&](const NameRule& rule) {
    const std::size_t at = rule.hf.find(kLayer);
    if (at == std::string::npos) return false;
    const std::string_view own = std::string_view(rule.hf).substr(at + kLayer.size());
    return own == name || (own.ends_with(name) && own[own.size() - name.size() - 1] == '.');
  });
}

const NameRule* rule_outside(const Family& family, NameRule::Place place, std::string_view name, const Dims& shape) {
  return only_rule(family, [&](const NameRule& rule) {
    return rule.place == place && last_part(rule.hf) == last_part(name) &&
           std::count(rule.shape.begin(), rule.shape.end(), ',') + 1 == shape.rank();
  });
}

// Returns a family's names for all parameters, or nothing if it lacks one.
std::map<std::string, std::string> names_in(const Family& family, const std::map<Index, Layer>& layers,
                                            const std::map<Index, Index>& numbers) {
  std::map<std::string, std::string> out;
  std::set<std::string> taken;
  for (const auto& [number, layer] : layers) {
    const auto model_layer = numbers.find(number);
    const bool is_inside = model_layer != numbers.end();
    const auto place = number < numbers.begin()->first ? NameRule::Place::kFirst : NameRule::Place::kLast;
    for (const auto& [name, shape] : layer) {
      const NameRule* rule = is_inside ? rule_in_layer(family, name) : rule_outside(family, place, name, *shape);
      if (!rule) return {};
      std::string full = is_inside ? format_pattern(rule->hf, model_layer->second, -1) : rule->hf;
      if (!taken.insert(full).second) return {};
      out.emplace(std::to_string(number) + "." + std::string(name), std::move(full));
    }
  }
  return out;
}

}  // namespace

PipelineNames name_pipeline(const std::map<std::string, Dims>& parameters, Families families) {
  const auto layers = layers_of(parameters);
  if (!layers || layers->empty()) return {};
  const auto most = std::max_element(layers->begin(), layers->end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  std::map<Index, Index> numbers;  // the model's layer number of each layer of the pipeline
  for (const auto& [number, layer] : *layers)
    if (same_names(layer, most->second)) numbers.emplace(number, std::ssize(numbers));
  const Index first = numbers.begin()->first, last = numbers.rbegin()->first;
  if (last - first + 1 != std::ssize(numbers)) return {};
  for (const Family* family : families) {
    PipelineNames out{family, names_in(*family, *layers, numbers), {}};
    if (out.names.empty()) continue;
    out.evidence = "layers " + std::to_string(first) + " to " + std::to_string(last) + " are those of the model (" +
                   family->title + ")";
    return out;
  }
  return {};
}

}  // namespace reshard::deepspeed
