// Output that is expected to the letter, kept in tests/cli/golden/*. RESHARD_UPDATE_GOLDEN=1 rewrites the files.
#pragma once

#include <string>

namespace reshard {

// `text` without what differs from run to run: durations.
std::string without_times(std::string text);
// `text` without every occurrence of `part`.
std::string without(std::string text, const std::string& part);

// Expects that `got` is what tests/cli/golden/`name` holds, or makes it so.
void expect_golden(const std::string& name, const std::string& got);

}  // namespace reshard
