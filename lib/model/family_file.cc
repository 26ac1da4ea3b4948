#include "lib/model/family_file.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/model/formula.h"

namespace reshard {
namespace {

constexpr Index kMaxFamilyFile = Index{4} << 20;
constexpr Index kVersion = 1;

template <class Value>
using Word = std::pair<std::string_view, Value>;

constexpr std::array<Word<Rows>, 4> kRows = {{{"plain", Rows::kPlain},
                                              {"rotary_query", Rows::kRotaryQuery},
                                              {"rotary_key", Rows::kRotaryKey},
                                              {"dropped", Rows::kDropped}}};
constexpr std::array<Word<NameRule::Place>, 3> kPlaces = {
    {{"first", NameRule::Place::kFirst}, {"layer", NameRule::Place::kLayer}, {"last", NameRule::Place::kLast}}};
constexpr std::array<Word<Layers>, 4> kLayers = {{{"all", Layers::kAll},
                                                  {"dense", Layers::kDense},
                                                  {"sparse", Layers::kSparse},
                                                  {"prediction", Layers::kPrediction}}};
constexpr std::array<Word<Form>, 7> kForms = {{{"same", Form::kSame},
                                               {"qkv_by_group", Form::kQkvByGroup},
                                               {"sections", Form::kSections},
                                               {"stacked", Form::kStacked},
                                               {"transposed", Form::kTransposed},
                                               {"transposed_qkv", Form::kTransposedQkv},
                                               {"dropped", Form::kDropped}}};

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

// A family and all that its table points at.
struct OwnedFamily {
  std::deque<std::string> texts;
  std::vector<std::string_view> model_types;
  std::vector<ConfigDefault> defaults;
  std::vector<NameRule> rules;
  std::deque<std::vector<StoredRule>> stored;
  std::vector<ConventionTable> conventions;
  Family family;
};

class FamilyReader {
 public:
  Result<std::unique_ptr<OwnedFamily>> read(const Json& json) {
    TRY(only(json, {"reshard_family", "name", "title", "model_types", "defaults", "parameters", "names", "prefix"}));
    if (const Index version = TRY(json.get_index("reshard_family")); version != kVersion)
      return unsupported("reshard_family: expected version " + std::to_string(kVersion) + ", got " +
                         std::to_string(version));
    Family& family = out_->family;
    family.name = TRY(text(json, "name"));
    if (family.name.empty()) return corrupt("name: expected a name, got none");
    family.title = json.contains("title") ? TRY(text(json, "title")) : family.name;
    family.optional_prefix = TRY(text(json, "prefix"));
    TRY(read_model_types(json));
    TRY(read_defaults(json));
    TRY(each(json.get_array("parameters"), "parameters", [&](const Json& item) { return read_rule(item); }));
    TRY(read_names(json));
    family.model_types = out_->model_types;
    family.defaults = out_->defaults;
    family.rules = out_->rules;
    family.conventions = out_->conventions;
    return std::move(out_);
  }

 private:
  std::string_view keep(std::string_view text) { return out_->texts.emplace_back(text); }

  // A member's text, empty where there is none.
  Result<std::string_view> text(const Json& json, std::string_view member) {
    if (!json.contains(member)) return std::string_view();
    return keep(TRY(json.get_string(member)));
  }

  static Status only(const Json& json, std::initializer_list<std::string_view> known) {
    for (const Json::Member& m : TRY(json.as_object()))
      if (std::find(known.begin(), known.end(), m.key) == known.end())
        return corrupt("'" + printable(m.key) + "' is no member that means anything here");
    return {};
  }

  template <class Read>
  static Status each(const Result<std::span<const Json>>& items, std::string_view member, Read read) {
    if (!items) return items.error();
    for (std::size_t i = 0; i < items->size(); ++i)
      if (Status done = read((*items)[i]); !done)
        return std::move(done).error().context(std::string(member) + "[" + std::to_string(i) + "]");
    return {};
  }

  Status read_model_types(const Json& json) {
    if (!json.contains("model_types")) return {};
    return each(json.get_array("model_types"), "model_types", [&](const Json& item) -> Status {
      out_->model_types.push_back(keep(TRY(item.as_string())));
      return {};
    });
  }

  Status read_defaults(const Json& json) {
    if (!json.contains("defaults")) return {};
    return each(json.get_array("defaults"), "defaults", [&](const Json& item) -> Status {
      const auto pair = TRY(item.as_array());
      if (pair.size() != 2) return corrupt("expected [name, formula]");
      out_->defaults.push_back({keep(TRY(pair[0].as_string())), keep(TRY(pair[1].as_string()))});
      return check_formula(out_->defaults.back().formula);
    });
  }

  // That it can be computed once its names have values.
  static Status check_formula(std::string_view formula) {
    TRY(evaluate(formula, [](std::string_view) {
          return std::optional<Index>(1);
        }).context("formula '" + printable(formula) + "'"));
    return {};
  }

  Status read_rule(const Json& json) {
    TRY(only(json, {"name", "shape", "rows", "tp_dim", "heads", "sections", "place", "layers", "when", "tied_to",
                    "dtype", "quantized"}));
    NameRule rule{.hf = TRY(text(json, "name"))};
    TRY(check_pattern("name", rule.hf));
    rule.shape = TRY(text(json, "shape"));
    rule.rows = TRY(word(json, "rows", kRows, rule.rows));
    if (json.contains("tp_dim")) rule.tp_dim = static_cast<int>(TRY(number(json, "tp_dim", -1, kMaxRank - 1)));
    rule.heads = TRY(text(json, "heads"));
    if (json.contains("sections")) rule.sections = TRY(number(json, "sections", 1, 1024));
    const bool is_layer = rule.hf.find("{}") != std::string_view::npos;
    rule.place = TRY(word(json, "place", kPlaces, is_layer ? rule.place : NameRule::Place::kFirst));
    rule.layers = TRY(word(json, "layers", kLayers, rule.layers));
    rule.when = TRY(text(json, "when"));
    rule.tied_to = TRY(text(json, "tied_to"));
    rule.dtype = TRY(text(json, "dtype"));
    if (json.contains("quantized")) rule.quantized = TRY(json.get_bool("quantized"));
    if (is_layer != (rule.place == NameRule::Place::kLayer))
      return corrupt("place: '" + printable(rule.hf) + "' " + (is_layer ? "has" : "has no") + " layer number {}");
    if (rule.shape.empty() != (rule.rows == Rows::kDropped))
      return corrupt("shape: expected one, unless rows are dropped");
    const auto formulas = rule.shape.empty() ? std::vector<std::string>() : split(rule.shape, ',');
    if (formulas.size() > static_cast<std::size_t>(kMaxRank))
      return corrupt("shape: expected at most " + std::to_string(kMaxRank) + " dimensions, got " +
                     std::to_string(formulas.size()));
    for (const std::string& formula : formulas) TRY(check_formula(formula));
    if (rule.tp_dim >= static_cast<int>(formulas.size()) && rule.tp_dim >= 0)
      return corrupt("tp_dim: expected one of " + std::to_string(formulas.size()) + " dimensions, got " +
                     std::to_string(rule.tp_dim));
    for (const NameRule& other : out_->rules)
      if (other.hf == rule.hf) return corrupt("name: '" + printable(rule.hf) + "' is there twice");
    out_->rules.push_back(rule);
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

  Status read_names(const Json& json) {
    if (!json.contains("names")) return {};
    for (const Json::Member& m : TRY(json.get_object("names"))) {
      const auto convention = find_convention(m.key);
      if (!convention || *convention == Convention::kHf)
        return corrupt("names: expected torchtitan, torchtitan-2026 or megatron, got '" + printable(m.key) + "'");
      auto& rules = out_->stored.emplace_back();
      TRY(each(m.value.as_array(), "names: " + m.key, [&](const Json& item) { return read_stored(item, rules); }));
      out_->conventions.push_back({*convention, rules});
    }
    return {};
  }

  Status read_stored(const Json& json, std::vector<StoredRule>& rules) {
    TRY(only(json, {"stored", "form", "parts"}));
    StoredRule rule;
    rule.stored = TRY(text(json, "stored"));
    TRY(check_pattern("stored", rule.stored));
    rule.form = TRY(word(json, "form", kForms, rule.form));
    std::size_t n = 0;
    if (json.contains("parts")) {
      TRY(each(json.get_array("parts"), "parts", [&](const Json& item) -> Status {
        const std::string_view part = keep(TRY(item.as_string()));
        const auto known =
            std::any_of(out_->rules.begin(), out_->rules.end(), [&](const NameRule& r) { return r.hf == part; });
        if (!known) return corrupt("'" + printable(part) + "' is none of the parameters");
        if (n == rule.parts.size()) return corrupt("expected at most " + std::to_string(n));
        rule.parts[n++] = part;
        return {};
      }));
    }
    const std::size_t least = rule.form == Form::kDropped      ? 0
                              : rule.form == Form::kQkvByGroup ? 3
                              : rule.form == Form::kSections   ? 2
                                                               : 1;
    const std::size_t most = rule.form == Form::kSections ? rule.parts.size() : least;
    if (n < least || n > most)
      return corrupt("parts: expected " + std::to_string(least) + ", got " + std::to_string(n));
    rules.push_back(rule);
    return {};
  }

  std::unique_ptr<OwnedFamily> out_ = std::make_unique<OwnedFamily>();
};

// Families live as long as the process: configs and views keep pointers to them.
const Family* keep_forever(std::unique_ptr<OwnedFamily> family) {
  static std::deque<std::unique_ptr<OwnedFamily>> kept;
  return &kept.emplace_back(std::move(family))->family;
}

}  // namespace

Result<const Family*> parse_family(std::string_view text, std::string_view path) {
  const Json json = TRY(parse_json(text, path));
  auto family = FamilyReader().read(json);
  if (!family) return std::move(family).error().context(path);
  return keep_forever(*std::move(family));
}

Result<const Family*> load_family(const std::string& path) {
  static std::map<std::string, const Family*> loaded;
  if (const auto found = loaded.find(path); found != loaded.end()) return found->second;
  const Family* family = TRY(parse_family(TRY(read_whole_file(path, kMaxFamilyFile)), path));
  add_family(*family);
  loaded.emplace(path, family);
  return family;
}

}  // namespace reshard
