// SPDX-License-Identifier: Apache-2.0
// Keeps the outputs of a command from changing its inputs (lib/base/output_guard.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "formats/open.h"
#include "tools/command_line.h"

namespace reshard::tools {

// Returns an action that first checks every output on the command line against every input, and against the config,
// tokenizer and manifest that may be read next to an input or above it. It also checks that each report can be written
// and replaces nothing but a report of its kind. An error about a path that does not exist names a near one;
// directories are listed now, before the process is confined.
Action checking_paths(const Action& action, const PathsOfLine& paths);

// Fails if a report of `kind` cannot be written to `path`, or would replace a file that is neither empty nor of that
// kind. Follows links. Pipes and devices may be written to.
Status check_report(const std::string& path, const ReportKind& kind);
// Writes a report (replace_file), with the same limits on what it replaces.
Status replace_report(const std::string& path, const ReportKind& kind, std::string_view text);

// Fails with a usage error for a URL outside a bucket, which cannot be written to.
Status check_is_bucket(const std::string& url);

// Adds --state, and checks it: the directory of the journal of an output in a bucket. Empty: not given.
void add_state(CommandLine& line, std::string& state);
Status check_state(const std::string& state, const std::string& destination);

// Returns the files of an open checkpoint.
std::vector<std::string> files_of(const Catalog& catalog);

// What a command read, for its report.
struct InputFacts {
  std::string path;
  Index files = 0, bytes = 0;
  Index newest_ns = 0;  // when the newest of its files was last changed, since 1970; 0: unknown
};
// Looks up the files of an open checkpoint, or a single file.
InputFacts facts_of(const std::string& path, const Catalog& catalog);
InputFacts facts_of_file(const std::string& path);

// Opens checkpoints and remembers their files, which may be elsewhere than the paths on the command line.
class NotedInputs {
 public:
  Opener opener();
  void add(const std::string& path, const Catalog& catalog);
  // Fails with a usage error if writing the report `output` would change a remembered file. Empty: no report.
  Status check(const std::string& output) const;
  // Returns the facts of each path that was opened, once.
  std::vector<InputFacts> facts() const;

 private:
  struct Noted {
    std::string path;
    std::vector<std::string> files;
  };
  std::vector<Noted> noted_;
};

}  // namespace reshard::tools
