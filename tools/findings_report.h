// The findings of an audit as people, programs and build servers read them. verify and check share it.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/json.h"
#include "tools/command_line.h"

namespace reshard::tools {

// What an audit has to say, and how it came to it.
struct AuditReport {
  std::string title;              // "reshard check llama.json": the test suite's name
  std::vector<Finding> findings;  // shown errors first
  std::vector<CheckRun> checks;   // all that were asked for, in the order of their making
  std::string looked_at;          // "723 tensors looked at"
  std::string how;                // "headers only"; may be empty
  double seconds = 0;             // it took
};

// --json, --html, --junit, --fail-on
struct FindingsOptions {
  bool json = false;
  std::string html, junit;  // files to write; empty: none
  std::string fail_on = "note";

  void add(CommandLine& line);
  Result<Severity> threshold() const;  // of `fail_on`
};

// Each finding with its evidence, to standard output; no more than `shown`, and how many are left.
void print_findings(const AuditReport& report, std::size_t shown = 20);
// The last line: "1 error, 0 warnings, 1 note   723 tensors looked at in 12 ms, headers only".
void print_summary(const AuditReport& report);

// Sets "ok" (whether the exit code is 0), "findings", "checks" and "seconds" of an object; docs/cli.md describes them.
void add_findings(Json& object, const AuditReport& report, Severity threshold);

// JUnit's XML: a suite with a case for each check, and one for each finding that belongs to none. A case with findings
// of the threshold or above has failed; lesser ones are its output.
std::string junit_text(const AuditReport& report, Severity threshold);

// What is left to do once the findings are on the screen: writes the --junit file, if one was asked for. The value is
// the exit code: 1 where there are findings of the threshold or above.
Result<int> conclude(const AuditReport& report, const FindingsOptions& options);

}  // namespace reshard::tools
