#include "tests/support/mpirun.h"

#include <unistd.h>

#include "lib/base/file.h"
#include "tests/support/checkpoints.h"

#ifndef RESHARD_MPIRUN
#define RESHARD_MPIRUN ""
#define RESHARD_RANK_FAULT ""
#endif

namespace reshard {

bool has_mpirun() { return *path_exists(RESHARD_MPIRUN); }

RanksResult reshard_ranks(int ranks, const std::vector<std::string>& args, const std::string& logs,
                          const std::string& fault, double seconds, const std::vector<std::string>& environment) {
  std::vector<std::string> argv = {RESHARD_BINARY};
  argv.insert(argv.end(), args.begin(), args.end());
  return program_ranks(ranks, argv, logs, fault, seconds, environment);
}

RanksResult program_ranks(int ranks, const std::vector<std::string>& program, const std::string& logs,
                          const std::string& fault, double seconds, const std::vector<std::string>& environment) {
  std::vector<std::string> argv = {RESHARD_MPIRUN, "--oversubscribe",    "--output-filename", logs,
                                   "-n",           std::to_string(ranks)};
  // Two mpiruns that start at once may both fail to create Open MPI's session directory, so each gets its own.
  const std::string session = logs + ".session";
  (void)make_directory(session);
  argv.insert(argv.end(), {"--mca", "orte_tmpdir_base", session});
  if (::geteuid() == 0) argv.emplace_back("--allow-run-as-root");
  argv.insert(argv.end(), {"-x", "NO_COLOR=1"});  // each rank's output is a terminal
  if (!fault.empty())
    for (const std::string& e : {"LD_PRELOAD=" + std::string(RESHARD_RANK_FAULT), "RESHARD_FAULT=" + fault})
      argv.insert(argv.end(), {"-x", e});
  argv.insert(argv.end(), program.begin(), program.end());
  RanksResult out;
  std::vector<std::string> variables = {kMpiAsanOptions};
  variables.insert(variables.end(), environment.begin(), environment.end());
  out.command = run_command(argv, seconds, variables);
  for (int r = 0; r < ranks; ++r) {
    // Open MPI pads rank numbers to the digits of the largest rank.
    const std::string path = logs + "/1/rank." + std::to_string(r) + "/stderr";
    out.err.push_back(*path_exists(path) ? read_file(path) : "");
  }
  return out;
}

}  // namespace reshard
