// SPDX-License-Identifier: Apache-2.0
// What -h and --help print.
#pragma once

#include <string>
#include <vector>

#include "tools/command_line.h"

namespace reshard::tools {

// Returns the help of one of `commands` (describe()), as wide as the screen. `name`: empty for the program itself.
// `is_whole`: everything (--help); otherwise a summary with the common options that fits on one screen (-h).
std::string help_text(const Program& program, const std::vector<CommandText>& commands, const std::string& name,
                      bool is_whole);

// "--to FORMAT": the names of an option and its value.
std::string option_usage(const OptionText& option);
// The description of an option with the values that it accepts, unless each of these has an explanation of its own.
std::string option_description(const OptionText& option);
// "reshard convert [OPTIONS] --to FORMAT SRC DST"
std::string usage_text(const CommandText& command);

void add_help(CommandLine& line);

}  // namespace reshard::tools
