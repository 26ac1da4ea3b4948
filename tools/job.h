// SPDX-License-Identifier: Apache-2.0
// Runs the program as one rank of several.
#pragma once

#include "lib/device/device.h"
#include "lib/transport/job.h"
#include "tools/commands.h"

namespace reshard::tools {

// Returns the job that this process is a rank of. Valid while an action runs.
Job& job();

// Returns the transport to the other ranks; null if this process works alone.
Transport* job_ranks();

// Returns whether this rank does what is done once: rank 0.
bool leads();

// Opens the device of --device once. With several ranks on a machine "cuda" is another GPU for each.
Result<Device*> job_device(const std::string& name, Index memory_cap);

// Opens the NCCL transport between the GPUs of all ranks once; null if NCCL cannot be used (nccl.h). All ranks call it.
Result<Transport*> job_nccl(const Device& gpu);

// Returns the number of machines that the ranks are on. All ranks call it.
Result<Index> machine_count();

// Runs the action as a rank of the job that this process was started in, reports its error, and returns the exit code.
// Only rank 0 writes to standard output. `everywhere`: all ranks run the action; otherwise rank 0 does and the others
// wait. `line`: the part of the command line that must be the same on all ranks; it is an error if it differs.
// `patience`: seconds to wait for an unresponsive rank.
int run_in_job(const Action& action, const std::string& line, bool everywhere, double patience);

}  // namespace reshard::tools
