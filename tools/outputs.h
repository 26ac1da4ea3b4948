// SPDX-License-Identifier: Apache-2.0
// Keeps the outputs of a command from changing its inputs (lib/base/output_guard.h).
#pragma once

#include <string>
#include <vector>

#include "formats/open.h"
#include "tools/command_line.h"

namespace reshard::tools {

// Returns an action that first checks every output on the command line against every input, and against the config,
// tokenizer and manifest that may be read next to an input or above it.
Action sparing_inputs(const Action& action, const PathsOfLine& paths);

// Fails with a usage error if a URL is not a bucket's, the only ones that are written to.
Status check_is_bucket(const std::string& url);

// Returns the files of an open checkpoint.
std::vector<std::string> files_of(const Catalog& catalog);

// Opens checkpoints and remembers their files, which may be elsewhere than the paths on the command line.
class NotedInputs {
 public:
  Opener opener();
  void add(const Catalog& catalog);
  // Fails with a usage error if writing the report `output` would change a remembered file. Empty: no report.
  Status check(const std::string& output) const;

 private:
  std::vector<std::string> files_;
};

}  // namespace reshard::tools
