// Tests what a conversion leaves when its process is killed or gets a signal, and when the disk, the size of files or
// the number of descriptors is too small.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <thread>

#include "formats/dcp/dcp.h"
#include "formats/open.h"
#include "lib/base/syscalls.h"
#include "lib/convert/conversion.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::process_fault_test {
namespace {

namespace fs = std::filesystem;

// A checkpoint of 96 MiB, so that a conversion takes long enough to be killed.
void write_large(const std::string& path) {
  TensorValues values;
  std::mt19937_64 rng(3);
  for (int layer = 0; layer < 6; ++layer) {
    TensorValue v{DType::kFloat32, {2048, 2048}, std::string(std::size_t{16} << 20, '\0')};
    for (std::size_t i = 0; i < v.bytes.size(); i += 8) {
      const std::uint64_t word = rng();
      std::memcpy(v.bytes.data() + i, &word, 8);
    }
    values["layers." + std::to_string(layer) + ".w"] = std::move(v);
  }
  write_dcp(values, path, Mesh({{"dp_shard", 4}}));
}

// Runs a command and kills it some seconds after `path` appears. Discards its output.
CommandResult killed_after(const std::vector<std::string>& argv, const std::string& path, double seconds) {
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, STDOUT_FILENO);
    ::execv(words[0], words.data());
    ::_exit(127);
  }
  int status = 0;
  pid_t ended = 0;
  while (!fs::exists(path) && (ended = ::waitpid(pid, &status, WNOHANG)) == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (ended == 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    ::kill(pid, SIGKILL);
    ::waitpid(pid, &status, 0);
  }
  return {WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status), "", "", false};
}

void expect_kills_leave_nothing(const std::vector<std::string>& target, int rounds, int least_leftovers) {
  const TempDir dir;
  {
    Syscalls calls = sys();
    calls.fdatasync = calls.fsync = [](int) { return 0; };
    const ScopedSyscalls scoped(calls);
    write_large(dir / "ck");
  }
  std::vector<std::string> argv = {RESHARD_BINARY, "convert", dir / "ck",  dir / "out",
                                   "--threads",    "2",       "--include", "layers.[0-2].*"};
  argv.insert(argv.end(), target.begin(), target.end());
  const auto run = [&] { return run_command(argv, 60); };
  double whole_run = 0;
  std::map<std::string, std::string> expected;
  for (int n = 0; n < 3; ++n) {  // the first run is slower than those to kill
    fs::remove_all(dir / "out");
    const auto start = std::chrono::steady_clock::now();
    const CommandResult healthy = run();
    ASSERT_EQ(healthy.exit_code, 0) << healthy.out << healthy.err;
    whole_run = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    expected = files_at(dir / "out");
  }
  fs::remove_all(dir / "out");

  std::mt19937 rng(11);
  int killed = 0, leftovers = 0, finished = 0;
  for (int n = 0; n < rounds; ++n) {
    const double part = static_cast<double>(rng() % 1000) / 1000;
    // Killed at any time, or once there is something to leave behind.
    const CommandResult r = n % 2 == 0 ? run_command(argv, whole_run * (0.02 + 0.98 * part))
                                       : killed_after(argv, dir / "out.partial", whole_run * 0.2 * part);
    if (r.exit_code == 0) {
      ++finished;
      ASSERT_EQ(files_at(dir / "out"), expected);
      fs::remove_all(dir / "out");
      continue;
    }
    ASSERT_EQ(r.exit_code, 128 + SIGKILL) << r.err;
    ++killed;
    // Between the last rename and the end of the process the output is complete.
    if (fs::exists(dir / "out")) {
      ASSERT_EQ(files_at(dir / "out"), expected);
      fs::remove_all(dir / "out");
      continue;
    }
    if (!fs::exists(dir / "out.partial")) continue;
    ++leftovers;
    if (n % 3 != 0) continue;  // the next killed run shall find the leftover too
    const CommandResult next = run();
    ASSERT_EQ(next.exit_code, 0) << next.out << next.err;
    EXPECT_THAT(next.out, testing::HasSubstr("removed " + dir / "out.partial of an interrupted run"));
    ASSERT_EQ(files_at(dir / "out"), expected);
    ASSERT_FALSE(fs::exists(dir / "out.partial"));
    fs::remove_all(dir / "out");
  }
  const CommandResult last = run();
  ASSERT_EQ(last.exit_code, 0) << last.out << last.err;
  EXPECT_EQ(files_at(dir / "out"), expected);
  EXPECT_FALSE(fs::exists(dir / "out.partial") || fs::exists(dir / "out.publishing"));
  std::printf("%d killed, %d of them left a work directory, %d had finished\n", killed, leftovers, finished);
  EXPECT_GE(leftovers, least_leftovers);
}

TEST(Kill, LeavesNothingThatLooksFinished) {
  expect_kills_leave_nothing({"--to", "dcp", "--mesh", "dp_shard=3"}, 30, 5);
}

TEST(Kill, LeavesNothingThatLooksFinishedWhereTheOutputIsAFile) { expect_kills_leave_nothing({"--to", "hdf5"}, 12, 2); }

class Interrupt : public testing::TestWithParam<int> {};

TEST_P(Interrupt, CleansUpBehindItself) {
  const TempDir dir;
  write_large(dir / "ck");
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::signal(GetParam(), SIG_DFL);  // the tests may run under nohup
    ::execl(RESHARD_BINARY, RESHARD_BINARY, "convert", (dir / "ck").c_str(), (dir / "out").c_str(), "--to", "dcp",
            "--threads", "1", "-q", nullptr);
    ::_exit(127);
  }
  while (!fs::exists(dir / "out.partial") && ::waitpid(pid, nullptr, WNOHANG) == 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // A rank that loses its terminal gets SIGHUP from Slurm, mpirun, a shell and the kernel, so a second one must not end
  // it at once.
  for (int time = 0; time < 2; ++time) {
    ::kill(pid, GetParam());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) GTEST_SKIP() << "finished before the signal";
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + GetParam());
  EXPECT_FALSE(fs::exists(dir / "out"));
  EXPECT_FALSE(fs::exists(dir / "out.partial"));
}

INSTANTIATE_TEST_SUITE_P(Signals, Interrupt, testing::Values(SIGTERM, SIGHUP));

// A full disk: a tmpfs of 1 MiB if mounting is allowed, otherwise a limit on the size of files.
TEST(FullDisk, IsSaidBeforeAnythingIsWritten) {
  const TempDir dir;
  const std::string disk = dir / "disk", source = sample("fsdp2_tp2_optim") + "/checkpoint";
  fs::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=1m") != 0)
    GTEST_SKIP() << "mounting is not allowed: " << std::strerror(errno);
  const CommandResult r = run_command({RESHARD_BINARY, "convert", source, disk + "/out", "--to", "dcp"});
  EXPECT_EQ(r.exit_code, 5);
  EXPECT_THAT(r.err,
              testing::AllOf(testing::HasSubstr("the output needs"), testing::HasSubstr("free. Nothing was written")));
  EXPECT_TRUE(fs::is_empty(disk));
  // The check passed, but then another process filled the disk.
  {
    OpenCheckpoint open = *open_checkpoint(source);
    ConversionOptions o;
    o.run.threads = 1;
    o.run.memory = Index{1} << 30;
    const auto conversion = Conversion::prepare(*open.reader, kDcpFormat, std::move(o));
    ASSERT_TRUE(conversion) << conversion.error().message();
    const auto outcome = (*conversion)->run({disk + "/out"});
    ASSERT_FALSE(outcome);
    EXPECT_EQ(outcome.error().code(), ErrorCode::kIo);
    EXPECT_THAT(outcome.error().message(),
                testing::AllOf(testing::HasSubstr("cannot reserve"), testing::HasSubstr("No space left")));
    EXPECT_TRUE(fs::is_empty(disk));
  }
  ::umount2(disk.c_str(), MNT_DETACH);
}

TEST(FileSizeLimit, IsAnErrorAndNotADeath) {
  const TempDir dir;
  const std::string command =
      "ulimit -f 64; exec " RESHARD_BINARY " convert " + sample("tp8") + "/checkpoint " + (dir / "out") + " --to hf";
  const CommandResult r = run_command({"/bin/bash", "-c", command});
  EXPECT_EQ(r.exit_code, 5) << r.out << r.err;
  EXPECT_THAT(r.err, testing::HasSubstr("File too large"));
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

TEST(FewDescriptors, AreNamedWhereTheyAreTooFewToBegin) {
  if (kSanitized) return;  // the sanitizers' own checks need descriptors
  // One descriptor besides the standard ones, which the dynamic loader needs, and none inherited from the caller.
  const CommandResult r =
      run_command({"/bin/bash", "-c",
                   "for i in {3..63}; do eval \"exec $i>&-\"; done; ulimit -n 4; exec " RESHARD_BINARY " inspect " +
                       sample("tp8")});
  if (r.exit_code == 0) GTEST_SKIP() << "this kernel has no Landlock";
  EXPECT_EQ(r.exit_code, 5);
  EXPECT_THAT(r.err, testing::HasSubstr("too few files may be open at a time; raise the limit (ulimit -n)"));
}

TEST(FewDescriptors, Suffice) {
  // 16 source files and 16 outputs, with room for a dozen open ones.
  const TempDir dir;
  const std::string command = "ulimit -n 40; exec " RESHARD_BINARY " convert " + sample("fsdp16") + "/checkpoint " +
                              (dir / "out") + " --to dcp --mesh dp_shard=4";
  const CommandResult r = run_command({"/bin/bash", "-c", command});
  EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
  if (kSanitized) return;  // the sanitizers' own checks need descriptors
  const std::string few = "ulimit -n 12; exec " RESHARD_BINARY " convert " + sample("fsdp16") + "/checkpoint " +
                          (dir / "out2") + " --to dcp --mesh dp_shard=4";
  const CommandResult failed_run = run_command({"/bin/bash", "-c", few});
  if (failed_run.exit_code != 0) {
    EXPECT_EQ(failed_run.exit_code, 5);
    EXPECT_THAT(failed_run.err, testing::HasSubstr("Too many open files"));
    EXPECT_FALSE(fs::exists(dir / "out2"));
  }
}

}  // namespace
}  // namespace reshard::process_fault_test
