#include "lib/transport/job.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include "lib/base/catch_exceptions.h"

namespace reshard::job_test {
namespace {

using Variables = std::map<std::string, std::string>;

std::function<const char*(const char* name)> environment_of(const Variables& variables) {
  return [&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  };
}

Launch launched(const Variables& variables) { return detect_launch(environment_of(variables)); }
int local_rank_with(const Variables& variables) { return local_rank(environment_of(variables)); }

TEST(Job, KnowsHowItWasStarted) {
  EXPECT_EQ(launched({}), Launch::kAlone);
  EXPECT_EQ(launched({{"OMPI_COMM_WORLD_SIZE", "4"}}), Launch::kMpi);
  EXPECT_EQ(launched({{"OMPI_COMM_WORLD_SIZE", "1"}, {"PMIX_RANK", "0"}}), Launch::kAlone);
  EXPECT_EQ(launched({{"PMI_SIZE", "16"}, {"PMI_RANK", "3"}}), Launch::kMpi);
  EXPECT_EQ(launched({{"PMIX_RANK", "0"}, {"SLURM_STEP_NUM_TASKS", "8"}}), Launch::kMpi);
  // A command of a batch script sees the job's number of tasks although it is a single process.
  EXPECT_EQ(launched({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}), Launch::kAlone);
  EXPECT_EQ(launched({{"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_PROCID", "5"}}), Launch::kSlurmWithoutMpi);
  EXPECT_EQ(launched({{"SLURM_STEP_NUM_TASKS", "1"}}), Launch::kAlone);
}

TEST(Job, KnowsItsNumberOnTheMachine) {
  EXPECT_EQ(local_rank_with({}), 0);
  EXPECT_EQ(local_rank_with({{"OMPI_COMM_WORLD_RANK", "9"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}}), 1);
  EXPECT_EQ(local_rank_with({{"MPI_LOCALRANKID", "3"}}), 3);
  EXPECT_EQ(local_rank_with({{"MV2_COMM_WORLD_LOCAL_RANK", "4"}}), 4);
  EXPECT_EQ(local_rank_with({{"PALS_LOCAL_RANKID", "5"}}), 5);
  EXPECT_EQ(local_rank_with({{"FLUX_TASK_LOCAL_ID", "6"}}), 6);
  EXPECT_EQ(local_rank_with({{"SLURM_LOCALID", "7"}}), 7);
  EXPECT_EQ(local_rank_with({{"SLURM_LOCALID", "-1"}}), 0);
}

TEST(Job, OfOneReturnsWhatItsWorkReturns) {
  const auto job = job_of_one();
  EXPECT_EQ(job->ranks(), nullptr);
  EXPECT_EQ(*job->run([]() -> Result<int> { return 1; }), 1);
  const auto failed = job->run([]() -> Result<int> { return corrupt("bad byte"); });
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code(), ErrorCode::kCorrupt);
  EXPECT_EQ(job->end(3), 3);
}

TEST(Job, TellsItsListenerHowFarItIs) {
  const auto job = job_of_one();
  Index heard = 0;
  job->report(5);
  job->listen([&](Index done) { heard = done; });
  job->report(7);
  EXPECT_EQ(heard, 7);
  job->listen(nullptr);
  job->report(9);
  EXPECT_EQ(heard, 7);
}

TEST(Exceptions, BecomeErrors) {
  const auto thrown = catch_exceptions([]() -> Result<int> { throw std::runtime_error("no such thing"); });
  ASSERT_FALSE(thrown);
  EXPECT_EQ(thrown.error().message(), "internal error: no such thing");
  const auto memory = catch_exceptions([]() -> Result<int> { throw std::bad_alloc(); });
  EXPECT_EQ(memory.error().message(), "out of memory");
  EXPECT_EQ(memory.error().code(), ErrorCode::kIo);
}

}  // namespace
}  // namespace reshard::job_test
