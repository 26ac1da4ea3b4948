#include "formats/colossalai/parameter_ids.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>

#include "lib/base/text.h"
#include "lib/checkpoint/catalog.h"
#include "lib/family/family.h"
#include "lib/layout/stages.h"

namespace reshard::colossalai {
namespace {

using Order = std::vector<const NamedShape*>;

// The order of the model: what is before the layers, the layers by their numbers, what is behind. The files of pipeline
// stages have it within a stage, and a stage need not hold neighbouring layers.
Order by_layers(const std::vector<NamedShape>& parameters) {
  Order head, layers, tail;
  bool is_behind = false;
  for (const NamedShape& p : parameters) {
    const Index layer = layer_number(p.name);
    if (layer >= 0) {
      is_behind = true;
      layers.push_back(&p);
    } else {
      (is_behind ? tail : head).push_back(&p);
    }
  }
  std::stable_sort(layers.begin(), layers.end(), [](const NamedShape* a, const NamedShape* b) {
    return layer_number(a->name) < layer_number(b->name);
  });
  head.insert(head.end(), layers.begin(), layers.end());
  head.insert(head.end(), tail.begin(), tail.end());
  return head;
}

// The order in which a known family defines its parameters: a layer's matrices first, then its norms. Nothing where a
// name is not known, or biases stand between the matrices.
std::optional<Order> by_family(const std::vector<NamedShape>& parameters) {
  using Key = std::tuple<int, Index, bool, std::ptrdiff_t>;
  for (const Family* family : families()) {
    std::vector<std::pair<Key, const NamedShape*>> keyed;
    for (const NamedShape& p : parameters) {
      const auto parsed = parse_name(*family, p.name);
      if (!parsed || parsed->rule == nullptr || parsed->expert >= 0 || p.name.ends_with(".bias")) break;
      const bool is_norm = p.shape.rank() < 2;
      keyed.push_back(
          {{static_cast<int>(parsed->rule->place), parsed->layer, is_norm, parsed->rule - family->rules.data()}, &p});
    }
    if (keyed.size() != parameters.size()) continue;
    std::sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    Order out;
    for (const auto& [key, p] : keyed) out.push_back(p);
    return out;
  }
  return std::nullopt;
}

// As training scripts make two groups: weight decay for matrices, none for norms and biases.
Order decayed(const Order& order, bool matrices_first) {
  Order out = order;
  std::stable_partition(out.begin(), out.end(),
                        [&](const NamedShape* p) { return (p->shape.rank() >= 2) == matrices_first; });
  return out;
}

// How many shapes agree; nothing when one does not.
std::optional<Index> agreement(const Order& order, const std::vector<ParameterId>& ids) {
  Index agreeing = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!ids[i].shape) continue;
    if (*ids[i].shape != order[i]->shape) return std::nullopt;
    ++agreeing;
  }
  return agreeing;
}

struct Candidate {
  Order order;
  std::string text;
};

}  // namespace

ParameterNames name_parameters(const std::vector<NamedShape>& parameters, bool is_ordered,
                               const std::vector<ParameterId>& ids, const std::vector<std::vector<Index>>& groups) {
  const auto count = [](std::size_t n, std::string_view noun) { return count_of(static_cast<Index>(n), noun); };
  if (parameters.size() != ids.size())
    return {{}, count(ids.size(), "id") + " for " + count(parameters.size(), "parameter")};
  std::vector<Candidate> bases;
  if (is_ordered) bases.push_back({by_layers(parameters), "the order in which the model defines them"});
  if (!is_ordered)
    if (auto order = by_family(parameters)) bases.push_back({std::move(*order), "the order of their model family"});
  if (bases.empty()) return {{}, "the index is sorted by name, and the order of this model's parameters is not known"};

  std::vector<Candidate> candidates;
  for (const Candidate& base : bases) {
    candidates.push_back(base);
    if (groups.size() < 2) continue;
    candidates.push_back({decayed(base.order, true), "matrices first, then vectors, each in " + base.text});
    candidates.push_back({decayed(base.order, false), "vectors first, then matrices, each in " + base.text});
  }
  const Candidate* chosen = nullptr;
  std::set<Order> fitting;
  Index agreeing = 0;
  for (const Candidate& candidate : candidates) {
    const auto agrees = agreement(candidate.order, ids);
    if (!agrees || *agrees == 0 || !fitting.insert(candidate.order).second) continue;
    if (chosen == nullptr) chosen = &candidate;
    agreeing = *agrees;
  }
  if (chosen == nullptr) return {{}, "no order that is known gives every id a parameter of its shape"};
  if (fitting.size() > 1) return {{}, "the shapes fit " + count(fitting.size(), "order") + " of the parameters"};
  ParameterNames out;
  for (const NamedShape* p : chosen->order) out.names.push_back(p->name);
  out.evidence =
      count(ids.size(), "id") + " in " + chosen->text + "; the shapes of " + with_commas(agreeing) + " agree";
  return out;
}

}  // namespace reshard::colossalai
