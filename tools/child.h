// SPDX-License-Identifier: Apache-2.0
// Runs another program.
#pragma once

#include <string>
#include <vector>

#include "lib/base/result.h"

namespace reshard::tools {

enum class OnInterrupt { kWait, kEndChild };

// Runs a program, which PATH finds, and waits for its end. `words` are its name and its arguments. `variables`,
// "NAME=VALUE", are added to the environment. `on_interrupt`: what to do if this process is interrupted meanwhile.
// Returns the exit code, or 128 plus the number of the signal that ended it. Fails if it cannot be started.
Result<int> run_child(std::vector<std::string> words, OnInterrupt on_interrupt,
                      std::vector<std::string> variables = {});

}  // namespace reshard::tools
