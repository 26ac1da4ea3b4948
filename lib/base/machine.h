// SPDX-License-Identifier: Apache-2.0
// The machine's name and its clock, as text.
#pragma once

#include <ctime>
#include <string>

namespace reshard {

// Returns the name of this machine, or "" if it has none.
std::string host_name();
// Returns a time in UTC, in a format of strftime() that gives fewer than 64 characters.
std::string utc_text(std::time_t seconds, const char* format);

}  // namespace reshard
