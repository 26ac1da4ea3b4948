// SPDX-License-Identifier: Apache-2.0
#include "lib/transport/job.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>

#include "lib/base/catch_exceptions.h"

namespace reshard {
namespace {

class JobOfOne : public Job {
 public:
  Transport* ranks() override { return nullptr; }
  Result<int> run(const std::function<Result<int>()>& work) override { return catch_exceptions(work); }
  void report(Index done) override {
    const std::lock_guard lock(mutex_);
    if (listener_) listener_(done);
  }
  void listen(std::function<void(Index done)> listener) override {
    const std::lock_guard lock(mutex_);
    listener_ = std::move(listener);
  }
  int end(int exit_code) override { return exit_code; }

 private:
  std::mutex mutex_;
  std::function<void(Index done)> listener_;
};

bool is_more_than_one(const char* count) { return std::atoll(count) > 1; }

}  // namespace

std::unique_ptr<Job> job_of_one() { return std::make_unique<JobOfOne>(); }

Launch detect_launch(const std::function<const char*(const char* name)>& environment) {
  // Open MPI; MPICH, Intel MPI and srun --mpi=pmi2.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const char* count = environment(name)) return is_more_than_one(count) ? Launch::kMpi : Launch::kAlone;
  if (environment("PMIX_RANK") != nullptr) return Launch::kMpi;  // PMIx tells only MPI the number of ranks
  const char* const tasks = environment("SLURM_STEP_NUM_TASKS");
  return tasks && is_more_than_one(tasks) ? Launch::kSlurmWithoutMpi : Launch::kAlone;
}

int local_rank(const std::function<const char*(const char* name)>& environment) {
  // Open MPI; Intel MPI and Hydra; MVAPICH; Cray PALS; Flux; Slurm.
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK",
                           "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID"})
    if (const char* number = environment(name)) return std::max(0, std::atoi(number));
  return 0;
}

const char* process_environment(const char* name) { return std::getenv(name); }

Result<std::unique_ptr<Job>> join_job(const JobOptions& options) {
  switch (detect_launch(process_environment)) {
    case Launch::kMpi:
      return join_mpi_job(options);
    case Launch::kSlurmWithoutMpi:
      return usage_error(
          "this is one of several tasks of a Slurm step that cannot communicate; start them with "
          "srun --mpi=pmix (or pmi2, if this MPI supports it) or mpirun, or start a single task");
    case Launch::kAlone:
      break;
  }
  return job_of_one();
}

}  // namespace reshard
