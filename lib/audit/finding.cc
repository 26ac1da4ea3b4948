#include "lib/audit/finding.h"

#include <algorithm>

namespace reshard {
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

}  // namespace reshard
