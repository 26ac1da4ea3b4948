#include "lib/audit/finding.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>

#include "lib/base/text.h"

namespace reshard {
namespace {

// A name with one of its numeric components taken out: "layers.", ".wq.weight" and 12.
struct Cut {
  std::string head, tail;
  Index number = 0;
};

std::optional<Cut> cut_at(std::string_view name, std::size_t component) {
  std::size_t begin = 0;
  for (std::size_t k = 0; k < component; ++k) {
    const std::size_t dot = name.find('.', begin);
    if (dot == std::string_view::npos) return std::nullopt;
    begin = dot + 1;
  }
  const std::size_t end = std::min(name.find('.', begin), name.size());
  Cut cut;
  const auto parsed = std::from_chars(name.data() + begin, name.data() + end, cut.number);
  if (begin == end || parsed.ec != std::errc() || parsed.ptr != name.data() + end || cut.number < 0)
    return std::nullopt;
  if (name[begin] == '0' && end - begin > 1) return std::nullopt;  // "007" would come back as "7"
  cut.head = name.substr(0, begin);
  cut.tail = name.substr(end);
  return cut;
}

std::string range_text(const std::vector<Index>& sorted) {
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < sorted.size();) {
    std::size_t j = i;
    while (j + 1 < sorted.size() && sorted[j + 1] == sorted[j] + 1) ++j;
    runs.push_back(i == j ? std::to_string(sorted[i]) : std::to_string(sorted[i]) + ".." + std::to_string(sorted[j]));
    i = j + 1;
  }
  return "{" + join(runs, ",") + "}";
}

// Folds the names that differ in the given component only.
std::vector<std::string> fold_component(const std::vector<std::string>& names, std::size_t component) {
  std::map<std::pair<std::string, std::string>, std::vector<Index>> numbers;
  for (const std::string& name : names)
    if (auto cut = cut_at(name, component)) numbers[{cut->head, cut->tail}].push_back(cut->number);
  for (auto& [around, list] : numbers) std::sort(list.begin(), list.end());
  std::vector<std::string> out;
  for (const std::string& name : names) {
    const auto cut = cut_at(name, component);
    if (!cut) {
      out.push_back(name);
      continue;
    }
    const std::vector<Index>& list = numbers[{cut->head, cut->tail}];
    if (list.front() != cut->number) continue;  // said with the first of them
    out.push_back(list.size() == 1 ? name : cut->head + range_text(list) + cut->tail);
  }
  return out;
}

}  // namespace

std::string_view severity_name(Severity severity) {
  switch (severity) {
    case Severity::kError:
      return "error";
    case Severity::kWarning:
      return "warning";
    case Severity::kNote:
      break;
  }
  return "note";
}

void sort_by_severity(std::vector<Finding>& findings) {
  std::stable_sort(findings.begin(), findings.end(),
                   [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
}

bool FindingList::has_errors() const {
  return std::any_of(list_.begin(), list_.end(), [](const Finding& f) { return f.severity == Severity::kError; });
}

std::vector<Finding> FindingList::take() {
  std::vector<Finding> out(std::move_iterator(list_.begin()), std::move_iterator(list_.end()));
  list_.clear();
  sort_by_severity(out);
  return out;
}

std::vector<std::string> fold_names(const std::vector<std::string>& names) {
  std::vector<std::string> list = names;
  // From the right: a folded number has dots of its own, which must not count for those still to be folded.
  constexpr std::size_t kDeepest = 10;
  for (std::size_t component = kDeepest; component-- > 0;) list = fold_component(list, component);
  return list;
}

std::string folded(const std::vector<std::string>& names, std::size_t shown) {
  std::vector<std::string> list = fold_names(names);
  for (std::string& name : list) name = printable(name);
  if (list.size() <= shown) return join(list, ", ");
  const std::size_t left = list.size() - shown;
  list.resize(shown);
  return join(list, ", ") + " and " + with_commas(static_cast<Index>(left)) + " more";
}

}  // namespace reshard
