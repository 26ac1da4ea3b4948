// SPDX-License-Identifier: Apache-2.0
#include "lib/base/names.h"

#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "lib/base/text.h"

namespace reshard {
namespace {

// The part [begin, end) of a name that is a number.
struct Cut {
  std::size_t begin = 0, end = 0;
  Index number = 0;
};

std::optional<Cut> cut_at(std::string_view name, std::size_t component) {
  Cut cut;
  for (std::size_t k = 0; k < component; ++k) {
    const std::size_t dot = name.find('.', cut.begin);
    if (dot == std::string_view::npos) return std::nullopt;
    cut.begin = dot + 1;
  }
  cut.end = std::min(name.find('.', cut.begin), name.size());
  const auto number = as_number(name.substr(cut.begin, cut.end - cut.begin));
  if (!number) return std::nullopt;
  cut.number = *number;
  return cut;
}

// Folds names that differ only in the given component.
std::vector<FoldedName> fold_component(const std::vector<FoldedName>& names, std::size_t component) {
  struct Kind {
    std::vector<Index> numbers;
    std::size_t first = 0;  // index of the folded name
  };
  // Keyed by the name without the number, and the number's position.
  std::unordered_map<std::string, Kind> kinds;
  std::vector<std::optional<Cut>> cuts;
  std::vector<Kind*> kind_of;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i].text;
    cuts.push_back(cut_at(name, component));
    kind_of.push_back(nullptr);
    if (!cuts.back()) continue;
    std::string key = std::to_string(cuts.back()->begin) + ":" + name;
    key.erase(key.size() - name.size() + cuts.back()->begin, cuts.back()->end - cuts.back()->begin);
    const auto [it, is_new] = kinds.try_emplace(std::move(key));
    if (is_new) it->second.first = i;
    it->second.numbers.push_back(cuts.back()->number);
    kind_of.back() = &it->second;
  }
  std::vector<FoldedName> out;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (kind_of[i] && kind_of[i]->first != i) continue;
    out.push_back(names[i]);
    if (!kind_of[i]) continue;
    std::vector<Index>& numbers = kind_of[i]->numbers;
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    if (numbers.size() == 1) continue;
    out.back().text.replace(cuts[i]->begin, cuts[i]->end - cuts[i]->begin, "{" + join(runs_of(numbers), ",") + "}");
  }
  return out;
}

}  // namespace

std::optional<Index> as_number(std::string_view text) {
  constexpr std::size_t kMaxDigits = 18;
  if (text.empty() || text.size() > kMaxDigits || (text[0] == '0' && text.size() > 1)) return std::nullopt;
  if (text.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
  Index n = 0;
  std::from_chars(text.data(), text.data() + text.size(), n);
  return n;
}

std::vector<std::string> runs_of(const std::vector<Index>& ascending, std::string_view to) {
  std::vector<std::string> runs;
  for (std::size_t i = 0, j = 0; i < ascending.size(); i = ++j) {
    while (j + 1 < ascending.size() && ascending[j + 1] == ascending[j] + 1) ++j;
    runs.push_back(std::to_string(ascending[i]));
    if (j > i) runs.back().append(to).append(std::to_string(ascending[j]));
  }
  return runs;
}

std::vector<FoldedName> fold(const std::vector<std::string>& names) {
  std::vector<FoldedName> list;
  for (std::size_t i = 0; i < names.size(); ++i) list.push_back({names[i], i});
  // From right to left: a folded number contains dots, which must not shift components still to be folded.
  constexpr std::size_t kDeepest = 10;
  for (std::size_t component = kDeepest; component-- > 0;) list = fold_component(list, component);
  return list;
}

std::vector<std::string> fold_names(const std::vector<std::string>& names) {
  std::vector<std::string> out;
  for (FoldedName& name : fold(names)) out.push_back(std::move(name.text));
  return out;
}

std::string some_of(const std::vector<std::string>& texts, std::size_t shown) {
  if (texts.size() <= shown) return join(texts, ", ");
  const auto begin = texts.begin(), end = begin + shown;
  return join({begin, end}, ", ") + " and " + with_commas(texts.size() - shown) + " more";
}

std::string some_quoted(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const std::string& name : names) quoted.push_back("'" + printable(name) + "'");
  return some_of(quoted);
}

std::string names_text(const std::vector<std::string>& names, std::string_view noun) {
  return count_of(std::ssize(names), noun) + ": " + some_quoted(names);
}

namespace {

// Shortens long sets: "blocks.{0,5,10,...,495}.k".
std::string with_short_sets(std::string_view text) {
  constexpr std::size_t kMany = 8, kFirst = 3;
  std::string out;
  for (std::size_t open; (open = text.find('{')) != std::string_view::npos;) {
    const std::size_t close = text.find('}', open);
    if (close == std::string_view::npos) break;
    std::vector<std::string> ranges = split(text.substr(open + 1, close - open - 1), ',');
    if (ranges.size() > kMany) {
      const std::string last = ranges.back();
      ranges.resize(kFirst);
      ranges.insert(ranges.end(), {"...", last});
    }
    out += std::string(text.substr(0, open)) + "{" + join(ranges, ",") + "}";
    text.remove_prefix(close + 1);
  }
  return out + std::string(text);
}

}  // namespace

std::string folded(const std::vector<std::string>& names, std::size_t shown) {
  std::vector<std::string> list = fold_names(names);
  for (std::string& name : list) name = printable(with_short_sets(name));
  return some_of(list, shown);
}

}  // namespace reshard
