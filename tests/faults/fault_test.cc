// Tests conversions when system calls fail, fall short, or the process dies: every call of a scenario fails in turn.
// After an error the destination and its work directory do not exist, and the next run gives the usual bytes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "formats/dcp/dcp.h"
#include "formats/open.h"
#include "lib/base/syscalls.h"
#include "lib/convert/conversion.h"
#include "tests/support/checkpoints.h"
#include "tests/support/power_loss.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::fault_test {
namespace {

namespace fs = std::filesystem;
using Files = std::map<std::string, std::string>;

// ---- A table of calls that can be made to fail

enum class Call {
  kOpen,
  kClose,
  kFstat,
  kFstatat,
  kStatx,
  kPread,
  kPwrite,
  kWrite,
  kFallocate,
  kFtruncate,
  kFdatasync,
  kFsync,
  kMkdir,
  kRename,
  kLink,
  kUnlink,
  kRmdir,
  kOpendir,
  kReaddir,
  kReadlink,
  kRealpath,
  kFlock
};
constexpr const char* kCallNames[] = {"open",    "close",    "fstat",     "fstatat",   "statx",     "pread",
                                      "pwrite",  "write",    "fallocate", "ftruncate", "fdatasync", "fsync",
                                      "mkdir",   "rename",   "link",      "unlink",    "rmdir",     "opendir",
                                      "readdir", "readlink", "realpath",  "flock"};

// Returns whether a call asks what a path is or leads to.
bool looks(Call call) {
  return call == Call::kFstatat || call == Call::kStatx || call == Call::kOpendir || call == Call::kReadlink ||
         call == Call::kRealpath;
}

struct Fault {
  std::int64_t nth = 0;  // the number of the first call that fails, from 1; 0: none
  bool sticky = false;   // whether all calls after it fail too
  int error = EIO;
  bool is_look = false;  // whether it is among the calls that look at paths, or among the others
};

Fault fault;
std::int64_t calls_made = 0, looks_made = 0;
std::vector<Call> failed;  // the calls that failed
// Interrupts every second call that may be interrupted, and makes reads and writes fall short.
bool nagging = false;
Index interruptions = 0, short_transfers = 0;  // numbers of those that happened
Syscalls real;

// Returns whether this call fails. Single-threaded.
bool fails(Call call) {
  const std::int64_t made = looks(call) ? ++looks_made : ++calls_made;
  const bool now =
      fault.nth > 0 && fault.is_look == looks(call) && (fault.sticky ? made >= fault.nth : made == fault.nth);
  if (!now) return false;
  failed.push_back(call);
  errno = fault.error;
  return true;
}

bool interrupted_now() {
  static bool next = false;
  if (!nagging) return false;
  next = !next;
  interruptions += next ? 1 : 0;
  errno = EINTR;
  return next;
}

std::size_t shorter(std::size_t n) {
  if (!nagging || n < 2) return n;
  static std::mt19937 rng(7);
  ++short_transfers;
  return n > 4096 ? n / 3 + rng() % 5 : 1 + rng() % (n - 1);
}

Syscalls faulty() {
  Syscalls c;
  c.open = [](const char* path, int flags, mode_t mode) {
    return fails(Call::kOpen) || interrupted_now() ? -1 : real.open(path, flags, mode);
  };
  c.close = [](int fd) {  // a close that fails has closed the file
    const bool fail = fails(Call::kClose);
    const int r = real.close(fd);
    if (fail) errno = fault.error;
    return fail ? -1 : r;
  };
  c.fstat = [](int fd, struct stat* out) { return fails(Call::kFstat) ? -1 : real.fstat(fd, out); };
  c.fstatat = [](int directory, const char* path, struct stat* out, int flags) {
    return fails(Call::kFstatat) ? -1 : real.fstatat(directory, path, out, flags);
  };
  c.statx = [](int directory, const char* path, int flags, unsigned mask, struct statx* out) {
    return fails(Call::kStatx) ? -1 : real.statx(directory, path, flags, mask, out);
  };
  c.pread = [](int fd, void* buffer, std::size_t n, off_t offset) -> ssize_t {
    return fails(Call::kPread) || interrupted_now() ? -1 : real.pread(fd, buffer, shorter(n), offset);
  };
  c.pwrite = [](int fd, const void* buffer, std::size_t n, off_t offset) -> ssize_t {
    return fails(Call::kPwrite) || interrupted_now() ? -1 : real.pwrite(fd, buffer, shorter(n), offset);
  };
  c.write = [](int fd, const void* buffer, std::size_t n) -> ssize_t {
    return fails(Call::kWrite) || interrupted_now() ? -1 : real.write(fd, buffer, shorter(n));
  };
  c.fallocate = [](int fd, int mode, off_t offset, off_t length) {
    return fails(Call::kFallocate) || interrupted_now() ? -1 : real.fallocate(fd, mode, offset, length);
  };
  c.ftruncate = [](int fd, off_t length) {
    return fails(Call::kFtruncate) || interrupted_now() ? -1 : real.ftruncate(fd, length);
  };
  // Power cuts are not tested here, so nothing is synced.
  c.fdatasync = [](int) { return fails(Call::kFdatasync) || interrupted_now() ? -1 : 0; };
  c.fsync = [](int) { return fails(Call::kFsync) || interrupted_now() ? -1 : 0; };
  c.mkdir = [](const char* path, mode_t mode) { return fails(Call::kMkdir) ? -1 : real.mkdir(path, mode); };
  c.rename = [](const char* from, const char* to, unsigned flags) {
    return fails(Call::kRename) ? -1 : real.rename(from, to, flags);
  };
  c.link = [](const char* from, const char* to) { return fails(Call::kLink) ? -1 : real.link(from, to); };
  c.unlink = [](const char* path) { return fails(Call::kUnlink) ? -1 : real.unlink(path); };
  c.rmdir = [](const char* path) { return fails(Call::kRmdir) ? -1 : real.rmdir(path); };
  c.opendir = [](const char* path) { return fails(Call::kOpendir) ? nullptr : real.opendir(path); };
  c.readdir = [](DIR* directory) { return fails(Call::kReaddir) ? nullptr : real.readdir(directory); };
  c.readlink = [](const char* path, char* buffer, std::size_t n) -> ssize_t {
    return fails(Call::kReadlink) ? -1 : real.readlink(path, buffer, n);
  };
  c.realpath = [](const char* path, char* resolved) {
    return fails(Call::kRealpath) ? nullptr : real.realpath(path, resolved);
  };
  c.flock = [](int fd, int operation) { return fails(Call::kFlock) ? -1 : real.flock(fd, operation); };
  return c;
}

class FaultTest : public testing::Test {
 protected:
  FaultTest() {
    real = sys();
    arm({});
    scoped_.emplace(faulty());
  }
  ~FaultTest() override {
    scoped_.reset();
    nagging = false;
  }
  static void arm(Fault f) {
    fault = f;
    calls_made = looks_made = 0;
    failed.clear();
  }

 private:
  std::optional<ScopedSyscalls> scoped_;
};

// ---- scenarios

// Returns the files of an output, which is a directory or a file.
Files files_at(const std::string& path) {
  if (fs::is_regular_file(path)) return {{"", read_file(path)}};
  return all_files(path);
}

struct Scenario {
  std::string name, source, to, mesh;
  bool replaces = false;           // there is a checkpoint to replace
  bool has_plain_renames = false;  // on a file system without the flags of renameat2
  bool is_cold = false;            // the source is not cached, so it is read past the page cache
};
const Scenario kScenarios[] = {{"tp8 to hf", "tp8", "hf", "", false},
                               {"fsdp4_tp2 to dcp tp=2", "fsdp4_tp2", "dcp", "tp=2", false},
                               {"tp8 to hf, replacing", "tp8", "hf", "", true},
                               {"tp8 to hdf5", "tp8", "hdf5", "", false},
                               {"tp8 to hdf5, by way of a link", "tp8", "hdf5", "", false, true},
                               {"tp8 to hdf5 in chunks, replacing", "tp8", "hdf5", "", true}};
const Files kOldFile = {{"", "\x89HDF\r\n\x1a\n, an old one"}};
const Files kOldDirectory = {
    {"model.safetensors",
     std::string("\x38\0\0\0\0\0\0\0", 8) + R"({"old":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} )" + "x"}};

bool makes_file(const Scenario& s) { return s.to == "hdf5"; }

// Brings a source into the page cache or evicts it, because the calls depend on that.
void make_cached(const std::string& source, bool is_cached) {
  for (const auto& [name, bytes] : all_files(source)) {  // reading caches them
    if (is_cached) continue;
    const int fd = ::open((source + "/" + name).c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_EQ(::fdatasync(fd), 0);
    ASSERT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    ::close(fd);
  }
}

Status run_scenario(const Scenario& s, const std::string& destination) {
  std::optional<ScopedSyscalls> plain;
  if (s.has_plain_renames) plain.emplace(without_rename_flags());
  const bool is_path = s.source.starts_with("/");
  if (is_path) make_cached(s.source, !s.is_cold);
  OpenCheckpoint open = TRY(open_checkpoint(is_path ? s.source : sample(s.source) + "/checkpoint"));
  ConversionOptions o;
  o.source_path = s.source;
  if (!is_path) o.config_path = sample(s.source) + "/config.json";
  o.selection.include = {"layers.0.*",
                         "norm.weight"};  // few enough tensors to fail each call, and enough for every kind of call
  if (!s.mesh.empty()) o.placement.mesh = TRY(Mesh::parse(s.mesh));
  if (makes_file(s) && s.replaces) o.compression.zstd_level = 1;
  o.run.threads = 1;
  o.run.memory = Index{1} << 30;
  const auto conversion = TRY(Conversion::prepare(*open.reader, *TRY(find_format(s.to)), std::move(o)));
  TRY(conversion->run({destination, s.replaces ? files_of_checkpoint : nullptr}));
  return {};
}

void make_old(const Scenario& s, const std::string& destination) {
  fs::remove_all(destination);
  if (!s.replaces) return;
  if (makes_file(s)) return write_file(destination, kOldFile.at(""));
  fs::create_directory(destination);
  write_file(destination + "/model.safetensors", kOldDirectory.at("model.safetensors"));
}

TEST_F(FaultTest, EveryFailingCallLeavesNothingOrEverything) {
  // Each call fails in one of the six ways; in the soak, in all of them.
  const Index step = soak_is_asked() ? 1 : 6 * every_nth(5);
  std::vector<int> reasons = {EIO, ENOSPC, EMFILE};
  if (in_soak()) reasons.insert(reasons.end(), {EDQUOT, EACCES, ENOMEM});
  Index way = 0;
  Index runs = 0, errors = 0, survived = 0;
  std::map<std::string, Index> survivors;
  // Pieces large enough for direct writes, and for direct reads if the file system allows them and the data is not
  // cached.
  const TempDir large;
  write_dcp({{"layers.0.a", {DType::kUint8, {1024, 640}, std::string(1024 * 640, 'a')}},
             {"layers.0.b", {DType::kUint8, {400, 1000}, std::string(400 * 1000, 'b')}}},
            large / "ck", Mesh({{"dp_shard", 2}}));
  std::vector<Scenario> scenarios(std::begin(kScenarios), std::end(kScenarios));
  std::erase_if(scenarios, [](const Scenario& s) { return s.has_plain_renames && !soak_is_asked(); });
  scenarios.push_back({"large pieces to dcp", large / "ck", "dcp", "dp_shard=3", false});
  scenarios.push_back({"large pieces, cold", large / "ck", "dcp", "dp_shard=3", false, false, true});
  for (const Scenario& s : scenarios) {
    const TempDir dir;
    const std::string out = dir / "out", work = dir / "out.partial";
    make_old(s, out);
    arm({});
    const Status healthy = run_scenario(s, out);
    ASSERT_TRUE(healthy) << healthy.error().message();
    const Index calls = calls_made, looked = looks_made;
    const Files expected = files_at(out);
    ASSERT_GT(calls, 40);
    ASSERT_GT(looked, 40);
    for (const auto& [is_look, sticky] : {std::pair(false, false), {false, true}, {true, false}, {true, true}}) {
      const Index total = is_look ? looked : calls;
      // Looks are many, and few of them differ.
      const Index stride = is_look && !soak_is_asked() ? 5 * step : step;
      for (const int error : reasons) {
        if (makes_file(s) && error != EIO) continue;  // its calls were already tried
        for (Index n = 1 + way++ % stride; n <= total; n += stride) {
          make_old(s, out);
          arm({n, sticky, error, is_look});
          const Status status = run_scenario(s, out);
          const std::vector<Call> hit = failed;
          arm({});
          ++runs;
          std::string what = s.name + (is_look ? ", look " : ", call ") + std::to_string(n) + " of " +
                             std::to_string(total) + ": " +
                             (hit.empty() ? "none" : kCallNames[static_cast<int>(hit.front())]) +
                             (sticky ? " and all after it fail with " : " fails with ") + std::strerror(error);
          if (!status) what += "\n" + status.error().message();
          SCOPED_TRACE(what);
          if (status) {
            ++survived;
            // A failed direct read falls back to the page cache, and a failed short read is repeated when its bytes are
            // needed.
            const bool has_another_way = !sticky && hit.front() == Call::kPread;
            if (!has_another_way) ++survivors[kCallNames[static_cast<int>(hit.front())]];
            ASSERT_TRUE(files_at(out) == expected);
            ASSERT_FALSE(fs::exists(work));
            continue;
          }
          ++errors;
          ASSERT_EQ(status.error().code(), ErrorCode::kIo);
          ASSERT_THAT(status.error().message(), testing::HasSubstr(std::strerror(error)));
          ASSERT_THAT(status.error().message(), testing::AnyOf(testing::HasSubstr("/"), testing::HasSubstr(s.source)));
          // Cleanup makes calls that a permanent fault fails too, and a single fault may hit the cleanup itself. The
          // replaced checkpoint, the files next to a single output file, and the publishing directory are removed after
          // the new checkpoint is in place.
          const bool says_complete = status.error().message().find("complete") != std::string::npos;
          const bool says_left = status.error().message().find("could not be removed") != std::string::npos;
          const bool cleaning = sticky || is_look || hit.front() == Call::kUnlink || hit.front() == Call::kRmdir ||
                                hit.front() == Call::kReaddir ||
                                (says_complete && (s.replaces || makes_file(s) || says_left));
          if (says_complete) {
            ASSERT_TRUE(cleaning);
            ASSERT_TRUE(files_at(out) == expected);
          } else if (s.replaces) {
            ASSERT_EQ(files_at(out), makes_file(s) ? kOldFile : kOldDirectory);
          } else {
            ASSERT_FALSE(fs::exists(out));
          }
          ASSERT_TRUE(cleaning || !(fs::exists(work) || fs::exists(out + ".publishing")));
          // The next run succeeds. If nothing was left behind it equals the first run, so it is repeated only for some
          // of those.
          if (says_complete) {
            fs::remove_all(out);
            if (s.replaces) make_old(s, out);
          }
          if (status.error().message().find("The finished output is at " + work) != std::string::npos)
            fs::remove_all(work);
          if (!says_complete && !fs::exists(work) && n % 10 != 0) continue;
          const Status again = run_scenario(s, out);
          ASSERT_TRUE(again) << again.error().message();
          ASSERT_TRUE(files_at(out) == expected);
          ASSERT_FALSE(fs::exists(work) || fs::exists(out + ".publishing"));
        }
      }
    }
  }
  std::string text;
  for (const auto& [call, count] : survivors) text += " " + call + " " + std::to_string(count);
  std::printf("%lld runs: %lld errors, %lld went well without the call:%s\n", static_cast<long long>(runs),
              static_cast<long long>(errors), static_cast<long long>(survived), text.c_str());
  // The only calls whose failure may be survived. readdir: a format that would not have recognised the path lists it.
  // link: a plain rename is tried.
  for (const auto& [call, count] : survivors)
    EXPECT_THAT(call, testing::AnyOf("close", "open", "pwrite", "fstat", "fstatat", "unlink", "readdir", "link"))
        << count;
}

TEST_F(FaultTest, InterruptionsAndShortTransfersAreNoErrors) {
  interruptions = short_transfers = 0;
  for (const Scenario& s : kScenarios) {
    const TempDir dir;
    make_old(s, dir / "expected");
    ASSERT_TRUE(run_scenario(s, dir / "expected"));
    for (int round = 0; round < (in_soak() ? 20 : 1); ++round) {  // each call is cut short at another position
      make_old(s, dir / "out");
      nagging = true;
      const Status status = run_scenario(s, dir / "out");
      nagging = false;
      ASSERT_TRUE(status) << status.error().message();
      EXPECT_EQ(files_at(dir / "out"), files_at(dir / "expected")) << s.name;
    }
  }
  std::printf("%lld interrupted calls, %lld short ones\n", static_cast<long long>(interruptions),
              static_cast<long long>(short_transfers));
  EXPECT_GT(interruptions, 500);
  EXPECT_GT(short_transfers, 500);
}

TEST_F(FaultTest, FileSystemsWithoutReservationAreNoError) {
  const TempDir usual;
  ASSERT_TRUE(run_scenario(kScenarios[1], usual / "out"));
  const Files expected = files_at(usual / "out");
  for (const int error : {EOPNOTSUPP, EINVAL, ENOSYS}) {
    static int code;
    code = error;
    Syscalls calls = faulty();
    calls.fallocate = [](int, int, off_t, off_t) { return errno = code, -1; };
    const ScopedSyscalls scoped(calls);
    const TempDir dir;
    const Status status = run_scenario(kScenarios[1], dir / "out");
    ASSERT_TRUE(status) << status.error().message();
    EXPECT_TRUE(files_at(dir / "out") == expected);
  }
}

// If one read of headers fails, at any call, the next attempt succeeds.
TEST_F(FaultTest, WhatCouldNotBeLocatedIsLocatedLater) {
  const std::string path = sample("fsdp4_tp2") + "/checkpoint";
  auto healthy = open_with(kDcpFormat, path);
  ASSERT_TRUE(healthy);
  std::vector<std::size_t> all((*healthy)->catalog().tensors().size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  const auto expected = load_values(**healthy);
  ASSERT_TRUE(expected);
  int failures = 0;
  for (Index n = 1;; n += 13) {
    auto reader = open_with(kDcpFormat, path);
    ASSERT_TRUE(reader);
    arm({n, false, EIO});
    const Status located = (*reader)->locate(all, 1, ".");
    const bool was_reached = !failed.empty();
    arm({});
    if (!was_reached) break;
    failures += located ? 0 : 1;
    const auto values = load_values(**reader);
    ASSERT_TRUE(values) << "call " << n << ": " << values.error().message();
    ASSERT_EQ(*values, *expected);
  }
  EXPECT_GT(failures, 10);
}

// ---- the real thing

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
  Files expected;
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
    OpenCheckpoint open = std::move(*open_checkpoint(source));
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

// ---- metadata: every byte changed, every length

// The content of a located catalog, separated into facts that no reader can check and the others.
struct Seen {
  // Facts that are recorded only once: names of tensors and objects, their paths in the state_dict, shapes of empty
  // tensors.
  std::string names;
  std::string contents;  // everything else
};
Seen seen(const Catalog& catalog) {
  Seen out;
  const auto number = [&](Index n) { out.contents += std::to_string(n) + " "; };
  const auto extent = [&](const Extent& e) {
    out.contents += catalog.files[e.file].path + " ";
    number(e.offset);
    number(e.length);
  };
  const auto path = [&](const KeyPath& keys) {
    for (const auto& key : keys)
      out.names += (key.index() == 0 ? "'" + std::get<0>(key) + "'" : std::to_string(std::get<1>(key))) + ".";
    out.names += "\n";
  };
  // Sorted by their positions in the files, because names may have changed.
  std::map<std::string, Seen> sorted;
  for (const Tensor& t : catalog.tensors()) {
    out = {};
    out.names = t.name + " ";
    path(t.path);
    out.contents = std::string(info(t.dtype).torch_name);
    // A tensor without elements has no data in the files that could contradict its shape.
    (t.elements() == 0 ? out.names : out.contents) += to_string(t.shape);
    std::set<std::string> fragments;
    for (const FragmentList* list : {&t.fragments, &t.replicas})
      for (std::size_t i = 0; i < list->size(); ++i) {
        const Fragment f = list->get(i);
        if (f.box.empty()) continue;
        const std::string before = std::exchange(out.contents, "");
        out.contents = to_string(f.box) + to_string(f.strides) + (f.crc ? std::to_string(*f.crc) : "-");
        extent(f.extent);
        number(f.start);
        fragments.insert(out.contents);
        out.contents = before;
      }
    for (const std::string& f : fragments) out.contents += f + "\n";
    sorted[out.contents + out.names] = out;
  }
  for (const Blob& b : catalog.blobs) {
    out = {};
    out.names = b.name + " ";
    path(b.path);
    extent(b.extent);
    sorted[out.contents + out.names] = out;
  }
  Seen all;
  for (const auto& [key, s] : sorted) {
    all.names += s.names;
    all.contents += s.contents + "\n";
  }
  return all;
}

// Opens a checkpoint and reads everything but the payloads of its tensors.
Result<Seen> open_whole(const std::string& path, const std::string& spool) {
  const auto reader = TRY(open_with(kDcpFormat, path));
  std::vector<std::size_t> all(reader->catalog().tensors().size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  TRY(reader->locate(all, 1, spool));
  TRY(validate(reader->catalog()));
  for (const Blob& blob : reader->catalog().blobs) TRY(reader->blob_bytes(blob));
  return seen(reader->catalog());
}

TEST(Metadata, EveryChangedByteIsAnErrorOrHarmlessOrAName) {
  for (const std::string name : {"ck1", "ck2"}) {
    const TempDir dir;
    fs::copy(std::string(RESHARD_TEST_DATA) + "/dcp_small/" + name, dir / "ck", fs::copy_options::recursive);
    const std::string path = dir / "ck/.metadata", healthy = read_file(path);
    const auto expected = open_whole(dir / "ck", dir.path());
    ASSERT_TRUE(expected) << expected.error().message();
    int errors = 0, harmless = 0, names = 0;
    const auto check = [&](const std::string& bytes, const std::string& what) {
      fs::remove(path);  // overwriting a file costs a flush on some file systems
      write_file(path, bytes);
      const auto got = open_whole(dir / "ck", dir.path());
      if (!got) {
        ++errors;
        const ErrorCode code = got.error().code();
        EXPECT_TRUE(code == ErrorCode::kCorrupt || code == ErrorCode::kUnsupported || code == ErrorCode::kIo)
            << what << ": " << static_cast<int>(code) << " " << got.error().message();
        EXPECT_THAT(got.error().message(), testing::HasSubstr(dir / "ck")) << what;
        return;
      }
      EXPECT_TRUE(got->contents == expected->contents) << name << " " << what << "\n" << got->contents;
      ++(got->names == expected->names ? harmless : names);
    };
    const auto step = static_cast<std::size_t>(every_nth(25));
    for (std::size_t i = 0; i < healthy.size(); i += step) {
      for (const int flip : {0x01, 0x80, 0xff}) {
        std::string bytes = healthy;
        bytes[i] = static_cast<char>(bytes[i] ^ flip);
        check(bytes, "byte " + std::to_string(i) + " ^ " + std::to_string(flip));
      }
    }
    const int harmless_flips = harmless, name_flips = names;
    for (std::size_t n = 0; n < healthy.size(); n += step) check(healthy.substr(0, n), "cut at " + std::to_string(n));
    EXPECT_EQ(harmless, harmless_flips);  // bytes after a pickle's end are ignored
    EXPECT_EQ(names, name_flips);
    std::printf("%s: %d errors, %d harmless, %d other names\n", name.c_str(), errors, harmless, names);
  }
}

}  // namespace
}  // namespace reshard::fault_test
