// SPDX-License-Identifier: Apache-2.0
#include "lib/model/architecture.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "lib/base/text.h"
#include "lib/model/formula.h"

namespace reshard {
namespace {

constexpr Index kMaxListed = 500'000;

// The line of a model_type; empty if there is none.
std::string_view line_of(std::string_view model_type) {
  const std::string_view table = builtin_architectures();
  const std::string start = "{\"type\": \"" + std::string(model_type) + "\"";
  for (std::size_t at = table.find(start); at != std::string_view::npos; at = table.find(start, at + 1))
    if (at == 0 || table[at - 1] == '\n') return table.substr(at, table.find('\n', at) - at);
  return {};
}

std::vector<std::string> list_of(const std::string& text) {
  return text.empty() ? std::vector<std::string>() : split(text, ',');
}

Status read_rows(const Json& groups, Index of_class, bool is_base, std::vector<ArchitectureRow>& out) {
  for (const Json& group : TRY(groups.as_array())) {
    bool is_in = false;
    for (const Json& number : TRY(group.get_array("in"))) is_in = is_in || TRY(number.as_index()) == of_class;
    if (!is_in) continue;
    for (const Json& row : TRY(group.get_array("rows"))) {
      const std::vector<std::string> parts = split(TRY(row.as_string()), '|');
      if (parts.size() != 4) return corrupt("a row has not four parts");
      out.push_back({parts[0], list_of(parts[1]), list_of(parts[2]), parts[3], is_base});
    }
  }
  return {};
}

Result<std::optional<Architecture>> parse_line(std::string_view line, std::string_view name) {
  std::optional<Architecture> out;
  const Json json = TRY(parse_json(line, "architectures.jsonl"));
  Index of_class = 0;
  for (const Json& known : TRY(json.get_array("classes"))) {
    if (TRY(known.as_string()) == name) out.emplace();
    if (out) break;
    ++of_class;
  }
  if (!out) return out;
  out->name = std::string(name);
  out->transformers = std::string(TRY(json.get_string("transformers")));
  out->prefix = std::string(TRY(json.get_string("prefix")));
  TRY(json.get_object("defaults"));
  TRY(json.get_object("fixed"));
  out->defaults = *json.find("defaults");
  out->fixed = *json.find("fixed");
  TRY(json.get_array("base"));
  TRY(json.get_array("own"));
  TRY(read_rows(*json.find("base"), of_class, true, out->rows));
  TRY(read_rows(*json.find("own"), of_class, false, out->rows));
  return out;
}

std::optional<Index> number_in(const Json* value) {
  if (!value) return {};
  if (value->is_bool()) return *value->as_bool() ? 1 : 0;
  const auto number = value->as_index();
  return value->is_integer() && number ? std::optional(*number) : std::nullopt;
}

// Lists the parameters of one row, or adds to the rows that cannot be listed.
class Expansion {
 public:
  Expansion(const Architecture& architecture, const Json& config) : architecture_(architecture), config_(config) {}

  Status add(const ArchitectureRow& row) {
    const auto dims = values_of(row.dims);
    const auto counts = values_of(row.counts);
    if (!dims || !counts) {
      ++out_.not_derived;
      return {};
    }
    Dims shape;
    for (const Index dim : *dims) shape.push_back(dim);
    std::vector<Index> numbers(counts->size(), 0);
    if (std::find(counts->begin(), counts->end(), 0) != counts->end()) return {};
    do {
      if (std::ssize(out_.parameters) == kMaxListed)
        return corrupt("the config describes more than " + with_commas(kMaxListed) + " tensors");
      out_.parameters.push_back({named(row.name, numbers), shape, &row, holds(row.condition)});
    } while (advance(numbers, *counts));
    return {};
  }
  ArchitectureModel take() { return std::move(out_); }

 private:
  std::optional<Index> number(std::string_view name) const {
    const Json* const said = member_at(config_, name);
    return said ? number_in(said) : number_in(architecture_.defaults.find(name));
  }

  // Nothing if one of them cannot be computed, or is no size.
  std::optional<std::vector<Index>> values_of(const std::vector<std::string>& formulas) const {
    std::vector<Index> out;
    for (const std::string& formula : formulas) {
      if (formula == "?") {
        out.push_back(kAnySize);
        continue;
      }
      const auto n = evaluate(formula, [this](std::string_view name) { return number(name); });
      if (!n || *n < 0) return {};
      out.push_back(*n);
    }
    return out;
  }

  bool holds(std::string_view condition) const {
    if (condition.empty() || condition == "?") return condition.empty();
    const bool is_negated = condition.front() == '!';
    const auto n = number(condition.substr(is_negated ? 1 : 0));
    return n && (*n != 0) != is_negated;
  }

  static std::string named(std::string_view pattern, const std::vector<Index>& numbers) {
    std::string out;
    for (const Index number : numbers) {
      const std::size_t at = std::min(pattern.find("{}"), pattern.size());
      out += pattern.substr(0, at);
      out += std::to_string(number);
      pattern.remove_prefix(std::min(at + 2, pattern.size()));
    }
    return out.append(pattern);
  }

  static bool advance(std::vector<Index>& numbers, const std::vector<Index>& counts) {
    for (std::size_t i = numbers.size(); i-- > 0;) {
      if (++numbers[i] < counts[i]) return true;
      numbers[i] = 0;
    }
    return false;
  }

  const Architecture& architecture_;
  const Json& config_;
  ArchitectureModel out_;
};

}  // namespace

std::optional<Architecture> find_architecture(std::string_view model_type, std::string_view name) {
  const std::string_view line = line_of(model_type);
  if (line.empty() || name.empty()) return {};
  auto parsed = parse_line(line, name);
  if (parsed) return *std::move(parsed);
  std::fprintf(stderr, "%s\n", parsed.error().message().c_str());  // as for families: a test would have found it
  std::abort();
}

const Json* member_at(const Json& config, std::string_view path) {
  const Json* at = &config;
  while (at && !path.empty()) {
    const std::size_t dot = std::min(path.find('.'), path.size());
    at = at->find(path.substr(0, dot));
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return at;
}

Result<ArchitectureModel> parameters_of(const Architecture& architecture, const Json& config) {
  for (const Json::Member& fixed : TRY(architecture.fixed.as_object()))
    if (const Json* said = member_at(config, fixed.key); said && to_text(*said) != to_text(fixed.value))
      return unsupported(fixed.key + " is not " + to_text(fixed.value));
  Expansion expansion(architecture, config);
  for (const ArchitectureRow& row : architecture.rows) TRY(expansion.add(row));
  return expansion.take();
}

}  // namespace reshard
