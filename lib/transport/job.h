// The job that this process is a rank of: started by mpirun or srun together with others, or alone.
//
// A job of several ranks has one fate. While a rank works, another of its threads adds up a few numbers with the other
// ranks over and over: how many still work, how many failed, how far they are. So every rank hears of a failure within
// a fraction of a second, whatever it is busy with; and when the sum does not come for some time (`patience`), a rank
// is dead or cut off, and the others end with an error instead of waiting for ever. A rank that is only slow still
// answers.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "lib/base/checked.h"
#include "lib/base/result.h"
#include "lib/transport/transport.h"

namespace reshard {

struct JobOptions {
  double patience = 60;                          // seconds without a sign of life of another rank
  const std::atomic<bool>* interrupt = nullptr;  // set when the user or the launcher ends this process
};

class Job {
 public:
  virtual ~Job() = default;

  // The way to the other ranks; null in a job of one.
  virtual Transport* ranks() = 0;

  // Runs `work` as this rank. Returns when all ranks have ended: with the largest of their results, or, when a rank
  // failed, with an error of code kPeer that says which and why, the same on every rank. In a job of one it is what
  // `work` returned. Exceptions of `work` are errors.
  virtual Result<int> run(const std::function<Result<int>()>& work) = 0;

  // Whether the work ended because other ranks are dead or cut off.
  virtual bool is_broken() const { return false; }

  // How far this rank is, in bytes; any thread may say so.
  virtual void report(Index done) = 0;
  // What is to hear the sum of all ranks' bytes from time to time, on rank 0 only; null: nobody. Set it before the work
  // that reports begins and take it back after.
  virtual void listen(std::function<void(Index done)> listener) = 0;

  // The last call: returns when every rank has said what it had to say. Does not return where ranks are dead or
  // messages were left unread: then it ends the process with `exit_code`.
  virtual int end(int exit_code) = 0;
};

// Joins the job this process was started in. An error where it was started as one of several processes that know
// nothing of each other, which would all do the same work: this program was built without MPI, or the launcher gave
// none.
Result<std::unique_ptr<Job>> join_job(const JobOptions& options);

// How this process was started, as far as its environment tells.
enum class Launch { kAlone, kMpi, kSlurmWithoutMpi };
Launch how_launched(const std::function<const char*(const char* name)>& environment);

// The number of this process among those that the launcher started on its machine; 0 where that is not known.
int local_rank(const std::function<const char*(const char* name)>& environment);

// The environment of this process, for these two.
const char* process_environment(const char* name);

// The rows of the table in job.cc: mpi.cc, or what stands for it where it is not built.
Result<std::unique_ptr<Job>> join_mpi_job(const JobOptions& options);

// What the library that is found calls itself, "Open MPI v4.1.4"; an error says why there is none. No job is needed.
Result<std::string> mpi_version();
std::unique_ptr<Job> job_of_one();

// Calls `work` and makes an error of whatever it throws.
Result<int> without_exceptions(const std::function<Result<int>()>& work);

}  // namespace reshard
