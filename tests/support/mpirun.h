// Runs a program as several ranks, as a user would with mpirun.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/support/run_command.h"

namespace reshard {

// Whether the tests were built with MPI.
bool has_mpirun();

// For sanitized ranks: MPI's plugins leave memory behind and are gone when leaks are told; what a test preloads comes
// before the sanitizer.
inline constexpr const char* kMpiAsanOptions = "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0";

struct RanksResult {
  CommandResult command;         // mpirun's own
  std::vector<std::string> err;  // each rank's standard error
};

// `mpirun -n ranks reshard args...`, in a directory `logs` that it makes. `fault` as rank_fault.cc has it, empty: none.
RanksResult reshard_ranks(int ranks, const std::vector<std::string>& args, const std::string& logs,
                          const std::string& fault = "", double seconds = 120);
// The same of another program; `argv` begins with its path.
RanksResult program_ranks(int ranks, const std::vector<std::string>& argv, const std::string& logs,
                          const std::string& fault = "", double seconds = 120);

}  // namespace reshard
