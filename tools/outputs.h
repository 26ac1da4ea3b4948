// What a command writes, and that it spares what the command reads (lib/base/output_guard.h).
#pragma once

#include <string>
#include <vector>

#include "formats/open.h"
#include "tools/command_line.h"

namespace reshard::tools {

// Returns the action, preceded by the check of every output that the line names against every input that it names, and
// against the config, tokenizer and manifest that may be read next to an input or above it.
Action sparing_inputs(const Action& action, const PathsOfLine& paths);

// The files that an open checkpoint consists of.
std::vector<std::string> files_of(const Catalog& catalog);

// Opens checkpoints as open_checkpoint() does and notes their files, which may be elsewhere than what the line names.
class NotedInputs {
 public:
  Opener opener();
  void add(const Catalog& catalog);
  // A usage error if writing this file, of a report, would change a noted one. Empty: no report.
  Status check(const std::string& output) const;

 private:
  std::vector<std::string> files_;
};

}  // namespace reshard::tools
