// Runs a program as a user would and captures its output.
#pragma once

#include <string>
#include <vector>

namespace reshard {

struct CommandResult {
  int exit_code = -1;  // 128 + the number of the signal that ended it, as in a shell
  std::string out;     // standard output
  std::string err;     // standard error
  bool timed_out = false;
};

// Runs argv[0] with these arguments. Kills it after `seconds`. `env` sets variables, "NAME=value".
CommandResult run_command(const std::vector<std::string>& argv, double seconds = 60,
                          const std::vector<std::string>& env = {});

// Like run_command(), for the reshard of this build. Lets `verify` and `check` fail on notes too, unless `args` has
// --fail-on, so that a test that expects success notices each new finding.
CommandResult reshard_cli(std::vector<std::string> args, const std::vector<std::string>& more = {});

}  // namespace reshard
