// What an audit has to say: one finding for each thing that is wrong, with the evidence and what to do about it.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

enum class Severity { kNote, kWarning, kError };
std::string_view severity_name(Severity severity);  // "error"

// Cases that a finding shows where there are more.
inline constexpr std::size_t kShown = 4;

// Rows of a vocabulary, in their order: "stored", "lost", "padding".
struct RowsPart {
  std::string_view what;  // a literal
  Index rows = 0;
};

struct Finding {
  Severity severity = Severity::kError;
  std::string id;                        // stable, for programs: "vocabulary-shard"; docs/audit.md lists them all
  std::vector<std::string> tensors;      // all that it is about, in natural order; empty: the checkpoint as a whole
  std::string what;                      // one sentence without a full stop; does not begin with the tensor's name
  std::vector<std::string> why;          // the arithmetic that shows it, a clause or sentence each
  std::string lost;                      // what data are lost, a sentence; empty: none, or it cannot be told
  std::string advice;                    // what to do, sentences
  std::vector<RowsPart> rows = {};       // of the vocabulary, where it is about them
  std::vector<std::string> causes = {};  // ids: where a finding has one of them, this is a consequence of it
};

// One thing that an audit looked for. The findings that belong to it have its id, or that and more: "vocabulary-shard"
// belongs to "vocabulary" unless there is a check "vocabulary-shard".
struct CheckRun {
  std::string id;
  std::string title;    // what holds where it found nothing: "every rank holds whole attention heads"
  Index looked_at = 0;  // tensors, degrees, ...: whatever it is about
  std::string skipped;  // why it was not made, a clause; empty where it was
};

// The check that a finding belongs to, the one with the longest id; null if there is none.
const CheckRun* check_of(const Finding& finding, const std::vector<CheckRun>& checks);

// Removes the findings whose cause is reported too, and names them in it. A check that is left without findings of its
// own says that it was not made: what it looked for cannot be told before the cause is mended.
void fold_consequences(std::vector<Finding>& findings, std::vector<CheckRun>& checks);

// "errors first", then in the order they were found.
void sort_by_severity(std::vector<Finding>& findings);

// The findings of an audit while it is made. A reference that add() gives stays good while others are added.
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
