// SPDX-License-Identifier: Apache-2.0
#include "lib/model/parameter_order.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/model/family_file.h"

namespace reshard {
namespace {

constexpr std::string_view kNumber = "{}";

// A name with its numbers taken out: "model.layers.3.mlp.up_proj.weight" is {"model.layers.{}.mlp.up_proj.weight",
// {3}}.
struct NumberedName {
  std::string pattern;
  std::vector<Index> numbers;
};

NumberedName taken_apart(std::string_view name) {
  NumberedName out;
  while (true) {
    const std::size_t dot = std::min(name.find('.'), name.size());
    const std::string_view word = name.substr(0, dot);
    const auto number = is_digits(word) ? parse_number(word) : std::nullopt;
    if (number) out.numbers.push_back(*number);
    out.pattern += number ? kNumber : word;
    if (dot == name.size()) return out;
    out.pattern += '.';
    name.remove_prefix(dot + 1);
  }
}

// Consecutive patterns that are equal up to a hole belong to one list of modules; the parameters of each module are
// together. `runs`: for each hole, the first pattern of that run.
struct Place {
  std::size_t number = 0;
  std::vector<std::size_t> runs;
};
using Places = std::map<std::string, Place, std::less<>>;

Places places_of(std::string_view patterns) {
  Places out;
  std::vector<std::pair<std::string, std::size_t>> open;  // prefixes of the runs, and their first patterns
  for (std::size_t number = 0; !patterns.empty(); ++number) {
    const std::size_t space = std::min(patterns.find(' '), patterns.size());
    const std::string pattern(patterns.substr(0, space));
    patterns.remove_prefix(std::min(space + 1, patterns.size()));
    Place place{number, {}};
    std::vector<std::pair<std::string, std::size_t>> now;
    for (std::size_t hole = 0; (hole = pattern.find(kNumber, hole)) != std::string::npos; hole += kNumber.size()) {
      const std::size_t depth = now.size();
      std::string begin = pattern.substr(0, hole);
      const bool goes_on = depth < open.size() && open[depth].first == begin;
      place.runs.push_back(goes_on ? open[depth].second : number);
      now.emplace_back(std::move(begin), place.runs.back());
    }
    open = std::move(now);
    out.emplace(pattern, std::move(place));
  }
  return out;
}

const std::map<std::string, Places, std::less<>>& orders() {
  static const auto made = [] {
    std::map<std::string, Places, std::less<>> out;
    const auto json = parse_json(builtin_parameter_order(), "parameter_order.json");
    const auto types = json ? json->get_object("orders") : Result<std::span<const Json::Member>>(json.error());
    if (!types) {
      std::fprintf(stderr, "%s\n", types.error().message().c_str());  // as for families: a test would have found it
      std::abort();
    }
    for (const Json::Member& type : *types)
      if (const auto patterns = type.value.as_string()) out.emplace(type.key, places_of(*patterns));
    return out;
  }();
  return made;
}

}  // namespace

std::optional<std::vector<std::string>> in_parameter_order(std::string_view model_type,
                                                           const std::vector<std::string>& names) {
  const auto places = orders().find(model_type);
  if (places == orders().end()) return std::nullopt;
  // A name sorts by the run of its first hole, the number there, the run of its second hole, ..., and its pattern.
  std::vector<std::pair<std::vector<Index>, std::string>> keyed;
  for (const std::string& name : names) {
    const NumberedName parts = taken_apart(name);
    const auto place = places->second.find(parts.pattern);
    if (place == places->second.end()) return std::nullopt;
    std::vector<Index> key;
    for (std::size_t hole = 0; hole < parts.numbers.size(); ++hole) {
      key.push_back(place->second.runs[hole]);
      key.push_back(parts.numbers[hole]);
    }
    key.push_back(place->second.number);
    keyed.emplace_back(std::move(key), name);
  }
  std::sort(keyed.begin(), keyed.end());
  std::vector<std::string> out;
  for (auto& [key, name] : keyed) out.push_back(std::move(name));
  return out;
}

}  // namespace reshard
