// Tests conversions when system calls fail or fall short: every call of a scenario fails in turn. After an error the
// destination and its work directory do not exist, and the next run gives the usual bytes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>

#include "formats/dcp/dcp.h"
#include "formats/open.h"
#include "lib/base/syscalls.h"
#include "lib/convert/conversion.h"
#include "tests/support/checkpoints.h"
#include "tests/support/power_loss.h"
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

}  // namespace
}  // namespace reshard::fault_test
