// SPDX-License-Identifier: Apache-2.0
#include "lib/model/architecture.h"

#include <zstd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <unordered_set>
#include <utility>

#include "lib/base/text.h"
#include "lib/model/config_members.h"

namespace reshard {
namespace {

constexpr Index kMaxListed = 500'000;
constexpr std::size_t kMaxText = 1000;  // bytes of a formula or a condition

// Returns the line of a model_type in a table; empty if there is none.
std::string_view line_of(std::string_view table, std::string_view model_type) {
  const std::string start = "{\"type\":\"" + std::string(model_type) + "\"";
  for (std::size_t at = table.find(start); at != std::string_view::npos; at = table.find(start, at + 1))
    if (at == 0 || table[at - 1] == '\n') return table.substr(at, table.find('\n', at) - at);
  return {};
}

using Texts = std::vector<std::string_view>;

// Returns the text that a column refers to; empty for an empty column.
Result<std::string> text_of(const std::string& column, const Texts& texts) {
  if (column.empty()) return std::string();
  const auto number = parse_number(column);
  if (!number || *number >= std::ssize(texts))
    return corrupt("'" + printable(column) + "' is not the number of a text");
  return std::string(texts[*number]);
}

std::vector<std::string> list_of(const std::string& text) {
  return text.empty() ? std::vector<std::string>() : split(text, ',');
}

// Replaces the digit at the beginning of a name by that many components of the previous name.
Result<std::string> whole_name(std::string_view text, std::string_view before) {
  std::size_t end = 0;
  for (Index shared = parse_number(text.substr(0, 1)).value_or(-1); shared != 0; --shared) {
    end = before.find('.', end) + 1;
    if (shared < 0 || end == 0) return corrupt("'" + printable(text) + "' shares no components with the name before");
  }
  return std::string(before.substr(0, end)).append(text.substr(1));
}

Index places_in(std::string_view name) {
  Index out = 0;
  for (std::size_t at = 0; (at = name.find("{}", at)) != std::string_view::npos; at += 2) ++out;
  return out;
}

NameScope take_mark(std::string& name) {
  static constexpr std::pair<char, NameScope> kMarks[] = {
      {'<', NameScope::kFiles}, {'>', NameScope::kMemory}, {'~', NameScope::kMemoryTied}};
  for (const auto& [mark, stands_in] : kMarks) {
    if (!name.starts_with(mark)) continue;
    name.erase(0, 1);
    return stands_in;
  }
  return NameScope::kEverywhere;
}

Status read_rows(std::string_view text, const Texts& texts, bool is_base, std::vector<ArchitectureRow>& out) {
  std::string before;
  for (const std::string& line : split(text, ' ')) {
    std::vector<std::string> parts = split(line, '|');
    if (parts.size() > 4 || parts[0].empty()) return corrupt("'" + printable(line) + "' is not a row");
    parts.resize(4);
    before = TRY(whole_name(parts[0], before));
    const std::string dims = TRY(text_of(parts[1], texts)), counts = TRY(text_of(parts[2], texts));
    std::string condition = TRY(text_of(parts[3], texts));
    ArchitectureRow row{before, list_of(dims), list_of(counts), std::move(condition), is_base, NameScope::kEverywhere};
    row.stands_in = take_mark(row.name);
    if (std::ssize(row.counts) != places_in(row.name)) return corrupt("'" + printable(line) + "' has other counts");
    out.push_back(std::move(row));
  }
  return {};
}

// Reads the rows of the groups that contain this class or, for an unknown class, the type's first class.
Status read_groups(const Json& groups, Index of_class, const Texts& texts, bool is_base,
                   std::vector<ArchitectureRow>& out) {
  for (const Json& group : TRY(groups.as_array())) {
    bool is_in = false;
    for (const Json& number : TRY(group.get_array("in"))) is_in = is_in || TRY(number.as_index()) == of_class;
    if (is_in) TRY(read_rows(TRY(group.get_string("rows")), texts, is_base, out));
  }
  return {};
}

// Returns a list of texts, none of them longer than a formula can be.
Result<Texts> texts_of(const Json& json, std::string_view member) {
  Texts out;
  for (const Json& text : TRY(json.get_array(member))) {
    out.push_back(TRY(text.as_string()));
    if (out.back().size() > kMaxText) return corrupt("a text of '" + std::string(member) + "' is too long");
  }
  return out;
}

Status check_formulas(const Json& computed) {
  for (const Json::Member& member : TRY(computed.as_object()))
    if (TRY(member.value.as_string()).size() > kMaxText) return corrupt("'" + printable(member.key) + "' is too long");
  return {};
}

Result<Architecture> parse_line(const Json& json, std::string_view name) {
  const Texts classes = TRY(texts_of(json, "classes"));
  if (classes.empty()) return corrupt("'classes' is empty");
  const auto found = std::find(classes.begin(), classes.end(), name);
  const Index of_class = found == classes.end() ? 0 : found - classes.begin();
  Architecture out;
  out.is_other_class = found == classes.end();
  out.name = std::string(classes[of_class]);
  out.transformers = std::string(TRY(json.get_string("transformers")));
  out.prefix = std::string(TRY(json.get_string("prefix")));
  out.has_prefix = !out.prefix.empty();
  for (const Json& bare : TRY(json.get_array("bare"))) out.has_prefix &= TRY(bare.as_index()) != of_class;
  for (const auto& [word, member] :
       {std::pair{"defaults", &out.defaults}, std::pair{"computed", &out.computed}, std::pair{"fixed", &out.fixed}}) {
    TRY(json.get_object(word));
    *member = *json.find(word);
  }
  TRY(check_formulas(out.computed));
  const Texts texts = TRY(texts_of(json, "texts"));
  TRY(json.get_array("base"));
  TRY(json.get_array("own"));
  TRY(read_groups(*json.find("base"), of_class, texts, true, out.rows));
  if (!out.is_other_class) TRY(read_groups(*json.find("own"), of_class, texts, false, out.rows));
  return out;
}

Result<std::optional<Architecture>> parse_line(std::string_view line, std::string_view name) {
  Architecture out = TRY(parse_line(TRY(parse_json(line, "table of classes")), name));
  return out.rows.empty() ? std::nullopt : std::optional(std::move(out));
}

// Expands rows into parameters.
class Expansion {
 public:
  Expansion(const Architecture& architecture, const Json& config)
      : architecture_(architecture), members_(config, architecture.defaults, architecture.computed) {}

  Status add(const ArchitectureRow& row) {
    const auto counts = values_of(row.counts, {});
    if (!counts) {
      ++out_.not_derived;
      return {};
    }
    std::optional<Index> tensors = 1;
    for (const Index count : *counts)
      if (tensors) tensors = checked_mul(*tensors, count);
    if (!tensors || *tensors > kMaxListed) return too_many();
    std::vector<Index> numbers(counts->size(), 0);
    if (std::find(counts->begin(), counts->end(), 0) != counts->end()) return {};
    std::optional<Index> last;
    Entry entry;
    do {
      const std::optional<Index> first = numbers.empty() ? std::nullopt : std::optional(numbers[0]);
      if (first != last || !entry.is_read) entry = read(row, first);
      last = first;
      if (entry.is_derived) TRY(add(row, numbers, entry));
    } while (advance(numbers, *counts));
    return {};
  }

  // Returns the parameters. A row whose condition does not hold gives optional ones, except where another row gives a
  // parameter of the same name.
  ArchitectureModel take() {
    std::unordered_set<std::string_view> names;
    for (const ArchitectureParameter& p : out_.parameters) names.insert(p.name);
    std::erase_if(excluded_, [&](const ArchitectureParameter& p) { return names.contains(p.name); });
    std::move(excluded_.begin(), excluded_.end(), std::back_inserter(out_.parameters));
    return std::move(out_);
  }

 private:
  // The result of a row for one number in its first {}.
  struct Entry {
    bool is_read = false, is_derived = false, is_required = false, is_excluded = false;
    Dims shape;
  };

  Entry read(const ArchitectureRow& row, std::optional<Index> number) {
    Entry out{true, false, false, false, {}};
    const auto dims = values_of(row.dims, number);
    out.is_derived = dims.has_value();
    if (!dims) ++out_.not_derived;
    for (const Index dim : dims.value_or(std::vector<Index>())) out.shape.push_back(dim);
    if (row.condition == "?") return out;
    const std::optional<bool> holds = members_.holds(row.condition, number);
    out.is_required = holds.value_or(false) && !architecture_.is_other_class;
    out.is_excluded = holds && !*holds;
    return out;
  }

  Status add(const ArchitectureRow& row, const std::vector<Index>& numbers, const Entry& entry) {
    if (std::ssize(out_.parameters) + std::ssize(excluded_) == kMaxListed) return too_many();
    auto& list = entry.is_excluded ? excluded_ : out_.parameters;
    list.push_back({named(row.name, numbers), entry.shape, &row, entry.is_required});
    return {};
  }

  static Error too_many() { return corrupt("the config describes more than " + with_commas(kMaxListed) + " tensors"); }

  // Returns the values of formulas; nothing if one cannot be computed or is not a valid size.
  std::optional<std::vector<Index>> values_of(const std::vector<std::string>& formulas,
                                              std::optional<Index> number) const {
    std::vector<Index> out;
    for (const std::string& formula : formulas) {
      if (formula == "?") {
        out.push_back(kAnySize);
        continue;
      }
      const auto n = members_.evaluate(formula, number);
      if (!n || *n < 0) return {};
      out.push_back(*n);
    }
    return out;
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
  ConfigMembers members_;
  ArchitectureModel out_;
  std::vector<ArchitectureParameter> excluded_;
};

// Returns whether two values are equal; 4 and 4.0 are.
bool is_same_value(const Json& a, const Json& b) {
  const auto x = a.as_double(), y = b.as_double();
  return a.is_number() && b.is_number() ? x && y && *x == *y : to_text(a) == to_text(b);
}

// Fails if a member of the config has a value that was not tried. `fixed` gives one value for "norm", several for the
// entries of "layer_types[]", and a length for "depths.#".
Status check_fixed(const Json& config, const Json::Member& fixed) {
  std::string_view path = fixed.key;
  const bool is_length = path.ends_with(".#"), is_entries = path.ends_with("[]");
  if (is_length || is_entries) path.remove_suffix(2);
  const Json* const said = member_at(config, path);
  if (!said) return {};
  const std::string tried = to_text(fixed.value);
  if (is_entries) {
    const auto entries = said->as_array();
    const auto known = fixed.value.as_array();
    if (!entries || !known) return unsupported(std::string(path) + " is no list");
    for (const Json& entry : *entries)
      if (std::none_of(known->begin(), known->end(), [&](const Json& k) { return to_text(k) == to_text(entry); }))
        return unsupported(std::string(path) + " has " + printable(to_text(entry)));
    return {};
  }
  const bool is_tried = is_length ? std::to_string(said->size()) == tried : is_same_value(*said, fixed.value);
  return is_tried ? Status()
                  : unsupported(std::string(path) + (is_length ? " has not " : " is not ") + tried +
                                (is_length ? " entries" : ""));
}

}  // namespace

bool ArchitectureParameter::fits(const Dims& stored) const {
  if (stored.rank() != shape.rank()) return false;
  for (int d = 0; d < stored.rank(); ++d)
    if (shape[d] != kAnySize && shape[d] != stored[d]) return false;
  return true;
}

std::optional<Architecture> find_architecture(std::string_view model_type, std::string_view name, Families families) {
  std::string_view line = line_of(families.class_table(), model_type);
  if (line.empty()) line = line_of(builtin_architectures(), model_type);
  if (line.empty()) return {};
  auto parsed = parse_line(line, name);
  if (parsed) return *std::move(parsed);
  std::fprintf(stderr, "%s\n", parsed.error().message().c_str());  // the built-in table is tested, the user's checked
  std::abort();
}

Result<std::string> type_of_class_table(std::string_view text, std::string_view path) {
  const Json json = TRY(parse_json(text, path));
  const std::string type(TRY(json.get_string("type").context(path)));
  if (line_of(text, type).empty())
    return corrupt(std::string(path) + ": a table of classes is one line, and begins with {\"type\":\"...\"");
  const Texts classes = TRY(texts_of(json, "classes").context(path));
  for (const std::string_view name : classes) TRY(parse_line(json, name).context(path));
  TRY(parse_line(json, "").context(path));
  return type;
}

std::string_view builtin_architectures() {
  static const auto* const text = [] {
    const CompressedText compressed = compressed_architectures();
    auto* const out = new std::string(compressed.size, '\0');
    const std::size_t size =
        ZSTD_decompress(out->data(), out->size(), compressed.frame.data(), compressed.frame.size());
    if (size != out->size()) std::abort();  // not what CMake compiled in
    return out;
  }();
  return *text;
}

Result<ArchitectureModel> parameters_of(const Architecture& architecture, const Json& config) {
  for (const Json::Member& fixed : TRY(architecture.fixed.as_object())) TRY(check_fixed(config, fixed));
  Expansion expansion(architecture, config);
  for (const ArchitectureRow& row : architecture.rows) TRY(expansion.add(row));
  return expansion.take();
}

}  // namespace reshard
