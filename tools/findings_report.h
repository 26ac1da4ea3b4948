// SPDX-License-Identifier: Apache-2.0
// Prints the findings of an audit as text, JSON and JUnit XML, for verify and check.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/json.h"
#include "tools/command_line.h"

namespace reshard::tools {

// The result of an audit.
struct AuditReport {
  std::string title;              // "reshard check llama.json": the test suite's name
  std::vector<Finding> findings;  // shown errors first
  std::vector<CheckRun> checks;   // all requested checks, in the order they ran
  std::string looked_at;          // "723 tensors checked"
  std::string how;                // "headers only"; may be empty
  double seconds = 0;             // duration
};

// --json, --html, --junit, --fail-on
struct FindingsOptions {
  bool json = false;
  std::string html, junit;  // files to write; empty: none
  std::string fail_on = "warning";

  void add(CommandLine& line);
  Result<Severity> threshold() const;  // of `fail_on`
};

// Prints at most `shown` findings with their evidence, and the number of the others.
void print_findings(const AuditReport& report, std::size_t shown = 20);
// Prints the last line: "1 error, 0 warnings, 1 note   723 tensors checked in 12 ms, headers only".
void print_summary(const AuditReport& report);

// Sets "ok" (whether the exit code is 0), "findings", "checks" and "seconds" of an object; docs/cli.md describes them.
void add_findings(Json& object, const AuditReport& report, Severity threshold);

// Returns JUnit XML: a suite with a case for each check, and one for each finding without a check. A case fails if a
// finding reaches the threshold; lesser findings are its output.
std::string junit_text(const AuditReport& report, Severity threshold);

// Writes the --junit file if requested. Returns the exit code: 1 if a finding reaches the threshold.
Result<int> conclude(const AuditReport& report, const FindingsOptions& options);

}  // namespace reshard::tools
