// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/finding.h"

#include <algorithm>
#include <map>
#include <set>

#include "lib/base/text.h"

namespace reshard {
namespace {

bool belongs_to(const Finding& finding, const CheckRun& check) {
  return finding.id.starts_with(check.id) &&
         (finding.id.size() == check.id.size() || finding.id[check.id.size()] == '-');
}

// Returns the finding at the root of a finding's chain of causes; itself if it has none.
std::size_t root_of(const std::vector<Finding>& findings, std::size_t i) {
  for (std::size_t steps = 0; steps < findings.size(); ++steps) {
    const std::vector<std::string>& causes = findings[i].causes;
    const auto cause = std::find_if(findings.begin(), findings.end(), [&](const Finding& f) {
      return &f != &findings[i] && std::find(causes.begin(), causes.end(), f.id) != causes.end();
    });
    if (cause == findings.end()) return i;
    i = cause - findings.begin();
  }
  return i;
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

const CheckRun* check_of(const Finding& finding, const std::vector<CheckRun>& checks) {
  const CheckRun* best = nullptr;
  for (const CheckRun& check : checks)
    if (belongs_to(finding, check) && (best == nullptr || check.id.size() > best->id.size())) best = &check;
  return best;
}

void fold_consequences(std::vector<Finding>& findings, std::vector<CheckRun>& checks) {
  std::map<std::size_t, std::vector<std::string>> folded;  // keyed by root
  std::map<const CheckRun*, std::string> emptied;          // the root cause of a check's findings
  std::set<const CheckRun*> kept;
  std::vector<Finding> out;
  std::vector<std::size_t> places(findings.size());
  for (std::size_t i = 0; i < findings.size(); ++i) {
    const std::size_t root = root_of(findings, i);
    const CheckRun* const check = check_of(findings[i], checks);
    places[i] = out.size();
    if (root == i) {
      kept.insert(check);
      out.push_back(findings[i]);
      continue;
    }
    folded[root].push_back(findings[i].id);
    emptied.emplace(check, findings[root].id);
  }
  for (const auto& [root, ids] : folded)
    out[places[root]].why.push_back("this explains " + count_of(std::ssize(ids), "other finding") + ": " +
                                    join(ids, ", "));
  for (CheckRun& check : checks)
    if (const auto root = emptied.find(&check); root != emptied.end() && !kept.contains(&check)) {
      check.looked_at = 0;
      check.skipped = "its findings are explained by " + root->second;
    }
  findings = std::move(out);
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

}  // namespace reshard
