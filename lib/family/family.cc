#include "lib/family/family.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::array<const Family*, 1> kFamilies = {&kLlamaFamily};
constexpr std::array kAllNames = {Names::kHf, Names::kTorchtitan, Names::kTorchtitan2026};
constexpr std::string_view kHole = "{}";

// ---- names

std::string without_wrappers(std::string_view name) {
  std::string out(name);
  constexpr std::string_view kCompiled = "_orig_mod.";  // torch.compile wraps modules under this name
  for (std::size_t at; (at = out.find(kCompiled)) != std::string::npos;) out.erase(at, kCompiled.size());
  return out;
}

// Takes the number off the front of `text`.
std::optional<Index> take_number(std::string_view& text) {
  Index n = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), n);
  if (parsed.ec != std::errc() || n < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(parsed.ptr - text.data()));
  return n;
}

// Matches "layers.{}.x" against "layers.12.x". What no hole stands for is -1.
struct Numbers {
  Index layer = -1;
  Index expert = -1;
};
std::optional<Numbers> match(std::string_view pattern, std::string_view name) {
  Numbers numbers;
  for (Index* number : {&numbers.layer, &numbers.expert}) {
    const std::size_t hole = pattern.find(kHole);
    if (hole == std::string_view::npos) break;
    if (!name.starts_with(pattern.substr(0, hole))) return std::nullopt;
    name.remove_prefix(hole);
    pattern.remove_prefix(hole + kHole.size());
    const auto n = take_number(name);
    if (!n) return std::nullopt;
    *number = *n;
  }
  return pattern == name ? std::optional<Numbers>(numbers) : std::nullopt;
}

std::optional<ParsedName> parse_as(const Family& family, std::string_view name, Names names) {
  for (const NameRule& rule : family.rules) {
    const std::string_view pattern = rule.name(names);
    if (pattern.empty() || (name.front() != pattern.front() && pattern.front() != '{')) continue;
    if (const auto n = match(pattern, name)) return ParsedName{&rule, names, n->layer, n->expert};
  }
  return std::nullopt;
}

std::string replace_first(std::string text, std::string_view from, std::string_view to) {
  if (const std::size_t at = text.find(from); at != std::string::npos) text.replace(at, from.size(), to);
  return text;
}

std::array<Index, kAllNames.size()> count_names(const Family& family, const Catalog& catalog) {
  std::array<Index, kAllNames.size()> counts{};
  for (const Tensor& tensor : catalog.tensors()) {
    const StateKey key = split_state_key(tensor.name);
    if (key.kind != StateKind::kModel) continue;
    if (const auto parsed = parse_name(family, key.parameter)) ++counts[static_cast<std::size_t>(parsed->names)];
  }
  return counts;
}

// Torchtitan's two generations share most names; those only one of them has decide between the two.
std::optional<Names> most_frequent(const std::array<Index, kAllNames.size()>& counts) {
  const auto [hf, old, newer] = counts;
  if (hf + old + newer == 0) return std::nullopt;
  if (hf > old + newer) return Names::kHf;
  return newer > 0 ? Names::kTorchtitan2026 : Names::kTorchtitan;
}

// ---- shapes

bool holds(std::string_view condition, const ModelConfig& config) {
  if (condition.empty()) return true;
  if (condition.front() == '!') return config.number(condition.substr(1)) == 0;
  return config.number(condition) != 0;
}

bool has_layer(const NameRule& rule, const ModelConfig& config, Index layer) {
  if (rule.layers == Layers::kAll || layer < 0) return true;
  return config.is_sparse_layer(layer) == (rule.layers == Layers::kSparse);
}

Result<Dims> expected_shape(const NameRule& rule, const ModelConfig& config) {
  Dims shape;
  for (const std::string& formula : split(rule.shape, ',')) {
    const Index n = TRY(evaluate(formula, config.numbers()).context(config.path).context(rule.hf));
    if (n < 1) return corrupt(config.path + ": " + explain(formula, config.numbers()) + ": expected a positive size");
    shape.push_back(n);
  }
  if (!checked_volume(shape)) return corrupt(config.path + ": " + std::string(rule.hf) + ": the shape overflows");
  return shape;
}

}  // namespace

std::string_view names_title(Names names) { return names == Names::kHf ? "Hugging Face names" : "torchtitan names"; }

std::string_view NameRule::name(Names names) const {
  switch (names) {
    case Names::kHf:
      return hf;
    case Names::kTorchtitan:
      return torchtitan;
    case Names::kTorchtitan2026:
      break;
  }
  return torchtitan_2026;
}

bool NameRule::is_per_expert() const { return hf.find(kHole, hf.find(kHole) + kHole.size()) != std::string_view::npos; }

bool Family::has_names(Names names) const {
  return std::any_of(rules.begin(), rules.end(), [&](const NameRule& r) { return !r.name(names).empty(); });
}

std::span<const Family* const> families() { return kFamilies; }

const Family* family_of_model_type(std::string_view model_type) {
  for (const Family* family : kFamilies)
    if (std::find(family->model_types.begin(), family->model_types.end(), model_type) != family->model_types.end())
      return family;
  return nullptr;
}

std::optional<ParsedName> parse_name(const Family& family, std::string_view parameter) {
  const std::string name = without_wrappers(parameter);
  if (name.empty()) return std::nullopt;
  for (const Names names : kAllNames)
    if (auto parsed = parse_as(family, name, names)) return parsed;
  const auto without = [&](std::string_view prefix, std::span<const Names> conventions) -> std::optional<ParsedName> {
    if (prefix.empty() || name.size() <= prefix.size() || !name.starts_with(prefix)) return std::nullopt;
    for (const Names names : conventions)
      if (auto parsed = parse_as(family, std::string_view(name).substr(prefix.size()), names)) return parsed;
    return std::nullopt;
  };
  if (auto parsed = without("model.", std::span(kAllNames).subspan(1))) return parsed;
  return without(family.optional_prefix, std::span(kAllNames).first(1));
}

std::string format_name(const NameRule& rule, Names names, Index layer, Index expert) {
  std::string out(rule.name(names));
  for (const Index number : {layer, expert})
    if (number >= 0) out = replace_first(std::move(out), kHole, std::to_string(number));
  return out;
}

std::optional<Names> detect_names(const Family& family, const Catalog& catalog) {
  return most_frequent(count_names(family, catalog));
}

std::optional<Detected> detect_family(const Catalog& catalog, const ModelConfig* config) {
  if (const Family* family = config ? family_of_model_type(config->model_type) : nullptr)
    if (const auto names = detect_names(*family, catalog)) return Detected{family, *names};
  std::optional<Detected> best;
  Index most = 0;
  for (const Family* family : kFamilies) {
    const auto counts = count_names(*family, catalog);
    const Index sum = counts[0] + counts[1] + counts[2];
    if (sum <= most) continue;
    most = sum;
    best = Detected{family, *most_frequent(counts)};
  }
  return best;
}

std::string rename_key(const Family& family, std::string_view key, Names names) {
  const StateKey parts = split_state_key(key);
  if (parts.parameter.empty()) return std::string(key);
  const auto parsed = parse_name(family, parts.parameter);
  if (!parsed || parsed->rule->rows == Rows::kFusedQkv || parsed->rule->rows == Rows::kDropped) return std::string(key);
  const std::string name = format_name(*parsed->rule, names, parsed->layer, parsed->expert);
  return name.empty() ? std::string(key) : parts.prefix + name + parts.suffix;
}

std::string canonical_key(const Family& family, std::string_view key) { return rename_key(family, key, Names::kHf); }

KeyPath rename_path(const KeyPath& path, std::string_view from, std::string_view to) {
  if (from == to) return path;
  const StateKey before = split_state_key(from), after = split_state_key(to);
  KeyPath out = path;
  for (auto& part : out)
    if (auto* text = std::get_if<std::string>(&part)) *text = replace_first(*text, before.parameter, after.parameter);
  // ("model", "tok_embeddings.weight") for "model.tok_embeddings.weight": the name was spread over the path.
  std::string joined;
  for (const auto& part : out) {
    if (!joined.empty()) joined += '.';
    joined +=
        std::holds_alternative<std::string>(part) ? std::get<std::string>(part) : std::to_string(std::get<Index>(part));
  }
  if (joined != to) return {std::string(to)};
  return out;
}

Result<std::vector<Parameter>> parameters(const Family& family, const ModelConfig& config) {
  constexpr Index kMaxParameters = 4'000'000;
  std::vector<Parameter> out;
  for (const NameRule& rule : family.rules) {
    if (rule.hf.empty() || rule.shape.empty() || !holds(rule.when, config)) continue;
    const bool has_layers = rule.place == NameRule::Place::kLayer;
    const Index layers = has_layers ? config.num_hidden_layers() : 1;
    const Index experts = rule.is_per_expert() ? config.number("num_experts") : 1;
    const auto count = checked_mul(layers, experts);
    if (!count || *count > kMaxParameters - static_cast<Index>(out.size()))
      return corrupt(config.path + ": describes more than " + with_commas(kMaxParameters) + " tensors");
    std::optional<Dims> shape;
    for (Index layer = 0; layer < layers; ++layer) {
      if (has_layers && !has_layer(rule, config, layer)) continue;
      if (!shape) shape = TRY(expected_shape(rule, config));
      for (Index expert = 0; expert < experts; ++expert) {
        Parameter p{"", *shape, &rule, has_layers ? layer : -1, rule.is_per_expert() ? expert : -1, false};
        p.name = format_name(rule, Names::kHf, p.layer, p.expert);
        p.is_tied = !rule.tied_to.empty() && config.tie_word_embeddings();
        out.push_back(std::move(p));
      }
    }
  }
  return out;
}

Index count_elements(const std::vector<Parameter>& parameters) {
  Index sum = 0;
  for (const Parameter& p : parameters)
    if (!p.is_tied) sum += volume(p.shape);
  return sum;
}

}  // namespace reshard
