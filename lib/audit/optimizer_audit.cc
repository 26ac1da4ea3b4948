// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "lib/audit/metadata_audits.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"

namespace reshard {
namespace {

// Reports parameters with incomplete optimizer state. Different optimizers keep different state (Muon a momentum, AdamW
// two moments), so each parameter is compared with the most common kind of state that contains its own, if they share
// more than a step.
void report_uneven_state(const std::map<std::string, std::set<std::string>>& have, FindingList& findings) {
  std::map<std::string, std::set<std::string>> states;  // keyed by parameter
  for (const auto& [state, names] : have)
    for (const std::string& name : names) states[name].insert(state);
  using Kind = std::set<std::string>;
  std::map<Kind, Index> kinds;  // the number of parameters of each kind
  for (const auto& [name, own] : states) ++kinds[own];
  const auto is_part_of = [&](const Kind& own, const Kind& kind) {
    Kind common;
    std::set_intersection(own.begin(), own.end(), kind.begin(), kind.end(), std::inserter(common, common.end()));
    if (common == own) return true;
    common.erase(".step");
    return !common.empty();
  };
  std::vector<std::string> absent;
  for (const auto& parameter : states) {
    const Kind& own = parameter.second;
    const auto usual = std::max_element(kinds.begin(), kinds.end(), [&](const auto& a, const auto& b) {
      return std::tuple(is_part_of(own, a.first), a.second, a.first.size()) <
             std::tuple(is_part_of(own, b.first), b.second, b.first.size());
    });
    for (const std::string& state : usual->first)
      if (!own.contains(state)) absent.push_back(parameter.first + state);
  }
  if (absent.empty()) return;
  Finding& f = findings.add(Severity::kWarning, "optimizer-missing");
  f.what = "lacks optimizer state that other parameters have";
  f.tensors = std::move(absent);
  f.advice = "The optimizer starts these moments at zero when it resumes.";
}

// Tensors of the model and of adapters, by the names that optimizer state uses: plain keys or stored names, with and
// without the model's common prefix.
using ByName = std::unordered_map<std::string, const Tensor*>;
ByName parameters_of(const Catalog& catalog) {
  ByName out;
  for (const Tensor& t : catalog.tensors()) {
    if (split_state_key(t.key()).kind == StateKind::kOptimizer) continue;
    out.emplace(t.key(), &t);
    if (t.name.ends_with(t.key())) continue;
    out.emplace(t.name, &t);
    for (const Part& part : catalog.parts)
      if (part.kind == StateKind::kModel && t.name.starts_with(part.prefix))
        out.emplace(t.name.substr(part.prefix.size()), &t);
    for (const std::string_view wrapper : {"model.", "module."})
      if (t.name.starts_with(wrapper)) out.emplace(t.name.substr(wrapper.size()), &t);
  }
  return out;
}

}  // namespace

OptimizerAudit audit_optimizer(const Catalog& catalog) {
  OptimizerAudit out;
  FindingList findings;
  std::map<std::string, std::set<std::string>> have;  // state -> parameters that have it
  std::vector<std::string> orphans, wrong, said;      // `said`: details of the first in `wrong`
  const ByName model = parameters_of(catalog);
  for (const Tensor& t : catalog.tensors()) {
    const StateKey key = split_state_key(t.key());
    const bool is_of_parameter = key.kind == StateKind::kOptimizer && key.prefix.ends_with(".state.");
    if (!is_of_parameter || key.parameter.empty() || is_digits(key.parameter)) continue;
    ++out.looked_at;
    const auto parameter = model.find(key.parameter);
    if (parameter == model.end()) {
      orphans.push_back(t.name);
      continue;
    }
    have[key.suffix].insert(key.parameter);
    const Dims& expected = parameter->second->shape;
    const bool is_factored = key.suffix.ends_with("_row") || key.suffix.ends_with("_col");  // Adafactor
    if (t.shape.rank() == 0 || is_factored || t.shape == expected) continue;
    if (wrong.empty())
      said = {"shape " + to_string(t.shape) + "; its parameter has " + to_string(expected),
              "optimizer state of " + key.parameter + " has its parameter's shape, element by element"};
    wrong.push_back(t.name);
  }
  if (!wrong.empty()) {
    Finding& f = findings.add(Severity::kError, "optimizer-shape");
    f.tensors = std::move(wrong);
    f.what = said[0];
    f.why.push_back(said[1]);
    f.advice = "One of the two is a shard or padded; see the findings on the parameter.";
  }
  const auto models = std::count_if(catalog.parts.begin(), catalog.parts.end(),
                                    [](const Part& part) { return part.kind == StateKind::kModel; });
  if (!orphans.empty() && models < 2) {  // otherwise they belong to another model
    Finding& f = findings.add(Severity::kWarning, "optimizer-orphan");
    f.what = "belong to parameters that are missing";
    f.tensors = std::move(orphans);
  }
  report_uneven_state(have, findings);
  out.findings = findings.take();
  return out;
}

}  // namespace reshard
