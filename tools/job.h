// How the program runs as one rank of several: what is shared by all subcommands.
#pragma once

#include "lib/device/device.h"
#include "lib/transport/job.h"
#include "tools/commands.h"

namespace reshard::tools {

// The job this process is a rank of; while an action runs.
Job& job();

// The way to the other ranks; null where this process is alone, or does alone what needs no others.
Transport* job_ranks();

// Whether this rank looks after what is done once: rank 0.
bool leads();

// The device that --device names, opened once; with several ranks on a machine "cuda" is another GPU for each.
Result<Device*> job_device(const std::string& name, Index memory_cap);

// The way from this rank's GPU to those of the others, opened once; null where NCCL cannot be (nccl.h). All ranks call
// it.
Result<Transport*> job_nccl(const Device& gpu);

// How many machines the ranks are on, 1 for a process alone; all ranks call it.
Result<Index> machine_count();

// Runs the action as a rank of the job this process was started in, says its error, and returns the exit code. Standard
// output is rank 0's. `everywhere`: all ranks run it together; otherwise rank 0 does, and the others wait.
// `line`: the command line as far as all ranks have to have the same; where they have not, that is the error.
// `patience`: seconds without a sign of life of a rank.
int run_in_job(const Action& action, const std::string& line, bool everywhere, double patience);

}  // namespace reshard::tools
