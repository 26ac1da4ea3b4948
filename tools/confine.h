// What a command may still do once its command line is read (lib/base/sandbox.h).
#pragma once

#include "tools/command_line.h"

namespace reshard::tools {

// Leaves this process what the paths of its command line need: those it names and what lies beside and above them, for
// reading; where its outputs are to be, for writing. An I/O error where the system does not let it say which these are.
Status confine_to(const ParsedLine& line);

}  // namespace reshard::tools
