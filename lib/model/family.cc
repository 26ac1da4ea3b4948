// SPDX-License-Identifier: Apache-2.0
#include "lib/model/family.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/family_file.h"
#include "lib/model/parameters.h"
#include "lib/model/parts.h"
#include "lib/model/quantization.h"
#include "lib/model/shapes.h"

namespace reshard {
namespace {

constexpr std::string_view kHole = "{}";
constexpr std::string_view kOver = "+";  // joins the names of two families
// The suffixes of tensors that a quantized model stores instead of a parameter or next to it.
constexpr std::pair<std::string_view, Quantized> kSuffixes[] = {{"_scale_inv", Quantized::kFloat8},
                                                                {"_scale", Quantized::kFloat8},
                                                                {kMxfp4Blocks, Quantized::kMxfp4},
                                                                {kMxfp4Scales, Quantized::kMxfp4}};
constexpr std::string_view kActivationScales[] = {"input_scale",
                                                  "output_scale",
                                                  "activation_scale",
                                                  "q_scale",
                                                  "k_scale",
                                                  "v_scale",
                                                  "kv_scale",
                                                  "prob_scale",
                                                  "input_global_scale",
                                                  "input_zero_point",
                                                  "output_zero_point",
                                                  "k_zero_point",
                                                  "v_zero_point",
                                                  "q_global_scale",
                                                  "k_global_scale",
                                                  "v_global_scale",
                                                  "input_scale_ub",
                                                  "output_scale_2",
                                                  "input_activation_scale",
                                                  "output_activation_scale",
                                                  "act_global_scale"};
const NameRule kDerived = {.hf = ""};  // the rule of names that are not parameters

// ---- Names

// The numbers that match the holes of a pattern ("layers.{}.x" against "layers.12.x"). -1: no such hole.
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

const NameRule* rule_of(const Family& family, std::string_view hf) {
  const auto rule =
      std::find_if(family.rules.begin(), family.rules.end(), [&](const NameRule& r) { return r.hf == hf; });
  return rule == family.rules.end() ? nullptr : &*rule;
}

bool may_match(std::string_view pattern, std::string_view name) {
  return !pattern.empty() && (name.starts_with(pattern.front()) || pattern.front() == '{');
}

std::span<const StoredRule> stored_rules(const Family& family, Convention convention) {
  for (const ConventionTable& table : family.conventions)
    if (table.convention == convention) return table.rules;
  return {};
}

std::optional<ParsedName> parse_hf(const Family& family, std::string_view name) {
  for (const NameRule& rule : family.rules) {
    if (!may_match(rule.hf, name)) continue;
    if (const auto n = match(rule.hf, name)) return ParsedName{&rule, nullptr, Convention::kHf, n->layer, n->expert};
  }
  return std::nullopt;
}

std::optional<ParsedName> parse_stored(const Family& family, std::string_view name, Convention convention) {
  for (const StoredRule& stored : stored_rules(family, convention)) {
    if (!may_match(stored.stored, name)) continue;
    const auto n = match(stored.stored, name);
    if (!n) continue;
    if (stored.of_prediction && family.layers == 0) continue;
    const NameRule* rule = stored.form == Form::kDropped ? &kDerived : rule_of(family, stored.parts[0]);
    const Index layer = n->layer < 0           ? n->layer
                        : stored.of_prediction ? family.layers + n->layer
                                               : stored.layers.layer(n->layer);
    if (rule) return ParsedName{rule, &stored, convention, layer, n->expert};
  }
  return std::nullopt;
}

// Any matrix may be float8 if the producer chooses.
bool may_be(const NameRule& rule, Quantized quantized) {
  return rule.quantized == quantized || (quantized == Quantized::kFloat8 && rule.is_matrix());
}

std::optional<ParsedName> parse_as(const Family& family, std::string_view name, Convention convention) {
  const auto parse = [&](std::string_view parameter) {
    return convention == Convention::kHf ? parse_hf(family, parameter) : parse_stored(family, parameter, convention);
  };
  if (auto parsed = parse(name)) return parsed;
  for (const auto& [suffix, quantized] : kSuffixes) {
    if (!name.ends_with(suffix)) continue;
    auto parameter = parse(name.substr(0, name.size() - suffix.size()));
    if (!parameter || !may_be(*parameter->rule, quantized)) continue;
    parameter->suffix = suffix;
    if (can_name(family, *parameter, convention)) return parameter;
  }
  return std::nullopt;
}

std::string replace_first(std::string text, std::string_view from, std::string_view to) {
  if (const std::size_t at = text.find(from); at != std::string::npos) text.replace(at, from.size(), to);
  return text;
}

std::string name_in_files(const Family& family, std::string_view name) {
  for (const auto& [file, memory] : family.in_memory)
    if (name.starts_with(memory)) return file + std::string(name.substr(memory.size()));
  return std::string(name);
}

// Returns the names of the parameters whose optimizer state is in a catalog, each once for all of its state.
NamePatterns names_in_optimizer(const Catalog& catalog) {
  std::set<std::string> names;
  for (const Tensor& tensor : catalog.tensors()) {
    StateKey key = split_state_key(tensor.key());
    if (key.kind == StateKind::kOptimizer && key.prefix.ends_with(".state.") && !is_digits(key.parameter))
      names.insert(std::move(key.parameter));
  }
  names.erase("");
  NamePatterns out;
  for (const std::string& name : names) add_name(out, name);
  return out;
}

// Returns the names of the model tensors of a catalog, those of a packed weight as its name; of an optimizer's state
// without its model, those of its parameters. A model with experts has 100,000 tensors and some dozens of patterns.
// `examples` receives the first tensor of each pattern that is not packed.
NamePatterns model_names(const Catalog& catalog, const PackedWeights& packed = {},
                         std::vector<const Tensor*>* examples = nullptr) {
  NamePatterns out;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    const Tensor& tensor = catalog.tensors()[i];
    StateKey key = split_state_key(tensor.key());
    if (key.kind != StateKind::kModel) continue;
    const PackedWeight* const weight = packed.of(i);
    if (weight && !is_known_to_families(weight->packing)) key.parameter = weight->name;
    const std::size_t known = out.size();
    add_name(out, std::move(key.parameter));
    if (examples && out.size() > known && !packed.is_of(i)) examples->push_back(&tensor);
  }
  return out.empty() ? names_in_optimizer(catalog) : out;
}

bool knows(const Family& family, std::string_view name, Convention convention) {
  if (parse_as(family, name, convention)) return true;
  if (convention != Convention::kHf && !info(convention).extends_hf) return false;
  const auto parsed = parse_name(family, name);  // ignores the family's optional prefix
  return parsed && parsed->convention == Convention::kHf;
}

// Returns the convention that matches the most names, or nothing if none does.
std::optional<Convention> most_frequent(const Family& family, const NamePatterns& names) {
  std::optional<Convention> best;
  Index most = 0;
  for (const ConventionInfo& row : kConventions) {
    Index known = 0;
    for (const auto& [pattern, alike] : names)
      if (knows(family, alike.example, row.convention)) known += alike.count;
    if (known > most) best = row.convention;
    most = std::max(most, known);
  }
  return best;
}

Index count_carried(const Family& family, const NamePatterns& names) {
  Index out = 0;
  for (const auto& [pattern, alike] : names)
    if (!parse_name(family, alike.example) && family.carries(alike.example)) out += alike.count;
  return out;
}

// Returns the number of names that are parameters or carried tensors.
Index count_known(const Family& family, const NamePatterns& names) {
  Index known = 0;
  for (const auto& [pattern, alike] : names)
    if (parse_name(family, alike.example)) known += alike.count;
  return known > 0 && !family.carried.empty() ? known + count_carried(family, names) : known;
}

constexpr bool rows_are_in_order() {
  for (std::size_t i = 0; i < kConventions.size(); ++i)
    if (kConventions[i].convention != static_cast<Convention>(i)) return false;
  return true;
}
static_assert(rows_are_in_order(), "the rows of kConventions must be in the order of Convention");

}  // namespace

std::vector<std::string> convention_options() {
  std::vector<std::string> out;
  for (const ConventionInfo& row : kConventions) out.emplace_back(row.option);
  return out;
}

std::optional<Convention> find_convention(std::string_view option) {
  if (option == "colossalai") return Convention::kHf;
  for (const ConventionInfo& row : kConventions)
    if (option == row.option) return row.convention;
  return std::nullopt;
}

std::string replace_prefix(std::string_view name, const std::vector<std::pair<std::string, std::string>>& changes) {
  for (const auto& [from, to] : changes)
    if (name.starts_with(from)) return to + std::string(name.substr(from.size()));
  return std::string(name);
}

void StoredRule::put_layers_first() {
  std::stable_partition(axes.begin(), axes.end(), [](const StoredAxis& a) { return a.of == StoredAxis::Of::kLayers; });
}

bool StoredRule::is_packed() const {
  return form != Form::kSame && form != Form::kRotaryQuery && form != Form::kRotaryKey && form != Form::kDropped;
}

bool StoredRule::has_axis(StoredAxis::Of of) const {
  return std::any_of(axes.begin(), axes.end(), [&](const StoredAxis& axis) { return axis.of == of; });
}

bool StoredRule::has_pairs(std::string_view part) const {
  if (pairs) return parts[0] == part;
  return is_rotary(form) && (parts[0] == part || (form == Form::kRotaryQkvByGroup && parts[1] == part));
}

const std::string& NameRule::shape_in(std::string_view type) const {
  for (const auto& [of, other] : shape_of_type)
    if (of == type) return other;
  return shape;
}

bool NameRule::is_matrix() const { return std::count(shape.begin(), shape.end(), ',') == 1; }

bool NameRule::stacks_experts() const {
  return shape.starts_with("num_experts,") && std::count(shape.begin(), shape.end(), ',') == 2;
}

bool NameRule::is_per_expert() const { return hf.find(kHole, hf.find(kHole) + kHole.size()) != std::string_view::npos; }

bool Family::has_convention(Convention convention) const {
  return convention == Convention::kHf || info(convention).extends_hf || !stored_rules(*this, convention).empty();
}

bool Family::knows_model_type(std::string_view model_type) const {
  return std::find(model_types.begin(), model_types.end(), model_type) != model_types.end();
}

bool Family::carries(std::string_view parameter) const {
  return any_glob_matches(carried, parameter) || is_activation_scale(parameter) ||
         (!in_memory.empty() && any_glob_matches(carried, name_in_files(*this, parameter)));
}

const Family* Families::Iterator::operator*() const {
  if (own_ && at_ == 0) return own_;
  return builtin_family(at_ - (own_ ? 1 : 0));
}

std::string_view Families::class_table() const {
  return own_ ? std::string_view(own_->class_table) : std::string_view();
}

Families::Iterator Families::end() const { return {own_, builtin_families().size() + (own_ ? 1 : 0)}; }

void each_family(Families families, std::span<const std::string> words,
                 const std::function<bool(const Family&)>& look) {
  if (families.own() && !look(*families.own())) return;
  for (std::size_t i = 0; i < builtin_families().size(); ++i) {
    const auto is_mentioned = [&](const std::string& word) { return mentions(i, word); };
    if (!words.empty() && std::none_of(words.begin(), words.end(), is_mentioned)) continue;
    if (!look(*builtin_family(i))) return;
  }
}

std::vector<std::string> family_names(Families families) {
  std::vector<std::string> out;
  if (families.own()) out.push_back(families.own()->name);
  for (const BuiltinFamily& family : builtin_families()) out.emplace_back(family.name);
  return out;
}

const Family* find_family(std::string_view name, Families families) {
  const std::vector<std::string> names = family_names(families);
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return *Families::Iterator(families.own(), static_cast<std::size_t>(found - names.begin()));
  const std::size_t over = name.find(kOver);
  const Family* const outer = over == std::string_view::npos ? nullptr : find_family(name.substr(0, over), families);
  const Family* const text = outer ? find_family(name.substr(over + kOver.size()), families) : nullptr;
  return text ? family_over(*outer, *text) : nullptr;
}

bool knows_quantization(const Family& family, const ModelConfig& config) {
  if (config.quantization.empty()) return true;
  if (config.float8 && config.float8->is_chosen)  // any matrix may be; experts only if they are matrices
    return std::none_of(family.rules.begin(), family.rules.end(),
                        [](const NameRule& rule) { return rule.stacks_experts(); });
  const Quantized how = config.float8 ? Quantized::kFloat8 : config.has_mxfp4() ? Quantized::kMxfp4 : Quantized::kNever;
  return how != Quantized::kNever && std::any_of(family.rules.begin(), family.rules.end(),
                                                 [&](const NameRule& rule) { return rule.quantized == how; });
}

const Family* family_of_model_type(std::string_view model_type, std::string_view text_model_type, Families families) {
  for (const Family* family : families) {
    if (!family->knows_model_type(model_type)) continue;
    if (family->around_text.empty() || text_model_type.empty()) return family;
    const Family* const text = family_of_model_type(text_model_type, {}, families);
    return text ? family_over(*family, *text) : nullptr;
  }
  return nullptr;
}

bool same_row_order(const Family& family, Convention a, Convention b) {
  const auto is_paired = [&](const NameRule& rule, Convention convention) {
    const StoredRule* stored = stored_rule(family, rule, convention);
    return stored && stored->has_pairs(rule.hf);
  };
  return std::all_of(family.rules.begin(), family.rules.end(),
                     [&](const NameRule& rule) { return is_paired(rule, a) == is_paired(rule, b); });
}

std::optional<ParsedName> parse_name(const Family& family, std::string_view name) {
  if (name.empty()) return std::nullopt;
  for (const ConventionInfo& row : kConventions)
    if (auto parsed = parse_as(family, name, row.convention)) return parsed;
  const std::string& prefix = family.optional_prefix;
  if (prefix.empty()) return std::nullopt;
  if (!name.starts_with(prefix)) return parse_as(family, prefix + std::string(name), Convention::kHf);
  return name.size() > prefix.size() ? parse_as(family, name.substr(prefix.size()), Convention::kHf) : std::nullopt;
}

Result<std::optional<ParsedName>> parse_tensor(const Family& family, std::string_view name, const Dims& shape,
                                               const ModelConfig* config, const std::string& what) {
  auto parsed = parse_name(family, name);
  if (!parsed || parsed->stored || parsed->is_of_quantized() || shape.rank() < 2) return parsed;
  const StoredRule* const in_memory = transposed_in_memory(family, *parsed->rule);
  if (!in_memory) return parsed;
  if (!config)
    return usage_error(what + ": transformers has its last two dimensions in opposite order in files and in memory, " +
                       "and no config.json tells them apart; add one with --config");
  const Dims in_files = TRY(expected_shape(*parsed->rule, *config, parsed->layer));
  Dims transposed = in_files;
  std::swap(transposed[transposed.rank() - 1], transposed[transposed.rank() - 2]);
  if (shape == transposed && shape == in_files)
    return unsupported(what + " " + to_string(shape) +
                       ": transformers has its last two dimensions in opposite order in files and in memory, " +
                       "and equal dimensions do not tell them apart");
  if (shape == transposed) {
    parsed->stored = in_memory;
    parsed->convention = Convention::kTransformers;
  }
  return parsed;
}

std::string format_pattern(std::string_view pattern, Index layer, Index expert) {
  std::string out(pattern);
  for (const Index number : {layer, expert})
    if (number >= 0) out = replace_first(std::move(out), kHole, std::to_string(number));
  return out;
}

std::string canonical_name(const ParsedName& name) {
  return format_pattern(name.rule->hf, name.layer, name.expert) + std::string(name.suffix);
}

const StoredRule* stored_rule(const Family& family, const NameRule& rule, Convention convention, Index layer) {
  const bool is_prediction = family.layers > 0 && layer >= family.layers;
  const StoredRule* any = nullptr;
  for (const StoredRule& stored : stored_rules(family, convention)) {
    if (std::find(stored.parts.begin(), stored.parts.end(), rule.hf) == stored.parts.end()) continue;
    if (layer >= 0 && !stored.layers.has(layer)) continue;
    if (stored.of_prediction == is_prediction) return &stored;
    if (!stored.of_prediction && !any) any = &stored;
  }
  return any;
}

std::vector<const StoredRule*> stored_sections(const Family& family, const NameRule& rule, Convention convention,
                                               Index layer) {
  const StoredRule* const first = stored_rule(family, rule, convention, layer);
  if (!first) return {};
  std::vector<const StoredRule*> out = {first};
  for (const StoredRule& stored : stored_rules(family, convention))
    if (first->is_section() && stored.is_section() && stored.parts == first->parts && stored.section == out.size() &&
        stored.of_prediction == first->of_prediction && stored.layers == first->layers && stored.axes == first->axes)
      out.push_back(&stored);
  return out;
}

std::string stored_name(const Family& family, const StoredRule& rule, Index layer, Index expert) {
  const Index number = rule.of_prediction ? layer - family.layers : layer < 0 ? layer : rule.layers.number(layer);
  return format_pattern(rule.stored, number, expert);
}

const StoredRule* transposed_in_memory(const Family& family, const NameRule& rule) {
  const StoredRule* const stored = stored_rule(family, rule, Convention::kTransformers);
  return stored && stored->form == Form::kTransposed && stored->stored == rule.hf ? stored : nullptr;
}

bool can_name(const Family& family, const ParsedName& name, Convention convention) {
  if (!name.is_of_quantized() || convention == Convention::kHf) return true;
  const StoredRule* const stored = stored_rule(family, *name.rule, convention, name.layer);
  return convention == Convention::kTransformers && name.rule->quantized != Quantized::kMxfp4 &&
         (!stored || stored->form == Form::kSame);
}

TensorParallelCut tensor_parallel_cut(const ParsedName& name) {
  const NameRule& rule = *name.rule;
  TensorParallelCut cut{rule.tp_dim, rule.heads, rule.sections};
  const bool is_mxfp4 = name.is_of_quantized() && rule.quantized == Quantized::kMxfp4;
  if (is_mxfp4 && cut.dim > 0) cut.dim = 3 - cut.dim;  // [E, out, in, ...] for [E, in, out]
  if (!name.is_packed() || cut.dim < 0) return cut;
  switch (name.stored->form) {
    case Form::kQkvByGroup:
    case Form::kRotaryQkvByGroup:
      cut.heads = "num_key_value_heads";
      break;
    case Form::kQkvOfGroups:
    case Form::kQkv:  // three sections of different sizes cannot be expressed as a split, so every rank holds all of it
      cut = {};
      break;
    case Form::kSections:
      if (cut.dim == 0) cut.sections = std::ssize(name.stored->parts);
      break;
    case Form::kStackedSections:
      if (cut.dim == 0) cut.sections = std::ssize(name.stored->parts);
      ++cut.dim;
      break;
    case Form::kStacked:
      ++cut.dim;
      break;
    case Form::kSection:
      if (cut.dim == 0) cut.sections = 1;
      break;
    case Form::kAxes: {
      const auto& axes = name.stored->axes;
      const auto axis = std::find_if(axes.begin(), axes.end(), [&](const StoredAxis& a) { return a.dim == cut.dim; });
      if (axis == axes.end()) return {};
      if (!axis->size.empty() || name.stored->columns > 1) cut = {cut.dim, {}, 1};  // its units are heads, or columns
      cut.dim = static_cast<int>(axis - axes.begin());
      break;
    }
    case Form::kTransposedSection:
    case Form::kTransposed:
    case Form::kTransposedQkv: {
      if (rule.is_matrix()) cut.dim = 1 - cut.dim;
      if (rule.stacks_experts() && cut.dim > 0) cut.dim = 3 - cut.dim;
      if (name.stored->form != Form::kTransposed)
        cut.sections = 1;  // each head's rows are together, or it is one section
      break;
    }
    case Form::kSame:
    case Form::kRotaryQuery:
    case Form::kRotaryKey:
    case Form::kDropped:
      break;
  }
  return cut;
}

std::string base_prefix(const Family& family) {
  const auto is_of_layer = [](const NameRule& rule) { return rule.place == NameRule::Place::kLayer; };
  const auto rule = std::find_if(family.rules.begin(), family.rules.end(), is_of_layer);
  if (rule == family.rules.end()) return {};
  const std::string name = replace_prefix(rule->hf, family.in_memory);
  const std::size_t end = name.find('.') + 1;
  return std::string_view(name).substr(end).starts_with(kHole) ? "" : name.substr(0, end);
}

std::span<const std::string_view> activation_scales() { return kActivationScales; }

bool is_activation_scale(std::string_view parameter) {
  const std::string_view leaf = parameter.substr(module_of(parameter).size());
  return std::find(std::begin(kActivationScales), std::end(kActivationScales), leaf) != std::end(kActivationScales);
}

void add_name(NamePatterns& names, std::string name) {
  AlikeNames& alike = names[pattern_of(name)];
  if (alike.count++ == 0) alike.example = std::move(name);
}

// Replaces each number by a hole.
std::string pattern_of(std::string_view name) {
  std::string out;
  while (true) {
    const std::size_t end = std::min(name.find('.'), name.size());
    const std::string_view part = name.substr(0, end);
    out += is_digits(part) ? kHole : part;
    if (end == name.size()) return out;
    out += '.';
    name.remove_prefix(end + 1);
  }
}

Index count_all(const NamePatterns& names) {
  return std::accumulate(names.begin(), names.end(), Index{0},
                         [](Index sum, const auto& name) { return sum + name.second.count; });
}

namespace {

// Returns the names inside the text model without its prefix, from files or from memory. Names outside it are dropped.
NamePatterns text_names(const Family& outer, const NamePatterns& names) {
  NamePatterns out;
  for (const auto& [pattern, alike] : names) {
    const std::string in_files = name_in_files(outer, alike.example);
    for (const auto& [text, around] : outer.around_text)
      if (in_files.starts_with(around)) {
        AlikeNames inner{text + in_files.substr(around.size()), alike.count};
        out.emplace(pattern_of(inner.example), std::move(inner));
        break;
      }
  }
  return out;
}

FamilyMatch best_known(const NamePatterns& names, Families families, bool around_text) {
  const Index all = count_all(names);
  FamilyMatch best;
  const auto look = [&](const Family* family) {
    if (const Index known = count_known(*family, names); known > best.names) best = {family, known, known == all};
  };
  if (all == 0) return best;
  each_family(families, first_words(names), [&](const Family& family) {
    look(&family);
    if (best.names == all) return false;
    if (!around_text || family.around_text.empty()) return true;
    const NamePatterns inner = text_names(family, names);
    const Family* const text = inner.empty() ? nullptr : best_known(inner, families, false).family;
    if (const Family* const over = text ? family_over(family, *text) : nullptr) look(over);
    return best.names != all;
  });
  return best;
}

}  // namespace

std::vector<std::string> first_words(const NamePatterns& names) {
  constexpr std::size_t kMost = 16;  // more are not worth searching for
  std::vector<std::string> out;
  for (const auto& [pattern, alike] : names) {
    const std::size_t end = std::min(pattern.find_first_of(".0123456789"), pattern.size());
    const std::string word = pattern.substr(0, end + (end < pattern.size() && pattern[end] == '.' ? 1 : 0));
    if (word.find('{') != std::string::npos || out.size() == kMost) return {};
    if (out.empty() || out.back() != word) out.push_back(word);
  }
  return out;
}

FamilyMatch best_known(const NamePatterns& names, Families families) { return best_known(names, families, true); }

std::optional<Convention> detect_convention(const Family& family, const Catalog& catalog) {
  return most_frequent(family, model_names(catalog));
}

std::vector<Convention> alike_conventions(const Family& family, const Catalog& catalog, Convention convention) {
  const NamePatterns names = model_names(catalog);
  const auto known = [&](Convention c) {
    return std::count_if(names.begin(), names.end(), [&](const auto& n) { return knows(family, n.second.example, c); });
  };
  const auto most = known(convention);
  std::vector<Convention> out;
  for (const ConventionInfo& row : kConventions)
    if (row.convention != convention && family.has_convention(row.convention) && known(row.convention) == most)
      out.push_back(row.convention);
  return out;
}

bool is_kind_of(const Family& family, const Family& said, const ModelConfig& config) {
  return &family == &said || (family.extended == said.name && family.knows_model_type(config.model_type));
}

namespace {

NameAgreement compare_names(const Family& family, const NamePatterns& names, const ModelConfig* config) {
  NameAgreement out;
  std::set<std::string_view> found;  // canonical patterns
  for (const auto& [pattern, alike] : names) {
    const auto parsed = parse_name(family, alike.example);
    if (!parsed) {
      if (!family.carries(alike.example) && !is_other_head(alike.example) && !is_adapter(alike.example))
        out.unknown.push_back(alike.example);
      continue;
    }
    out.known.push_back(alike.example);
    found.insert(parsed->rule->hf);
    if (parsed->stored) found.insert(parsed->stored->parts.begin(), parsed->stored->parts.end());
  }
  for (const NameRule* rule : required_rules(family, config))
    if (!found.contains(rule->hf)) out.missing.push_back(rule->hf);
  return out;
}

}  // namespace

std::string NameAgreement::text() const {
  if (known.empty()) return "no tensor name matches it";
  return count_of(std::ssize(known), "kind") + " of name " + (known.size() == 1 ? "matches" : "match") + " (" +
         some_quoted(known) + "), and " + with_commas(std::ssize(unknown)) + " do not (" + some_quoted(unknown) + ")";
}

NameAgreement compare_names(const Family& family, const Catalog& catalog, const ModelConfig* config) {
  return compare_names(family, model_names(catalog, find_packed(catalog, config)), config);
}

std::optional<Convention> convention_without_config(const Catalog& catalog, Families families) {
  const NamePatterns names = model_names(catalog);
  const FamilyMatch known = best_known(names, families);
  if (!known.family || known.names * 2 <= count_all(names)) return std::nullopt;
  const auto convention = most_frequent(*known.family, names);
  return convention && info(*convention).needs_config ? convention : std::nullopt;
}

std::optional<DetectedFamily> detect_family(const Catalog& catalog, const ModelConfig* config, Families families) {
  std::vector<const Tensor*> examples;
  const NamePatterns names = model_names(catalog, find_packed(catalog, config), &examples);
  const Family* family = config ? family_of_model_type(config->model_type, config->text_model_type, families) : nullptr;
  const bool is_said = family && most_frequent(*family, names) && !compare_names(*family, names, config).is_of_others();
  const auto as = [&](const Family& f) -> std::optional<DetectedFamily> {
    const Convention convention = *most_frequent(f, names);
    if (info(convention).needs_config && !is_said) return std::nullopt;
    return DetectedFamily{&f, convention};
  };
  if (!is_said) family = best_known(names, families).family;
  if (!family || (!is_said && compare_names(*family, names, nullptr).is_of_others())) return std::nullopt;
  if (!check_shapes_agree(*family, examples)) {
    const Index known = count_known(*family, names);
    const auto may_be = [&](const Family& other) {
      return (!is_said || is_kind_of(other, *family, *config)) && count_known(other, names) == known &&
             check_shapes_agree(other, examples);
    };
    for (const Family* other : families)
      if (may_be(*other)) return as(*other);
  }
  return as(*family);
}

std::string rename_key(const Family& family, std::string_view key, Convention convention) {
  const StateKey parts = split_state_key(key);
  const auto parsed = parts.parameter.empty() ? std::nullopt : parse_name(family, parts.parameter);
  if (!parsed && !family.in_memory.empty() && family.carries(parts.parameter)) {
    const std::string in_files = name_in_files(family, parts.parameter);
    const bool is_memory = convention == Convention::kTransformers;
    return parts.prefix + (is_memory ? replace_prefix(in_files, family.in_memory) : in_files) + parts.suffix;
  }
  if (!parsed || parsed->rule->is_dropped() || parsed->is_packed()) return std::string(key);
  if (convention == Convention::kHf) return parts.prefix + canonical_name(*parsed) + parts.suffix;
  const StoredRule* stored =
      can_name(family, *parsed, convention) ? stored_rule(family, *parsed->rule, convention, parsed->layer) : nullptr;
  if (!stored) return std::string(key);
  return parts.prefix + stored_name(family, *stored, parsed->layer, parsed->expert) + std::string(parsed->suffix) +
         parts.suffix;
}

std::string canonical_key(const Family& family, std::string_view key) {
  return rename_key(family, key, Convention::kHf);
}

KeyPath rename_path(const KeyPath& path, std::string_view from, std::string_view to) {
  if (path.empty() && from == to) return path;
  const StateKey before = split_state_key(from), after = split_state_key(to);
  KeyPath out = path;
  for (auto& part : out)
    if (auto* text = std::get_if<std::string>(&part)) *text = replace_first(*text, before.parameter, after.parameter);
  if (out.size() == 4 && dotted_name(out) != to && before.kind == StateKind::kOptimizer)
    out[2] = after.parameter;  // a part of the tensor that the path names
  // ("model", "tok_embeddings.weight") for "model.tok_embeddings.weight": the path splits the name.
  if (dotted_name(out) != to) return {std::string(to)};
  return out;
}

}  // namespace reshard
