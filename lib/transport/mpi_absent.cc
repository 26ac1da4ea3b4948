// SPDX-License-Identifier: Apache-2.0
// Replaces mpi.cc in a build without MPI.
#include "lib/transport/job.h"

namespace reshard {

Result<std::unique_ptr<Job>> join_mpi_job(const JobOptions&) {
  return unsupported(
      "this is one of several ranks started by mpirun or srun, but reshard was built without MPI; build it with "
      "-DRESHARD_MPI=ON, or start a single process");
}

Result<std::string> mpi_version() {
  return unsupported("MPI: reshard was built without MPI; configure with -DRESHARD_MPI=ON");
}

}  // namespace reshard
