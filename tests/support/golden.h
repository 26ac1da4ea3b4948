// Golden files: exact expected outputs in tests/cli/golden/*. RESHARD_UPDATE_GOLDEN=1 rewrites them.
#pragma once

#include <string>

namespace reshard {

// Returns `text` with durations replaced, which differ between runs.
std::string without_times(std::string text);
// Returns `text` with every occurrence of `part` removed.
std::string without(std::string text, const std::string& part);

// Returns the content of tests/cli/golden/`name`.
std::string read_golden(const std::string& name);
// Expects `got` to equal tests/cli/golden/`name`, or rewrites that file.
void expect_golden(const std::string& name, const std::string& got);

}  // namespace reshard
