// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/parameter_ids.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "lib/base/text.h"
#include "lib/layout/stages.h"

namespace reshard {
namespace {

using Order = std::vector<const NamedShape*>;

Order as_given(const std::vector<NamedShape>& parameters) {
  Order out;
  for (const NamedShape& p : parameters) out.push_back(&p);
  return out;
}

// Splits "model.layers.0.mlp.experts.7.w1.weight" into "model.layers.0.mlp.experts." and 7; returns nothing for other
// names.
std::optional<std::pair<std::string_view, Index>> expert_of(std::string_view name) {
  constexpr std::string_view kExperts = ".experts.";
  const std::size_t at = name.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view list = name.substr(0, at + kExperts.size());
  Index number = 0;
  std::size_t digits = 0;
  for (const char c : name.substr(list.size())) {
    if (c < '0' || c > '9' || digits == 9) break;
    number = 10 * number + (c - '0');
    ++digits;
  }
  if (digits == 0) return std::nullopt;
  return std::pair(list, number);
}

// Moves the experts of a list to the position of the first of them, ordered by number. Each expert-parallel rank lists
// its own experts between the shared parameters.
Order with_experts_in_order(const Order& order) {
  std::map<std::string_view, std::size_t> first;
  std::vector<std::tuple<std::size_t, Index, const NamedShape*>> placed;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto expert = expert_of(order[i]->name);
    const std::size_t place = expert ? first.try_emplace(expert->first, i).first->second : i;
    placed.emplace_back(place, expert ? expert->second : 0, order[i]);
  }
  std::stable_sort(placed.begin(), placed.end(), [](const auto& a, const auto& b) {
    return std::pair(std::get<0>(a), std::get<1>(a)) < std::pair(std::get<0>(b), std::get<1>(b));
  });
  Order out;
  for (const auto& [place, number, parameter] : placed) out.push_back(parameter);
  return out;
}

// Sorts parameters into the model's order: those before the layers, the layers by number, those after them. The files
// of a pipeline stage have this order within the stage, but the layers of a stage need not be adjacent.
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
  return with_experts_in_order(head);
}

// The modules of a Llama layer in the order in which transformers defines them; those of Mistral, Qwen 2 and Qwen 3 are
// the same. The embedding comes before the layers, the norm and the head after them.
constexpr std::string_view kEmbedding = "model.embed_tokens", kNorm = "model.norm";
constexpr std::array<std::string_view, 11> kLayer = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",        "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj",           "mlp.up_proj",
    "mlp.down_proj",    "input_layernorm",  "post_attention_layernorm"};
constexpr std::string_view kHead = "lm_head";

// Returns the position of a parameter in a Llama, or nothing for other names.
using OrderKey = std::tuple<int, Index, std::ptrdiff_t, bool>;
std::optional<OrderKey> place_in_llama(std::string_view name) {
  const bool is_bias = name.ends_with(".bias");
  if (!is_bias && !name.ends_with(".weight")) return std::nullopt;
  const std::string_view module = name.substr(0, name.rfind('.'));
  if (module == kEmbedding) return OrderKey{0, 0, 0, is_bias};
  if (module == kNorm) return OrderKey{2, 0, 0, is_bias};
  if (module == kHead) return OrderKey{3, 0, 0, is_bias};
  const Index layer = layer_number(name);
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  if (!module.starts_with(prefix)) return std::nullopt;
  const auto* part = std::find(kLayer.begin(), kLayer.end(), module.substr(prefix.size()));
  if (part == kLayer.end()) return std::nullopt;
  return OrderKey{1, layer, part - kLayer.begin(), is_bias};
}

std::optional<Order> as_in_llama(const std::vector<NamedShape>& parameters) {
  std::vector<std::pair<OrderKey, const NamedShape*>> placed;
  for (const NamedShape& p : parameters) {
    const auto place = place_in_llama(p.name);
    if (!place) return std::nullopt;
    placed.emplace_back(*place, &p);
  }
  std::sort(placed.begin(), placed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  Order out;
  for (const auto& [place, p] : placed) out.push_back(p);
  return out;
}

// Orders parameters in two groups as training scripts make them: matrices with weight decay, norms and biases without.
Order decayed(const Order& order, bool matrices_first) {
  Order out = order;
  std::stable_partition(out.begin(), out.end(),
                        [&](const NamedShape* p) { return (p->shape.rank() >= 2) == matrices_first; });
  return out;
}

// Returns whether moments of this shape fit the parameter. ColossalAI leaves the moments of experts flat if ZeRO cut
// them.
bool fits(const Dims& moments, const Dims& parameter) {
  return moments == parameter || (moments.rank() == 1 && moments[0] == volume(parameter));
}

// Returns how many shapes agree, or nothing if one does not.
std::optional<Index> agreement(const Order& order, const std::vector<ParameterId>& ids) {
  Index agreeing = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!ids[i].shape) continue;
    if (!fits(*ids[i].shape, order[i]->shape)) return std::nullopt;
    ++agreeing;
  }
  return agreeing;
}

struct Candidate {
  Order order;
  std::string text;
};

}  // namespace

ParameterNames name_parameters(const std::vector<NamedShape>& parameters, NameOrder order,
                               const std::vector<ParameterId>& ids, const std::vector<std::vector<Index>>& groups) {
  const auto count = [](std::size_t n, std::string_view noun) { return count_of(n, noun); };
  if (parameters.size() != ids.size())
    return {{}, count(ids.size(), "id") + " for " + count(parameters.size(), "parameter")};
  std::vector<Candidate> bases;
  constexpr std::string_view kOwn = "the order in which the model defines them";
  if (order == NameOrder::kAsDefined) bases.push_back({as_given(parameters), std::string(kOwn)});
  if (order == NameOrder::kByStage) bases.push_back({by_layers(parameters), std::string(kOwn)});
  if (order == NameOrder::kSorted)
    if (auto known = as_in_llama(parameters))
      bases.push_back({std::move(*known), "the order in which transformers defines a Llama"});
  if (bases.empty()) return {{}, "the index is sorted by name, and the order of this model's parameters is unknown"};

  const bool is_fresh = std::all_of(ids.begin(), ids.end(), [](const ParameterId& id) { return id.is_fresh; });
  if (is_fresh && groups.size() == 1) {  // every parameter has the same options
    ParameterNames out;
    for (const NamedShape* p : bases.front().order) out.names.push_back(p->name);
    out.evidence = count(ids.size(), "id") + " in " + bases.front().text + "; there are no states to compare";
    return out;
  }
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
  if (chosen == nullptr) return {{}, "the shapes of the ids fit no known order of the parameters"};
  if (fitting.size() > 1) return {{}, "the shapes fit " + count(fitting.size(), "order") + " of the parameters"};
  ParameterNames out;
  for (const NamedShape* p : chosen->order) out.names.push_back(p->name);
  out.evidence =
      count(ids.size(), "id") + " in " + chosen->text + "; the shapes of " + with_commas(agreeing) + " agree";
  return out;
}

}  // namespace reshard
