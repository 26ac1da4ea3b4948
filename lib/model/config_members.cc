// SPDX-License-Identifier: Apache-2.0
#include "lib/model/config_members.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/formula.h"

namespace reshard {
namespace {

constexpr std::string_view kElement = "[#]", kLength = ".#";
constexpr int kMaxDepth = 16;  // of computed numbers that need each other

// Returns a whole number, also of 4.0 and booleans.
std::optional<Index> number_of(const Json* value) {
  if (!value) return {};
  if (value->is_bool()) return *value->as_bool() ? 1 : 0;
  if (value->is_integer()) {
    const auto number = value->as_index();
    return number ? std::optional(*number) : std::nullopt;
  }
  constexpr double kLimit = 1e15;  // every whole number below is exact
  const auto real = value->as_double();
  if (!value->is_number() || !real || std::floor(*real) != *real || std::abs(*real) > kLimit) return {};
  return *real;
}

const Json* item_at(const Json& list, Index number) {
  const auto items = list.as_array();
  if (!items || number < 0 || number >= std::ssize(*items)) return nullptr;
  return &(*items)[number];
}

// Returns whether all, or any, of the parts is true; nothing if that depends on one that is unknown.
template <typename Test>
std::optional<bool> combine(std::string_view text, char separator, bool decisive, Test test) {
  bool is_unknown = false;
  for (const std::string& part : split(text, separator)) {
    const std::optional<bool> result = test(part);
    if (result == decisive) return decisive;
    is_unknown = is_unknown || !result;
  }
  return is_unknown ? std::nullopt : std::optional(!decisive);
}

bool is_set(const Json& value) {
  if (value.is_null()) return false;
  if (const auto number = number_of(&value)) return *number != 0;
  if (value.is_string()) return !value.as_string()->empty();
  return !value.is_array() || value.size() > 0;
}

}  // namespace

const Json* member_at(const Json& config, std::string_view path) {
  const Json* at = &config;
  while (at && !path.empty()) {
    const std::size_t dot = std::min(path.find('.'), path.size());
    const std::string_view key = path.substr(0, dot);
    const auto number = at->is_array() ? as_number(key) : std::nullopt;
    at = number ? item_at(*at, *number) : at->find(key);
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return at;
}

const Json* ConfigMembers::find(std::string_view path, std::optional<Index> number) const {
  const bool is_element = path.ends_with(kElement);
  if (is_element) path.remove_suffix(kElement.size());
  const Json* said = member_at(config_, path);
  if (!said) said = defaults_.find(path);
  if (!is_element || !said) return said;
  return number ? item_at(*said, *number) : nullptr;
}

std::optional<Index> ConfigMembers::number_at(std::string_view path, std::optional<Index> number) const {
  if (path.ends_with(kLength)) {
    const Json* const list = member_at(config_, path.substr(0, path.size() - kLength.size()));
    if (list && (list->is_array() || list->is_object())) return std::ssize(*list);
  } else if (const auto given = number_of(find(path, number))) {
    return given;
  }
  return computed_at(path, number);
}

// Computes a number from its formula, once. In a table of the user's own, numbers may depend on each other in a circle:
// a number that is needed for itself is unknown.
std::optional<Index> ConfigMembers::computed_at(std::string_view path, std::optional<Index> number) const {
  const Json* const formula = computed_.find(path);
  if (!formula || !formula->is_string() || depth_ == kMaxDepth) return {};
  const auto [known, is_new] = known_.try_emplace(Place(path, number));
  if (!is_new) return known->second;
  ++depth_;
  known->second = evaluate(*formula->as_string(), number);
  --depth_;
  return known->second;
}

std::optional<Index> ConfigMembers::evaluate(std::string_view formula, std::optional<Index> number) const {
  for (const std::string& alternative : split(formula, ';')) {
    const auto value = reshard::evaluate(alternative, [&](std::string_view name) { return number_at(name, number); });
    if (value) return *value;
  }
  return {};
}

std::optional<bool> ConfigMembers::holds(std::string_view condition, std::optional<Index> number) const {
  if (condition.empty()) return true;
  return combine(condition, ';', true, [&](std::string_view terms) { return holds_all(terms, number); });
}

std::optional<bool> ConfigMembers::holds_all(std::string_view terms, std::optional<Index> number) const {
  return combine(terms, '&', false, [&](std::string_view term) { return holds_term(term, number); });
}

std::optional<bool> ConfigMembers::holds_term(std::string_view term, std::optional<Index> number) const {
  const std::size_t negations = std::min(term.find_first_not_of('!'), term.size());
  if (negations > 0) {
    const std::optional<bool> result = holds_term(term.substr(negations), number);
    return result ? std::optional(*result == (negations % 2 == 0)) : std::nullopt;
  }
  const std::size_t at = term.find_first_of("=<@%");
  if (at != std::string_view::npos) return compares(term.substr(0, at), term[at], term.substr(at + 1), number);
  const Json* const value = find(term, number);
  if (value) return is_set(*value);
  const auto computed = number_at(term, number);
  return computed ? std::optional(*computed != 0) : std::nullopt;
}

std::optional<bool> ConfigMembers::compares(std::string_view left, char sign, std::string_view right,
                                            std::optional<Index> number) const {
  if (sign == '@') {
    const Json* const list = find(right);
    if (!list || !number || (!list->is_array() && !list->is_null())) return {};
    if (list->is_null()) return false;  // a list that a config leaves empty
    for (std::size_t i = 0; i < list->size(); ++i)
      if (number_of(item_at(*list, i)) == number) return true;
    return false;
  }
  if (sign == '%') {
    const std::size_t equals = std::min(right.find('='), right.size());
    const auto divisor = evaluate(right.substr(0, equals), number);
    const auto rest = evaluate(right.substr(std::min(equals + 1, right.size())), number);
    if (!divisor || !rest || !number || *divisor < 1) return {};
    return *number % *divisor == *rest;
  }
  if (right.starts_with('\'')) {
    const Json* const value = find(left, number);
    if (!value) return {};
    return value->is_string() && "'" + std::string(*value->as_string()) + "'" == right;
  }
  const auto a = left == "#" ? number : number_at(left, number), b = evaluate(right, number);
  if (!a || !b) return {};
  return sign == '=' ? *a == *b : *a < *b;
}

}  // namespace reshard
