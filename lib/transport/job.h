// SPDX-License-Identifier: Apache-2.0
// The job that this process is a rank of: one of several processes started by mpirun or srun, or a single one.
//
// A job of several ranks fails or succeeds as a whole. While a rank works, another of its threads repeatedly reduces a
// few numbers with the other ranks: how many still work, how many failed, and the progress. So every rank learns of a
// failure within a fraction of a second, whatever it is doing. If a reduction does not complete within `patience`, a
// rank is dead or cut off, and the others end with an error instead of waiting forever. A rank that is only slow still
// answers, because that thread does nothing else.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "lib/base/checked.h"
#include "lib/base/result.h"
#include "lib/transport/transport.h"

namespace reshard {

struct JobOptions {
  double patience = 60;                          // seconds to wait for an unresponsive rank
  const std::atomic<bool>* interrupt = nullptr;  // set when the user or the launcher stops this process
};

class Job {
 public:
  virtual ~Job() = default;

  // Returns the transport to the other ranks, or null in a job of one.
  virtual Transport* ranks() = 0;

  // Runs `work` as this rank and returns once all ranks have finished. The result is the largest of all ranks' results.
  // If a rank failed, it is an error of code kPeer that names the rank and the reason, the same on every rank. In a job
  // of one it is the result of `work`. Exceptions thrown by `work` become errors.
  virtual Result<int> run(const std::function<Result<int>()>& work) = 0;

  // Returns whether the work ended because other ranks are dead or cut off.
  virtual bool is_broken() const { return false; }

  // Reports this rank's progress in bytes. Thread-safe.
  virtual void report(Index done) = 0;
  // Sets a callback for the sum of all ranks' progress, called from time to time on rank 0 only; null: none. Set it
  // before the work that reports begins, and reset it afterwards.
  virtual void listen(std::function<void(Index done)> listener) = 0;

  // Ends the job; the last call. Returns once all ranks have called it. If ranks are dead or messages were left unread,
  // it does not return: it ends the process with `exit_code`.
  virtual int end(int exit_code) = 0;
};

// Joins the job in which this process was started. Fails if it is one of several processes that cannot communicate and
// would all do the same work: reshard was built without MPI, or the launcher does not support it.
Result<std::unique_ptr<Job>> join_job(const JobOptions& options);

// How this process was started, according to its environment.
enum class Launch { kAlone, kMpi, kSlurmWithoutMpi };
Launch detect_launch(const std::function<const char*(const char* name)>& environment);

// Returns the index of this process among those started on its machine, or 0 if it is unknown.
int local_rank(const std::function<const char*(const char* name)>& environment);

// Reads the environment of this process; the argument for detect_launch() and local_rank().
const char* process_environment(const char* name);

// Joins an MPI job: implemented by mpi.cc, or by mpi_absent.cc in a build without MPI.
Result<std::unique_ptr<Job>> join_mpi_job(const JobOptions& options);

// Returns the version of the MPI library found, "Open MPI v4.1.4", or an error that says why there is none. Needs no
// job.
Result<std::string> mpi_version();
std::unique_ptr<Job> job_of_one();

}  // namespace reshard
