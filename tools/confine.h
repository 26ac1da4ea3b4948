// SPDX-License-Identifier: Apache-2.0
// Confines a command to the paths of its command line (lib/base/sandbox.h).
#pragma once

#include "tools/command_line.h"

namespace reshard::tools {

// Lets this process read only the paths on its command line and their neighbours and parents, and write only where its
// outputs are. Fails with an I/O error if too few files may be open to say which these are.
Status confine_to(const ParsedLine& line);

}  // namespace reshard::tools
