// Tests the program on several ranks under mpirun: the output is that of one process, and a failure ends all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <regex>

#include "lib/base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/mpirun.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::ranks_fault_test {
namespace {

using testing::HasSubstr;

#define NEEDS_MPIRUN() \
  if (!has_mpirun()) GTEST_SKIP() << "this reshard was built without MPI"

int count(const std::string& text, const std::string& word) {
  int n = 0;
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

// The times in verify's report differ from run to run.
std::string without_times(const std::string& text) {
  static const std::regex kTimes(R"("seconds": [0-9.]+|checked in [0-9.]+ m?s)");
  return std::regex_replace(text, kTimes, "");
}

struct Job {
  TempDir dir;
  std::string source = sample("fsdp4_tp2") + "/checkpoint", out = dir / "out";

  RanksResult convert(int ranks, const std::string& strategy, const std::string& fault,
                      const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {"convert", source,     out,    "--to",       "dcp",   "--mesh",
                                     "tp=2",    "--memory", "1GiB", "--strategy", strategy};
    args.insert(args.end(), more.begin(), more.end());
    return reshard_ranks(ranks, args, dir / ("logs" + std::to_string(runs_++)), fault);
  }
  // Returns the output of a single process.
  std::map<std::string, std::string> expected() const {
    const std::string alone = dir / "alone";
    EXPECT_EQ(reshard_cli({"convert", source, alone, "--to", "dcp", "--mesh", "tp=2", "--memory", "1GiB"}).exit_code,
              0);
    return all_files(alone);
  }

 private:
  int runs_ = 0;
};

TEST(MpiRanks, WriteWhatOneProcessWrites) {
  NEEDS_MPIRUN();
  Job job;
  const auto expected = job.expected();
  for (const char* strategy : {"direct", "exchange"})
    for (const int n : {1, 2, 3, 4, 7}) {
      const RanksResult run = job.convert(n, strategy, "");
      ASSERT_EQ(run.command.exit_code, 0) << run.command.err;
      EXPECT_TRUE(all_files(job.out) == expected) << strategy << " on " << n << " ranks";
      EXPECT_EQ(count(run.command.out, "\nproof "), 1) << run.command.out;
      EXPECT_THAT(run.command.out, HasSubstr("every element has one source, 148 source CRCs match"));
      std::filesystem::remove_all(job.out);
    }
}

TEST(MpiRanks, WriteTheCompressedFileThatOneProcessWrites) {
  NEEDS_MPIRUN();
  Job job;
  const auto archive = [&](const std::string& name) {
    return std::vector<std::string>{"convert", job.source, job.dir / name, "--to", "hdf5", "--codec", "zstd:1"};
  };
  ASSERT_EQ(reshard_cli(archive("alone.h5")).exit_code, 0);
  const RanksResult run = reshard_ranks(3, archive("out.h5"), job.dir / "logs");
  ASSERT_EQ(run.command.exit_code, 0) << run.command.err;
  EXPECT_TRUE(read_file(job.dir / "out.h5") == read_file(job.dir / "alone.h5"));
  EXPECT_FALSE(*path_exists(job.dir / "out.h5.partial"));
}

TEST(MpiRanks, AreRefusedByAProgramWithoutMpi) {
  if (has_mpirun()) GTEST_SKIP() << "this reshard was built with MPI";
  const std::string source = sample("single") + "/checkpoint";
  const CommandResult r = run_command({RESHARD_BINARY, "inspect", source}, 60, {"OMPI_COMM_WORLD_SIZE=2"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("build it with -DRESHARD_MPI=ON, or start a single process"));
}

TEST(MpiRanks, WriteTheSameAcrossANetwork) {
  NEEDS_MPIRUN();
  Job job;
  const auto expected = job.expected();
  for (const char* strategy : {"direct", "exchange"}) {
    const CommandResult run = run_command(
        {std::string(RESHARD_SOURCE_DIR) + "/tests/faults/network_namespaces.sh", "2", RESHARD_BINARY, "convert",
         job.source, job.out, "--to", "dcp", "--mesh", "tp=2", "--memory", "1GiB", "--strategy", strategy},
        60, {kMpiAsanOptions});
    if (run.exit_code == 77) GTEST_SKIP() << "this machine lets nobody make network namespaces";
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_TRUE(all_files(job.out) == expected) << strategy;
    std::filesystem::remove_all(job.out);
  }
}

TEST(MpiRanks, VerifyAndDiffSayWhatOneProcessSays) {
  NEEDS_MPIRUN();
  const TempDir dir;
  const std::string a = sample("tp8") + "/checkpoint", b = sample("tp8") + "/hf.safetensors";
  int n = 0;
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"verify", a, "--values", "--json", "--memory", "1GiB"},
        {"verify", a, "--against", b, "--memory", "1GiB"},
        {"diff", a, b, "--json", "--memory", "1GiB"},
        {"diff", a, sample("fsdp8") + "/checkpoint", "--memory", "1GiB"},
        {"inspect", a}}) {
    const CommandResult alone = reshard_cli(args);
    const RanksResult run = reshard_ranks(3, args, dir / ("logs" + std::to_string(n++)));
    EXPECT_EQ(run.command.exit_code, alone.exit_code) << args[0] << run.command.err;
    EXPECT_EQ(without_times(run.command.out), without_times(alone.out)) << args[0];
  }
}

// A fault in one rank: all ranks end with its error, reported once in each log.
struct Wrong {
  const char* name;
  const char* fault;
  const char* says;
};
class OneRankFails : public testing::TestWithParam<Wrong> {};
INSTANTIATE_TEST_SUITE_P(
    MpiRanks, OneRankFails,
    testing::Values(Wrong{"WhileOpening", "1 pread 1 eio", "rank 1 of 3: "},
                    Wrong{"WhileReading", "2 pread 60 eio", "rank 2 of 3: "},
                    Wrong{"WhileMakingFiles", "0 fallocate 2 enospc", "rank 0 of 3: "},
                    Wrong{"WhileWriting", "1 pwrite 1 enospc", "No space left on device"},
                    Wrong{"WhileFlushing", "1 fdatasync 1 eio", "cannot write to disk: Input/output error"},
                    Wrong{"WhilePublishing", "0 rename 1 eio", "cannot move the finished output into place"}),
    [](const auto& param) { return std::string(param.param.name); });

TEST_P(OneRankFails, EndsAllWithItsError) {
  NEEDS_MPIRUN();
  Job job;
  for (const char* strategy : {"direct", "exchange"}) {
    const RanksResult run = job.convert(3, strategy, GetParam().fault);
    EXPECT_FALSE(run.command.timed_out);
    EXPECT_EQ(run.command.exit_code, 6) << run.command.err;
    for (const std::string& err : run.err) {
      EXPECT_EQ(count(err, "error: "), 1) << err;
      EXPECT_THAT(err, HasSubstr(GetParam().says));
    }
    EXPECT_FALSE(*path_exists(job.out));
    EXPECT_FALSE(*path_exists(job.out + ".partial"));
  }
}

// If a rank is killed, the others end in time, nothing incomplete looks finished, and the next run succeeds.
class OneRankIsKilled : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(MpiRanks, OneRankIsKilled,
                         testing::Values("1 pread 1 kill", "2 pread 60 kill", "0 fallocate 1 kill", "0 pwrite 1 kill",
                                         "2 fdatasync 1 kill", "0 fdatasync 2 kill", "0 rename 1 kill"));

TEST_P(OneRankIsKilled, NothingIsPublished) {
  NEEDS_MPIRUN();
  Job job;
  const auto expected = job.expected();
  const std::string killed(1, GetParam()[0]);
  const RanksResult run = job.convert(3, "exchange", GetParam());
  EXPECT_FALSE(run.command.timed_out);
  EXPECT_NE(run.command.exit_code, 0);
  EXPECT_THAT(run.command.err, HasSubstr("on signal 9")) << "mpirun says which";
  for (std::size_t r = 0; r < run.err.size(); ++r)
    EXPECT_LE(count(run.err[r], "error: "), std::to_string(r) == killed ? 0 : 1) << run.err[r];
  EXPECT_FALSE(*path_exists(job.out));
  const RanksResult again = job.convert(3, "exchange", "");
  EXPECT_EQ(again.command.exit_code, 0) << again.command.err;
  EXPECT_TRUE(all_files(job.out) == expected);
}

// In jobs of several sizes, each rank dies at its first calls of each kind, and at some later ones.
TEST(MpiRanks, EndWhicheverOfThemDiesWherever) {
  NEEDS_MPIRUN();
  if (!in_soak()) GTEST_SKIP() << "takes minutes: RESHARD_SOAK=1";
  Job job;
  const auto expected = job.expected();
  int deaths = 0;
  double longest = 0;
  const std::pair<const char*, std::vector<int>> kCalls[] = {
      {"pread", {1, 7, 30, 60}}, {"fallocate", {1, 2}}, {"pwrite", {1, 2, 9}}, {"fdatasync", {1, 2}}, {"rename", {1}}};
  for (const char* strategy : {"direct", "exchange"})
    for (const int ranks : {2, 4, 8})
      for (int rank = 0; rank < ranks; ++rank)
        for (const auto& [call, places] : kCalls)
          for (const int n : places) {
            const std::string fault = std::to_string(rank) + " " + call + " " + std::to_string(n) + " kill";
            SCOPED_TRACE(std::string(strategy) + " on " + std::to_string(ranks) + " ranks, " + fault);
            const auto start = std::chrono::steady_clock::now();
            const RanksResult run = job.convert(ranks, strategy, fault);
            const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
            ASSERT_FALSE(run.command.timed_out);
            if (run.command.exit_code == 0) {  // it makes fewer calls of this kind
              ASSERT_TRUE(all_files(job.out) == expected);
            } else {
              ++deaths;
              longest = std::max(longest, time.count());
              ASSERT_FALSE(*path_exists(job.out));
              if (deaths % 8 == 0) {
                const RanksResult again = job.convert(ranks, strategy, "");
                ASSERT_EQ(again.command.exit_code, 0) << again.command.err;
                ASSERT_TRUE(all_files(job.out) == expected);
              }
            }
            std::filesystem::remove_all(job.out);
            std::filesystem::remove_all(job.out + ".partial");
          }
  std::printf("%d deaths, the longest end took %.1f s\n", deaths, longest);
  EXPECT_GE(deaths, 200);
  EXPECT_LE(longest, 30);
}

TEST(MpiRanks, ASlowRankIsWaitedFor) {
  NEEDS_MPIRUN();
  Job job;
  const auto expected = job.expected();
  const RanksResult run = job.convert(3, "exchange", "1 pread 20 stop");
  EXPECT_EQ(run.command.exit_code, 0) << run.command.err;
  EXPECT_TRUE(all_files(job.out) == expected);
}

TEST(MpiRanks, ARankThatGivesNoSignOfLifeIsGivenUp) {
  NEEDS_MPIRUN();
  Job job;
  const RanksResult run = job.convert(3, "exchange", "1 pread 20 stop", {"--rank-timeout", "1"});
  EXPECT_FALSE(run.command.timed_out);
  EXPECT_EQ(run.command.exit_code, 6) << run.command.err;
  // The first rank to give up ends the others, which may be about to give up too.
  EXPECT_THAT(run.err[0] + run.err[2], HasSubstr("another rank did not respond for 1 s"));
  for (const std::size_t r : {0, 2}) EXPECT_EQ(count(run.err[r], "error: "), 1) << run.err[r];
  EXPECT_FALSE(*path_exists(job.out));
}

TEST(MpiRanks, VerifyNamesAllDamagedTensorsAsOneProcessDoes) {
  NEEDS_MPIRUN();
  const TempDir dir;
  const std::string bad = dir / "bad";
  std::filesystem::copy(sample("tp8") + "/checkpoint", bad);
  int damaged = 0;
  for (const char* name : {"__1_0.distcp", "__2_0.distcp", "__5_0.distcp"}) {
    std::string bytes = read_file(bad + "/" + name);
    for (std::size_t at = 3000; at < bytes.size(); at += 9000) bytes[at] ^= 1;
    write_file(bad + "/" + name, bytes);
  }
  int n = 0;
  for (const std::vector<std::string>& args : {std::vector<std::string>{"verify", bad, "--memory", "1GiB"},
                                               {"verify", bad, "--values", "--json", "--memory", "1GiB"},
                                               {"verify", bad, "--replicas", "--memory", "1GiB"}}) {
    const CommandResult alone = reshard_cli(args);
    EXPECT_EQ(alone.exit_code, 1) << alone.err;
    EXPECT_THAT(alone.out, testing::AllOf(HasSubstr("the stored bytes are damaged"), HasSubstr("expected CRC-32")));
    for (const int ranks : {2, 3}) {
      const RanksResult run = reshard_ranks(ranks, args, dir / ("logs" + std::to_string(n++)));
      EXPECT_EQ(run.command.exit_code, 1) << run.command.err;
      EXPECT_EQ(without_times(run.command.out), without_times(alone.out));
    }
    damaged = std::max(damaged, count(alone.out, "expected CRC-32"));
  }
  EXPECT_EQ(damaged, 4) << "the first few are explained";
}

// Ranks with different command lines would wait for each other forever.
TEST(MpiRanks, WithDifferentCommandLinesAreRefused) {
  NEEDS_MPIRUN();
  const TempDir dir;
  const std::string all = std::string(RESHARD_BINARY) + " convert " + sample("tp8") + "/checkpoint " + (dir / "out") +
                          " --to hf --rank-timeout 5";
  int runs = 0;
  for (const std::string& another : {std::string(RESHARD_BINARY) + " inspect " + sample("tp8"), all + " --dry-run",
                                     std::string(RESHARD_BINARY) + " verify " + sample("tp8") + "/checkpoint"})
    for (const char* rank : sampled({"0", "1"}, 2)) {
      SCOPED_TRACE(another + " on rank " + rank);
      const RanksResult run =
          program_ranks(3,
                        {"/bin/sh", "-c",
                         "[ $OMPI_COMM_WORLD_RANK = " + std::string(rank) + " ] && exec " + another + "; exec " + all},
                        dir / ("logs" + std::to_string(runs++)), "", 30);
      EXPECT_FALSE(run.command.timed_out);
      EXPECT_EQ(run.command.exit_code, 6) << run.command.err;
      for (const std::string& err : run.err)
        EXPECT_THAT(err, HasSubstr("rank 1 has a different command line from rank 0: "));
      EXPECT_FALSE(*path_exists(dir / "out"));
      EXPECT_FALSE(*path_exists(dir / "out.partial"));
    }
  // Each rank has its own memory limit.
  const RanksResult run = program_ranks(
      2, {"/bin/sh", "-c", "exec " + all + " --threads $((1 + OMPI_COMM_WORLD_RANK))"}, dir / "logs", "", 30);
  EXPECT_EQ(run.command.exit_code, 0) << run.command.err;
}

TEST(MpiRanks, AMissingSourceIsSaidOnceInEachLog) {
  NEEDS_MPIRUN();
  const TempDir dir;
  const RanksResult run = reshard_ranks(2, {"convert", dir / "nowhere", dir / "out", "--to", "hf"}, dir / "logs");
  EXPECT_EQ(run.command.exit_code, 6);
  for (const std::string& err : run.err) EXPECT_EQ(count(err, "nowhere: not found"), 1) << err;
}

}  // namespace
}  // namespace reshard::ranks_fault_test
