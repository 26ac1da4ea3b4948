// SPDX-License-Identifier: Apache-2.0
#include "lib/model/family_file.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "lib/base/choices.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/model/architecture.h"
#include "lib/model/formula.h"

namespace reshard {
namespace {

constexpr Index kMaxFamilyFile = Index{4} << 20;
constexpr Index kVersion = 1;

template <class Value>
using Word = std::pair<std::string_view, Value>;

constexpr std::array<Word<NameRule::Place>, 3> kPlaces = {
    {{"first", NameRule::Place::kFirst}, {"layer", NameRule::Place::kLayer}, {"last", NameRule::Place::kLast}}};
constexpr std::array<Word<Layers>, 6> kLayers = {{{"all", Layers::kAll},
                                                  {"dense", Layers::kDense},
                                                  {"sparse", Layers::kSparse},
                                                  {"linear", Layers::kLinear},
                                                  {"attention", Layers::kAttention},
                                                  {"prediction", Layers::kPrediction}}};
constexpr std::array<Word<Quantized>, 2> kQuantized = {{{"float8", Quantized::kFloat8}, {"mxfp4", Quantized::kMxfp4}}};
constexpr std::array<Word<Form>, 16> kForms = {{{"same", Form::kSame},
                                                {"rotary_query", Form::kRotaryQuery},
                                                {"rotary_key", Form::kRotaryKey},
                                                {"qkv_by_group", Form::kQkvByGroup},
                                                {"rotary_qkv_by_group", Form::kRotaryQkvByGroup},
                                                {"qkv", Form::kQkv},
                                                {"qkv_of_groups", Form::kQkvOfGroups},
                                                {"section", Form::kSection},
                                                {"transposed_section", Form::kTransposedSection},
                                                {"sections", Form::kSections},
                                                {"stacked", Form::kStacked},
                                                {"stacked_sections", Form::kStackedSections},
                                                {"transposed", Form::kTransposed},
                                                {"transposed_qkv", Form::kTransposedQkv},
                                                {"axes", Form::kAxes},
                                                {"dropped", Form::kDropped}}};
constexpr std::array<Word<ValueChange::Kind>, 4> kChanges = {{{"plus_one", ValueChange::Kind::kPlusOne},
                                                              {"times_root", ValueChange::Kind::kTimesRoot},
                                                              {"times_bfloat16_root", ValueChange::Kind::kTimesRoot},
                                                              {"over_root", ValueChange::Kind::kOverRoot}}};

template <class Value, std::size_t N>
Result<Value> word(const Json& json, std::string_view member, const std::array<Word<Value>, N>& words,
                   Value otherwise) {
  if (!json.contains(member)) return otherwise;
  const std::string_view text = TRY(json.get_string(member));
  std::vector<std::string> all;
  for (const auto& [name, value] : words) {
    if (name == text) return value;
    all.emplace_back(name);
  }
  return corrupt(std::string(member) + ": expected " + join(all, ", ") + ", got '" + printable(text) + "'");
}

// Returns a family by its name, or null.
using FamilyOf = std::function<const Family*(std::string_view name)>;

class FamilyReader {
 public:
  explicit FamilyReader(const FamilyOf& family_of) : family_of_(family_of) {}

  Result<Family> read(const Json& json) {
    TRY(only(json, {"reshard_family", "name", "title", "description", "extends", "around_text", "model_types", "prefix",
                    "defaults", "without", "renamed", "parameters", "carried", "in_memory", "names"}));
    if (const Index version = TRY(json.get_index("reshard_family")); version != kVersion)
      return unsupported("reshard_family: expected version " + std::to_string(kVersion) + ", got " +
                         std::to_string(version));
    if (json.contains("extends")) TRY(extend(TRY(json.get_string("extends"))));
    out_.name = TRY(json.get_string("name"));
    if (out_.name.empty()) return corrupt("name: expected a name, got none");
    out_.title = TRY(text(json, "title", out_.name));
    out_.optional_prefix = TRY(text(json, "prefix", out_.optional_prefix));
    TRY(each(json, "model_types", [&](const Json& item) -> Status {
      out_.model_types.emplace_back(TRY(item.as_string()));
      return {};
    }));
    if (json.contains("defaults")) out_.defaults.clear();
    TRY(each(json, "defaults", [&](const Json& item) { return read_default(item); }));
    TRY(each(json, "without", [&](const Json& item) { return leave_out(item); }));
    const Prefixes renamed = TRY(prefixes(json, "renamed"));
    rename_all(renamed);
    if (json.contains("around_text") && TRY(json.get_bool("around_text"))) {
      if (renamed.empty()) return corrupt("around_text: expected the member 'renamed' too");
      out_.around_text = renamed;
    }
    TRY(each(json, "parameters", [&](const Json& item) { return read_rule(item); }));
    TRY(each(json, "carried", [&](const Json& item) -> Status {
      out_.carried.emplace_back(TRY(item.as_string()));
      return {};
    }));
    for (ConventionTable& table : out_.conventions)
      std::erase_if(table.rules, [&](const StoredRule& rule) { return !are_known(rule.parts); });
    TRY(read_names(json));
    drop_unlisted(json.find("names"));
    add_layers_first();
    if (json.contains("in_memory")) name_in_memory(TRY(prefixes(json, "in_memory")));
    TRY(check_pairs());
    return std::move(out_);
  }

  // Returns a family with around_text over another text family. Nothing if a name of that does not fit.
  static std::optional<Family> over(const Family& outer, const Family& text, std::string name) {
    const FamilyOf none;
    FamilyReader reader(none);
    reader.out_ = text;
    Family& out = reader.out_;
    const auto has_place = [&](const NameRule& rule) {
      return std::any_of(outer.around_text.begin(), outer.around_text.end(),
                         [&](const auto& renamed) { return rule.hf.starts_with(renamed.first); });
    };
    if (!std::all_of(out.rules.begin(), out.rules.end(), has_place)) return std::nullopt;
    out.name = std::move(name);
    out.title = outer.title + " over " + text.title;
    out.text_model_types = out.model_types;
    out.model_types = outer.model_types;
    out.carried.insert(out.carried.end(), outer.carried.begin(), outer.carried.end());
    reader.rename_all(outer.around_text);
    reader.drop_unlisted(nullptr);
    reader.add_layers_first();
    reader.name_in_memory(outer.in_memory);
    return std::move(out);
  }

 private:
  // Copies everything from another family except its name and model types.
  Status extend(std::string_view name) {
    const Family* base = family_of_(name);
    if (!base) return corrupt("extends: '" + printable(name) + "' is not a known family");
    out_ = *base;
    out_.model_types.clear();
    out_.around_text.clear();
    out_.extended = name;
    return {};
  }

  using Prefixes = std::vector<std::pair<std::string, std::string>>;

  static Result<Prefixes> prefixes(const Json& json, std::string_view member) {
    Prefixes out;
    TRY(each(json, member, [&](const Json& item) -> Status {
      const auto pair = TRY(item.as_array());
      if (pair.size() != 2) return corrupt("expected two name prefixes");
      out.emplace_back(TRY(pair[0].as_string()), TRY(pair[1].as_string()));
      if (out.back().first.empty() || out.back().second.empty())
        return corrupt("expected two name prefixes, got an empty one");
      return {};
    }));
    return out;
  }

  // Changes the name prefixes of the extended family.
  void rename_all(const Prefixes& list) {
    if (list.empty()) return;
    const auto rename = [&](std::string& name) { name = replace_prefix(name, list); };
    for (NameRule& rule : out_.rules) {
      rename(rule.hf);
      rename(rule.tied_to);
    }
    std::erase_if(out_.conventions, [](const ConventionTable& t) {
      return t.convention != Convention::kTransformers && !info(t.convention).must_be_listed;
    });
    for (ConventionTable& table : out_.conventions)
      for (StoredRule& rule : table.rules) {
        if (table.convention == Convention::kTransformers) rename(rule.stored);
        std::for_each(rule.parts.begin(), rule.parts.end(), rename);
      }
  }

  // Adds the in-memory name of every parameter.
  void name_in_memory(Prefixes list) {
    out_.in_memory = std::move(list);
    ConventionTable& table = table_of(Convention::kTransformers);
    std::set<std::string> named;
    for (StoredRule& rule : table.rules) {
      rule.stored = replace_prefix(rule.stored, out_.in_memory);
      named.insert(rule.parts.begin(), rule.parts.end());
    }
    for (const NameRule& rule : out_.rules)
      if (std::string name = replace_prefix(rule.hf, out_.in_memory); name != rule.hf && !named.contains(rule.hf))
        table.rules.push_back({std::move(name), Form::kSame, {rule.hf}});
  }

  ConventionTable& table_of(Convention convention) {
    const auto table = std::find_if(out_.conventions.begin(), out_.conventions.end(),
                                    [&](const ConventionTable& t) { return t.convention == convention; });
    return table != out_.conventions.end()
               ? *table
               : out_.conventions.emplace_back(ConventionTable{.convention = convention, .rules = {}});
  }

  Status leave_out(const Json& item) {
    const std::string_view pattern = TRY(item.as_string());
    std::size_t erased = std::erase_if(out_.rules, [&](const NameRule& r) { return glob_match(pattern, r.hf); });
    for (ConventionTable& table : out_.conventions)
      erased += std::erase_if(table.rules, [&](const StoredRule& r) { return glob_match(pattern, r.stored); });
    if (erased > 0) return {};
    return corrupt("'" + printable(pattern) + "' matches no name of the extended family");
  }

  // Returns a member's text, or `otherwise` if there is none.
  static Result<std::string> text(const Json& json, std::string_view member, const std::string& otherwise = {}) {
    if (!json.contains(member)) return otherwise;
    return std::string(TRY(json.get_string(member)));
  }

  static Status only(const Json& json, std::initializer_list<std::string_view> known) {
    for (const Json::Member& m : TRY(json.as_object()))
      if (std::find(known.begin(), known.end(), m.key) == known.end())
        return corrupt("'" + printable(m.key) + "' is an unknown member" +
                       choices_text(m.key, {known.begin(), known.end()}));
    return {};
  }

  // Reads the items of an array member, which may be absent.
  template <class Read>
  static Status each(const Json& json, std::string_view member, Read read) {
    if (!json.contains(member)) return {};
    return each_of(json.get_array(member), member, read);
  }
  template <class Read>
  static Status each_of(const Result<std::span<const Json>>& items, std::string_view member, Read read) {
    if (!items) return items.error();
    for (std::size_t i = 0; i < items->size(); ++i)
      if (Status done = read((*items)[i]); !done)
        return std::move(done).error().context(std::string(member) + "[" + std::to_string(i) + "]");
    return {};
  }

  Status read_default(const Json& item) {
    const auto pair = TRY(item.as_array());
    if (pair.size() != 2) return corrupt("expected [name, formula]");
    const std::string_view name = TRY(pair[0].as_string()), formula = TRY(pair[1].as_string());
    out_.defaults.push_back({std::string(name), std::string(formula)});
    return check_formula(out_.defaults.back().formula);
  }

  // Fails if the formula cannot be computed even if all names have values.
  static Status check_formula(std::string_view formula) {
    TRY(evaluate(formula, [](std::string_view) {
          return std::optional<Index>(1);
        }).context("formula '" + printable(formula) + "'"));
    return {};
  }

  Status read_rule(const Json& json) {
    TRY(only(json, {"name", "shape", "dropped", "tp_dim", "shape_of_type", "heads", "sections", "place", "layers",
                    "layer_type", "when", "tied_to", "dtype", "quantized", "buffer"}));
    NameRule rule{.hf = TRY(text(json, "name"))};
    TRY(check_pattern("name", rule.hf));
    rule.shape = TRY(text(json, "shape"));
    const bool dropped = json.contains("dropped") && TRY(json.get_bool("dropped"));
    if (json.contains("tp_dim")) rule.tp_dim = static_cast<int>(TRY(number(json, "tp_dim", -1, kMaxRank - 1)));
    rule.heads = TRY(text(json, "heads"));
    if (json.contains("sections")) rule.sections = TRY(number(json, "sections", 1, 1024));
    const bool is_layer = rule.hf.find("{}") != std::string::npos;
    rule.place = TRY(word(json, "place", kPlaces, is_layer ? rule.place : NameRule::Place::kFirst));
    rule.layers = TRY(word(json, "layers", kLayers, rule.layers));
    rule.layer_type = TRY(text(json, "layer_type"));
    rule.when = TRY(text(json, "when"));
    rule.tied_to = TRY(text(json, "tied_to"));
    rule.dtype = TRY(text(json, "dtype"));
    if (json.contains("buffer")) rule.buffer = TRY(json.get_bool("buffer"));
    rule.quantized = TRY(quantized(json));
    if (is_layer != (rule.place == NameRule::Place::kLayer))
      return corrupt("place: '" + printable(rule.hf) + "' " + (is_layer ? "has" : "has no") + " layer number {}");
    if (rule.shape.empty() != dropped) return corrupt("shape: expected either a shape or \"dropped\": true");
    const auto formulas = rule.shape.empty() ? std::vector<std::string>() : split(rule.shape, ',');
    if (formulas.size() > std::size_t{kMaxRank})
      return corrupt("shape: expected at most " + std::to_string(kMaxRank) + " dimensions, got " +
                     std::to_string(formulas.size()));
    for (const std::string& formula : formulas) TRY(check_formula(formula));
    TRY(read_shapes_of_types(json, formulas.size(), rule));
    constexpr std::size_t kMatrix = 2, kExperts = 3;
    if (const std::size_t expected = rule.quantized == Quantized::kMxfp4 ? kExperts : kMatrix;
        rule.quantized != Quantized::kNever && formulas.size() != expected)
      return corrupt("quantized: expected a shape of " + count_of(expected, "dimension") + ", got " +
                     std::to_string(formulas.size()));
    if (rule.tp_dim >= static_cast<int>(formulas.size()) && rule.tp_dim >= 0)
      return corrupt("tp_dim: expected one of " + count_of(std::ssize(formulas), "dimension") + ", got " +
                     std::to_string(rule.tp_dim));
    return put(out_.rules, std::move(rule), &NameRule::hf, "");
  }

  // {"sliding_attention": "2*num_key_value_heads*head_dim, hidden_size"}
  static Status read_shapes_of_types(const Json& json, std::size_t rank, NameRule& rule) {
    if (!json.contains("shape_of_type")) return {};
    for (const Json::Member& m : TRY(json.get_object("shape_of_type"))) {
      rule.shape_of_type.emplace_back(m.key, TRY(m.value.as_string()));
      const auto formulas = split(rule.shape_of_type.back().second, ',');
      if (formulas.size() != rank)
        return corrupt("shape_of_type: expected " + count_of(rank, "dimension") + " as in shape, got " +
                       std::to_string(formulas.size()));
      for (const std::string& formula : formulas) TRY(check_formula(formula));
    }
    return {};
  }

  static Result<Quantized> quantized(const Json& json) {
    const Json* const how = json.find("quantized");
    if (!how || !how->is_bool()) return word(json, "quantized", kQuantized, Quantized::kNever);
    return TRY(how->as_bool()) ? Quantized::kFloat8 : Quantized::kNever;
  }

  // Adds a rule, replacing the extended family's rule of the same name.
  template <class Rule>
  Status put(std::vector<Rule>& rules, Rule rule, std::string Rule::*name, std::string_view convention) {
    if (!own_.emplace(convention, rule.*name).second)
      return corrupt("'" + printable(rule.*name) + "' is defined twice");
    const auto there = std::find_if(rules.begin(), rules.end(), [&](const Rule& r) { return r.*name == rule.*name; });
    if (there == rules.end())
      rules.push_back(std::move(rule));
    else
      *there = std::move(rule);
    return {};
  }

  static Status check_pattern(std::string_view member, std::string_view pattern) {
    std::size_t holes = 0;
    for (std::size_t at = pattern.find("{}"); at != std::string_view::npos; at = pattern.find("{}", at + 2)) ++holes;
    if (!pattern.empty() && holes <= 2) return {};
    return corrupt(std::string(member) + ": expected a name with at most two {}, got '" + printable(pattern) + "'");
  }

  static Result<Index> number(const Json& json, std::string_view member, Index least, Index most) {
    const Index n = TRY(json.get_index(member));
    if (n >= least && n <= most) return n;
    return corrupt(std::string(member) + ": expected " + std::to_string(least) + " to " + std::to_string(most) +
                   ", got " + std::to_string(n));
  }

  // Keys may list several conventions: "torchtitan, torchtitan-2026". null removes a convention of the extended family.
  Status read_names(const Json& json) {
    if (!json.contains("names")) return {};
    for (const Json::Member& m : TRY(json.get_object("names"))) {
      for (const std::string& name : split(m.key, ',')) {
        const std::string_view option = std::string_view(name).substr(name.starts_with(' ') ? 1 : 0);
        const auto convention = find_convention(option);
        if (!convention || *convention == Convention::kHf)
          return corrupt("names: expected one of " + join(convention_options(), ", ") + " (except hf), got '" +
                         printable(option) + "'");
        if (m.value.is_null()) {
          std::erase_if(out_.conventions, [&](const ConventionTable& t) { return t.convention == *convention; });
          continue;
        }
        TRY(each_of(m.value.as_array(), "names: " + m.key,
                    [&](const Json& item) { return read_stored(item, *convention); }));
      }
    }
    return {};
  }

  // Drops the conventions that `names` has to mention and does not.
  void drop_unlisted(const Json* names) {
    std::set<std::string, std::less<>> listed;
    if (names && names->is_object()) {
      const std::span<const Json::Member> members = *names->as_object();
      for (const Json::Member& m : members)
        for (const std::string& name : split(m.key, ',')) listed.insert(name.substr(name.starts_with(' ') ? 1 : 0));
    }
    std::erase_if(out_.conventions, [&](const ConventionTable& t) {
      return info(t.convention).must_be_listed && !listed.contains(info(t.convention).option);
    });
  }

  // Adds the tables of conventions that are others with the layers first.
  void add_layers_first() {
    for (const ConventionInfo& row : kConventions) {
      if (!row.layers_first_of || !out_.has_convention(*row.layers_first_of)) continue;
      if (out_.has_convention(row.convention)) continue;
      ConventionTable table{row.convention, table_of(*row.layers_first_of).rules};
      for (StoredRule& rule : table.rules) rule.put_layers_first();
      out_.conventions.push_back(std::move(table));
    }
  }

  bool are_known(const std::vector<std::string>& parts) const {
    return std::all_of(parts.begin(), parts.end(), [&](const std::string& part) {
      return std::any_of(out_.rules.begin(), out_.rules.end(), [&](const NameRule& r) { return r.hf == part; });
    });
  }

  Status read_stored(const Json& json, Convention convention) {
    TRY(only(json, {"stored", "form", "parts", "sections", "section", "layers", "axes", "columns", "pairs", "unstacked",
                    "rest", "blocks", "from", "to", "values", "root_of"}));
    StoredRule rule;
    rule.stored = TRY(text(json, "stored"));
    TRY(check_pattern("stored", rule.stored));
    rule.form = TRY(word(json, "form", kForms, json.contains("axes") ? Form::kAxes : rule.form));
    TRY(each(json, "parts", [&](const Json& item) -> Status {
      rule.parts.emplace_back(TRY(item.as_string()));
      if (are_known({rule.parts.back()})) return {};
      return corrupt("'" + printable(rule.parts.back()) + "' is not a parameter of this family");
    }));
    TRY(read_axes(json, info(convention).in_pairs, rule));
    TRY(read_section(json, rule));
    TRY(read_change(json, rule.change));
    rule.of_prediction = TRY(word(json, "layers", kLayers, Layers::kAll)) == Layers::kPrediction;
    const auto [least, most] = part_counts(rule);
    if (rule.parts.size() < least || rule.parts.size() > most)
      return corrupt("parts: expected " + std::to_string(least) + ", got " + std::to_string(rule.parts.size()));
    for (StoredRule& one : TRY(expand(json, rule, info(convention).layers_apart)))
      TRY(put(table_of(convention).rules, std::move(one), &StoredRule::stored, info(convention).option));
    return {};
  }

  // "1 layers 0:num_attention_heads 0"
  static Status read_axes(const Json& json, bool in_pairs, StoredRule& rule) {
    if (json.contains("axes") != (rule.form == Form::kAxes))
      return corrupt("axes: expected with form axes, and only there");
    if (rule.form != Form::kAxes) return {};
    for (const std::string& word : split(TRY(text(json, "axes")), ' ')) rule.axes.push_back(TRY(axis_of(word)));
    if (rule.axes.size() > std::size_t{kMaxRank})
      return corrupt("axes: expected at most " + std::to_string(kMaxRank) + ", got " +
                     std::to_string(rule.axes.size()));
    if (json.contains("columns")) {
      rule.columns = TRY(number(json, "columns", 2, 16));
      rule.section = TRY(number(json, "section", 0, rule.columns - 1));
    }
    rule.pairs = in_pairs && json.contains("pairs") && TRY(json.get_bool("pairs"));
    rule.layers.from = TRY(text(json, "from"));
    rule.layers.to = TRY(text(json, "to"));
    for (const std::string* formula : {&rule.layers.from, &rule.layers.to})
      if (!formula->empty()) TRY(check_formula(*formula));
    return check_axes(rule);
  }

  static Result<StoredAxis> axis_of(const std::string& word) {
    if (word == "layers") return StoredAxis{StoredAxis::Of::kLayers};
    if (word == "experts") return StoredAxis{StoredAxis::Of::kExperts};
    if (word == "parts") return StoredAxis{StoredAxis::Of::kParts};
    const std::size_t colon = std::min(word.find(':'), word.size());
    const auto dim = parse_number(std::string_view(word).substr(0, colon));
    if (!dim || *dim >= kMaxRank)
      return corrupt("axes: expected a dimension, layers, experts or parts, got '" + printable(word) + "'");
    StoredAxis out{StoredAxis::Of::kPart, static_cast<int>(*dim)};
    if (colon == word.size()) return out;
    out.size = word.substr(colon + 1);
    TRY(check_formula(out.size));
    return out;
  }

  // Fails unless the dimensions are 0, 1, ..., each once or as quotients followed by the remainder.
  static Status check_axes(const StoredRule& rule) {
    std::map<int, std::vector<const StoredAxis*>> by_dim;
    for (const StoredAxis& axis : rule.axes)
      if (axis.of == StoredAxis::Of::kPart) by_dim[axis.dim].push_back(&axis);
    int next = 0;
    for (const auto& [dim, axes] : by_dim) {
      const bool fits = axes.back()->size.empty() &&
                        std::all_of(axes.begin(), axes.end() - 1, [](const auto* a) { return !a->size.empty(); });
      if (dim != next++ || !fits)
        return corrupt("axes: expected each dimension of the part once, or as DIM:COUNT ... and later DIM");
    }
    return {};
  }

  static Status read_change(const Json& json, ValueChange& change) {
    change.kind = TRY(word(json, "values", kChanges, change.kind));
    change.rounds_to_bf16 = TRY(text(json, "values")) == "times_bfloat16_root";
    change.of = TRY(text(json, "root_of"));
    const bool has_root = change.kind == ValueChange::Kind::kTimesRoot || change.kind == ValueChange::Kind::kOverRoot;
    if (has_root == change.of.empty()) return corrupt("root_of: expected with values that have a root, and only there");
    return has_root ? check_formula(change.of) : Status();
  }

  // Returns the rules that an item stands for: with "unstacked", the layers have one tensor each under that name, too;
  // with "rest", those beyond whole blocks; with "blocks", names with {block} are those of every n-th layer. The first
  // are written.
  static Result<std::vector<StoredRule>> expand(const Json& json, const StoredRule& rule, bool layers_apart) {
    if (!json.contains("unstacked")) return std::vector{rule};
    std::vector<std::string> blocks;
    TRY(each(json, "blocks", [&](const Json& item) -> Status {
      blocks.emplace_back(TRY(item.as_string()));
      return {};
    }));
    const std::string n = std::to_string(blocks.size()), whole_blocks = "num_hidden_layers/" + n + "*" + n;
    const bool has_rest = json.contains("rest") && !blocks.empty();
    std::vector<StoredRule> stacked, apart;
    StoredRule one = rule;
    if (has_rest) one.layers.to = whole_blocks;
    add_blocks(one, rule.stored, blocks, stacked);
    one = rule;
    std::erase_if(one.axes, [](const StoredAxis& axis) { return axis.of == StoredAxis::Of::kLayers; });
    add_blocks(one, TRY(text(json, "unstacked")), blocks, apart);
    one.layers.from = whole_blocks;
    if (has_rest) add_blocks(one, TRY(text(json, "rest")), {}, stacked);
    if (layers_apart) std::swap(stacked, apart);
    stacked.insert(stacked.end(), apart.begin(), apart.end());
    return stacked;
  }

  // Adds a rule of this name, or one for each block.
  static void add_blocks(StoredRule rule, const std::string& name, const std::vector<std::string>& blocks,
                         std::vector<StoredRule>& out) {
    constexpr std::string_view kBlock = "{block}";
    const std::size_t at = name.find(kBlock);
    rule.stored = name;
    if (at == std::string::npos) out.push_back(rule);
    for (std::size_t b = 0; b < blocks.size() && at != std::string::npos; ++b) {
      rule.stored = name.substr(0, at) + blocks[b] + name.substr(at + kBlock.size());
      rule.layers.block = b;
      rule.layers.step = std::ssize(blocks);
      out.push_back(rule);
    }
  }

  static Status read_section(const Json& json, StoredRule& rule) {
    if (rule.columns > 1) return {};
    if (json.contains("sections") != rule.is_section() || json.contains("section") != rule.is_section())
      return corrupt("section, sections: expected both with form section or transposed_section, and only there");
    TRY(each(json, "sections", [&](const Json& item) -> Status {
      rule.sections.emplace_back(TRY(item.as_string()));
      return check_formula(rule.sections.back());
    }));
    if (!rule.is_section()) return {};
    if (rule.sections.size() < 2) return corrupt("sections: expected the sizes of two or more");
    rule.section = TRY(number(json, "section", 0, std::ssize(rule.sections) - 1));
    return {};
  }

  static std::pair<std::size_t, std::size_t> part_counts(const StoredRule& rule) {
    if (rule.has_axis(StoredAxis::Of::kParts)) return {2, 3};
    switch (rule.form) {
      case Form::kDropped:
        return {0, 0};
      case Form::kQkv:
      case Form::kQkvByGroup:
      case Form::kRotaryQkvByGroup:
        return {3, 3};
      case Form::kSections:
      case Form::kStackedSections:
        return {2, 3};
      default:
        return {1, 1};
    }
  }

  // Fails if one convention stores the rows of a parameter in two orders.
  Status check_pairs() const {
    for (const ConventionTable& table : out_.conventions) {
      std::map<std::string_view, bool> paired;
      for (const StoredRule& rule : table.rules)
        for (const std::string& part : rule.parts)
          if (paired.try_emplace(part, rule.has_pairs(part)).first->second != rule.has_pairs(part))
            return corrupt("names: " + std::string(info(table.convention).option) + ": '" + printable(part) +
                           "' is in rotary pairs in one tensor and not in another");
    }
    return {};
  }

  const FamilyOf& family_of_;
  Family out_;
  std::set<std::pair<std::string_view, std::string>> own_;  // names defined in the file itself, by convention
};

Result<Family> read_family(std::string_view text, std::string_view path, const FamilyOf& family_of) {
  const Json json = TRY(parse_json(text, path));
  return FamilyReader(family_of).read(json).context(path);
}

// Families live as long as the process, even for threads that outlive main(), because configs and views point to them.
const Family* keep_forever(Family family) {
  static std::mutex mutex;
  static auto* const kept = new std::deque<Family>;
  const std::lock_guard lock(mutex);
  return &kept->emplace_back(std::move(family));
}

class BuiltinReader {
 public:
  const Family* at(std::size_t i) {
    if (const Family* const family = families_[i].load(std::memory_order_acquire)) return family;
    const std::lock_guard lock(mutex_);
    return read(i);
  }

 private:
  const Family* read(std::size_t i) {
    if (const Family* const family = families_[i].load(std::memory_order_relaxed)) return family;
    auto family = read_family(all_[i].text, all_[i].name, [this](std::string_view name) { return read(name); });
    if (!family) {  // a test parses all built-in families
      std::fprintf(stderr, "%s\n", family.error().message().c_str());
      std::abort();
    }
    const Family* const kept = keep_forever(*std::move(family));
    families_[i].store(kept, std::memory_order_release);
    return kept;
  }

  const Family* read(std::string_view name) {
    const auto found = std::find_if(all_.begin(), all_.end(), [&](const BuiltinFamily& b) { return b.name == name; });
    return found == all_.end() ? nullptr : read(found - all_.begin());
  }

  const std::span<const BuiltinFamily> all_ = builtin_families();
  std::vector<std::atomic<const Family*>> families_{all_.size()};
  std::mutex mutex_;
};

}  // namespace

Result<Family> parse_family(std::string_view text, std::string_view path) {
  return read_family(text, path, [](std::string_view name) { return find_family(name); });
}

bool mentions(std::size_t i, const std::string& word) {
  constexpr std::string_view kExtends = "\"extends\": \"";
  const std::span<const BuiltinFamily> all = builtin_families();
  const std::string_view text = all[i].text;
  if (::memmem(text.data(), text.size(), word.data(), word.size())) return true;
  const std::size_t found = text.find(kExtends);
  if (found == std::string_view::npos) return false;
  const std::size_t begin = found + kExtends.size();
  const std::string_view base = text.substr(begin, text.find('"', begin) - begin);
  for (std::size_t k = 0; k < all.size(); ++k)
    if (all[k].name == base) return k != i && mentions(k, word);
  return true;
}

const Family* builtin_family(std::size_t i) {
  static auto* const reader = new BuiltinReader;
  return reader->at(i);
}

namespace {

// Returns the numbers that the family's names depend on: the number of layers, and the value of each formula.
std::vector<Index> numbers_of(const Family& family, const ModelConfig& config) {
  std::vector<Index> out = {config.num_hidden_layers()};
  const auto add = [&](const std::string& formula, Index otherwise) {
    const auto n = formula.empty() ? Result<Index>(otherwise) : evaluate(formula, config.numbers());
    out.push_back(n ? *n : otherwise);
  };
  for (const ConventionTable& table : family.conventions)
    for (const StoredRule& rule : table.rules) {
      if (rule.form != Form::kAxes) continue;
      add(rule.layers.from, 0);
      add(rule.layers.to, config.num_hidden_layers());
    }
  return out;
}

void set_numbers(Family& family, const std::vector<Index>& numbers) {
  std::size_t next = 0;
  family.layers = numbers[next++];
  for (ConventionTable& table : family.conventions)
    for (StoredRule& rule : table.rules) {
      if (rule.form != Form::kAxes) continue;
      rule.layers.first = numbers[next++];
      rule.layers.end = numbers[next++];
    }
}

}  // namespace

const Family& numbered(const Family& family, const ModelConfig* config) {
  static std::mutex mutex;
  static auto* const made = new std::map<std::pair<const Family*, std::vector<Index>>, Family>;
  const auto is_numbered = [](const ConventionTable& table) {
    return std::any_of(table.rules.begin(), table.rules.end(),
                       [](const StoredRule& r) { return r.of_prediction || r.form == Form::kAxes; });
  };
  if (!config || config->num_hidden_layers() < 1 || family.layers > 0 ||
      std::none_of(family.conventions.begin(), family.conventions.end(), is_numbered))
    return family;
  const std::vector<Index> numbers = numbers_of(family, *config);
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = made->try_emplace({&family, numbers}, family);
  if (is_new) set_numbers(found->second, numbers);
  return found->second;
}

const Family* family_over(const Family& outer, const Family& text) {
  static std::mutex mutex;
  static auto* const made = new std::map<std::pair<const Family*, const Family*>, std::optional<Family>>;
  if (outer.around_text.empty()) return nullptr;
  if (outer.extended == text.name) return &outer;
  const std::lock_guard lock(mutex);
  auto found = made->find({&outer, &text});
  if (found == made->end())
    found =
        made->emplace(std::pair(&outer, &text), FamilyReader::over(outer, text, outer.name + "+" + text.name)).first;
  return found->second ? &*found->second : nullptr;
}

namespace {

// Reads a family or a table of classes (architecture.h). Their members differ.
Result<Family> parse_own(std::string_view text, const std::string& path) {
  const Json json = TRY(parse_json(text, path));
  if (!json.find("classes") || json.find("reshard_family")) return parse_family(text, path);
  Family out;
  out.name = TRY(type_of_class_table(text, path));
  out.title = out.name;
  out.class_table = std::string(text);
  return out;
}

}  // namespace

Result<const Family*> load_family(const std::string& path) {
  static std::mutex mutex;
  static auto* const loaded = new std::map<std::string, const Family*>;  // by text
  std::string text = TRY(read_whole_file(path, kMaxFamilyFile));
  Family family = TRY(parse_own(text, path));
  const std::lock_guard lock(mutex);
  const Family*& kept = (*loaded)[std::move(text)];
  if (!kept) kept = keep_forever(std::move(family));
  return kept;
}

}  // namespace reshard
