// SPDX-License-Identifier: Apache-2.0
// The part of a report that is plain HTML: it is read without scripts, and printed.
#pragma once

#include <string>
#include <string_view>

#include "lib/base/json.h"

namespace reshard::tools {

// The result of a command in one line.
struct Verdict {
  enum class Kind { kGood, kBad, kNeutral } kind = Kind::kNeutral;
  std::string text;  // "Failed: 2 errors, 0 warnings, 1 note"
};

// Both take the --json of a command ("verify"); page_json() and plan_page_json() for inspect and plan.
Verdict verdict_of(std::string_view command, const Json& data);
// Returns the sections, with one empty element for the drawings of the script (id="maps"). Sections that the script
// shows in another way have the class "plain".
std::string report_sections(std::string_view command, const Json& data);

}  // namespace reshard::tools
