// Runs a program on several ranks with mpirun.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/support/run_command.h"

namespace reshard {

// Returns whether the tests were built with MPI.
bool has_mpirun();

// Sanitizer options for ranks. MPI's plugins leak memory and are unloaded before leaks are reported, and libraries that
// a test preloads are linked before the sanitizer's runtime.
inline constexpr const char* kMpiAsanOptions = "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0";

struct RanksResult {
  CommandResult command;         // of mpirun itself
  std::vector<std::string> err;  // standard error, by rank
};

// Runs `mpirun -n ranks reshard args...` and creates the directory `logs` for its output. `fault` has the syntax of
// rank_fault.cc; empty: no fault. `environment` has NAME=VALUE.
RanksResult reshard_ranks(int ranks, const std::vector<std::string>& args, const std::string& logs,
                          const std::string& fault = "", double seconds = 120,
                          const std::vector<std::string>& environment = {});
// Like reshard_ranks(), for another program; `argv` begins with its path.
RanksResult program_ranks(int ranks, const std::vector<std::string>& argv, const std::string& logs,
                          const std::string& fault = "", double seconds = 120,
                          const std::vector<std::string>& environment = {});

}  // namespace reshard
