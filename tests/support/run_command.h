// Runs a program the way a user would, and keeps what it said.
#pragma once

#include <string>
#include <vector>

namespace reshard {

struct CommandResult {
  int exit_code = -1;  // 128 + the signal's number when one ended it, as in a shell
  std::string out;     // standard output
  std::string err;     // standard error
  bool timed_out = false;
};

// argv[0] is the program's path. A program that runs longer than `seconds` is killed. `env` replaces or adds variables,
// "NAME=value".
CommandResult run_command(const std::vector<std::string>& argv, double seconds = 60,
                          const std::vector<std::string>& env = {});

// The same of the reshard that was built with the tests.
CommandResult reshard_cli(std::vector<std::string> args, const std::vector<std::string>& more = {});

}  // namespace reshard
