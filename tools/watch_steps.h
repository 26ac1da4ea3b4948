// SPDX-License-Identifier: Apache-2.0
// The checkpoints of a run that `reshard watch` converts, and which of them the run itself names.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard::tools {

// A checkpoint of the run.
struct RunStep {
  std::string source;
  std::string name;   // of its output: the source's path below the run, with '-' for '/', without a file's extension
  Index number = -1;  // the step in its name (step_in_name); -1: there is none
};

// Returns the steps of a run in the order of their numbers, complete or not, whose numbers are multiples of `every`.
// Fails if two of them have the same name.
Result<std::vector<RunStep>> steps_of_run(const std::string& run, Index every);

// Returns the sources of the steps that the run names in a file (latest_checkpointed_iteration.txt, latest) or by a
// link. A trainer resumes from them. It writes the file after the step, so that it may still name an older one.
Result<std::set<std::string>> steps_named_by_run(const std::vector<RunStep>& complete);

// Returns the lines of a text that are not empty, without the spaces around them.
std::set<std::string> lines_of(const std::string& text);

// Returns whether a line is a step's number, its name or the path of its source or its output (empty: it has none).
bool line_means(const std::string& line, const RunStep& step, const std::string& output);

// Returns a path without slashes at its end; a URL as it is.
std::string without_slashes(std::string path);

// Returns the name that a path gets for its removal, and under which what replaces it is made.
std::string removed_name(const std::string& path);
// Returns whether a file's name is one that removed_name() gave.
bool is_removed_name(std::string_view name);

}  // namespace reshard::tools
