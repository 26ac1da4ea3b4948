// SPDX-License-Identifier: Apache-2.0
#include "formats/fsdp/optimizer_states.h"

#include <algorithm>
#include <map>

#include "lib/base/text.h"

namespace reshard::fsdp {
namespace {

// Returns a name up to its first number, "model.layers.3", or an empty text if it has none.
std::string numbered_module(const std::string& name) {
  std::size_t begin = 0;
  while (begin < name.size()) {
    const std::size_t dot = std::min(name.find('.', begin), name.size());
    if (is_digits(std::string_view(name).substr(begin, dot - begin))) return name.substr(0, dot);
    begin = dot + 1;
  }
  return {};
}

std::vector<FlatUnit> one_for_each(const std::vector<NamedShape>& parameters) {
  std::vector<FlatUnit> out;
  for (const NamedShape& p : parameters) out.push_back({{&p}, volume(p.shape)});
  return out;
}

std::vector<FlatUnit> by_module(const std::vector<NamedShape>& parameters) {
  FlatUnit rest;
  std::vector<FlatUnit> out;
  std::map<std::string, std::size_t> number;
  for (const NamedShape& p : parameters) {
    FlatUnit* unit = &rest;
    if (const std::string module = numbered_module(p.name); !module.empty()) {
      const auto [it, is_new] = number.emplace(module, out.size());
      if (is_new) out.emplace_back();
      unit = &out[it->second];
    }
    unit->parameters.push_back(&p);
    unit->elements = checked_add(unit->elements, volume(p.shape)).value_or(INT64_MAX);
  }
  if (!rest.parameters.empty()) out.insert(out.begin(), std::move(rest));
  return out;
}

// Returns whether runs of these lengths can be a unit's: equal runs with less padding than shards, or runs without
// padding.
bool fits(const FlatUnit& unit, const FlatId& id) {
  const auto shards = std::ssize(id.lengths);
  Index sum = 0;
  for (const Index n : id.lengths) sum = checked_add(sum, n).value_or(INT64_MAX);
  if (sum == unit.elements) return true;
  const bool is_equal = std::all_of(id.lengths.begin(), id.lengths.end(), [&](Index n) { return n == id.lengths[0]; });
  return is_equal && id.lengths[0] == ceil_div(unit.elements, shards);
}

}  // namespace

// The match found from the front and the one found from the back are equal only if there is exactly one.
std::optional<std::vector<NamedShape>> without_buffers(const std::vector<NamedShape>& tensors,
                                                       const std::vector<ParameterId>& ids) {
  const auto is_of = [](const ParameterId& id, const NamedShape& t) { return !id.shape || *id.shape == t.shape; };
  std::vector<std::size_t> first, last;
  for (std::size_t i = 0; i < tensors.size() && first.size() < ids.size(); ++i)
    if (is_of(ids[first.size()], tensors[i])) first.push_back(i);
  for (std::size_t i = tensors.size(); i-- > 0 && last.size() < ids.size();)
    if (is_of(ids[ids.size() - 1 - last.size()], tensors[i])) last.push_back(i);
  std::reverse(last.begin(), last.end());
  if (first.size() != ids.size() || first != last) return std::nullopt;
  std::vector<NamedShape> out;
  for (const std::size_t i : first) out.push_back(tensors[i]);
  return out;
}

FlatUnits flat_units(const std::vector<NamedShape>& parameters, const std::vector<FlatId>& ids) {
  const bool is_each = ids.size() == parameters.size();
  FlatUnits out{is_each ? one_for_each(parameters) : by_module(parameters), {}};
  const auto fail = [](std::string why) { return FlatUnits{{}, std::move(why)}; };
  if (out.units.size() != ids.size())
    return fail(count_of(std::ssize(ids), "flat state") + " for " + count_of(std::ssize(parameters), "parameter") +
                " in " + count_of(std::ssize(out.units), "module"));
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (ids[i].lengths.empty() || !fits(out.units[i], ids[i]))
      return fail("the flat states of id " + std::to_string(ids[i].id) + " do not have the " +
                  count_of(out.units[i].elements, "element") + " of their parameters");
  out.evidence = count_of(std::ssize(ids), "flat state") + " of " +
                 (is_each ? "the parameters, in the order in which the model defines them"
                          : "the model's root module and of each layer, in the model's order") +
                 "; all lengths agree";
  return out;
}

}  // namespace reshard::fsdp
