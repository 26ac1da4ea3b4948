// SPDX-License-Identifier: Apache-2.0
// The result of an audit: one finding for each problem, with the evidence and advice.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

enum class Severity { kNote, kWarning, kError };
std::string_view severity_name(Severity severity);  // "error"

// The number of cases that a finding shows if there are more.
inline constexpr std::size_t kShown = 4;

// A range of a vocabulary's rows, in order: "stored", "lost", "padding".
struct RowsPart {
  std::string_view what;  // a literal
  Index rows = 0;
};

struct Finding {
  Severity severity = Severity::kError;
  std::string id;                        // stable, for programs: "vocabulary-shard"; docs/audit.md lists all
  std::vector<std::string> tensors;      // all tensors concerned, in natural order; empty: the whole checkpoint
  std::string what;                      // one sentence without a full stop, not beginning with the tensor's name
  std::vector<std::string> why;          // the evidence, one clause or sentence each
  std::string lost;                      // which data is lost, a sentence; empty: none, or unknown
  std::string advice;                    // what to do, sentences
  std::vector<RowsPart> rows = {};       // if it is about a vocabulary
  std::vector<std::string> causes = {};  // ids: if one of them was found, this is its consequence
};

// Something that an audit checked. Its findings have its id, or one that begins with it: "vocabulary-shard" belongs to
// "vocabulary" unless there is a check "vocabulary-shard".
struct CheckRun {
  std::string id;
  std::string title;    // what holds if nothing was found: "every rank holds whole attention heads"
  Index looked_at = 0;  // number of tensors, degrees, ... that were checked
  std::string skipped;  // why it was skipped, a clause; empty if it ran
};

// Returns the check that a finding belongs to, the one with the longest id, or null if there is none.
const CheckRun* check_of(const Finding& finding, const std::vector<CheckRun>& checks);

// Removes findings whose cause was found too, and mentions them in that finding. A check that loses all its findings is
// marked as skipped, because its result is unknown until the cause is fixed.
void fold_consequences(std::vector<Finding>& findings, std::vector<CheckRun>& checks);

// Sorts by severity, errors first; findings of equal severity keep their order.
void sort_by_severity(std::vector<Finding>& findings);

// Collects findings during an audit. A reference returned by add() stays valid when others are added.
class FindingList {
 public:
  Finding& add(Severity severity, std::string id) { return add(Finding{severity, std::move(id), {}, "", {}, "", ""}); }
  Finding& add(Finding finding) { return list_.emplace_back(std::move(finding)); }
  bool has_errors() const;
  std::vector<Finding> take();  // by severity

 private:
  std::deque<Finding> list_;
};

}  // namespace reshard
