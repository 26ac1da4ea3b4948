#include "lib/base/sandbox.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/temp_dir.h"

namespace reshard::sandbox_test {
namespace {

namespace fs = std::filesystem;

constexpr int kNoFiles = 100, kNoCalls = 101;  // exit codes: this kernel lacks Landlock, or seccomp

// Returns the result of `work` in a process that is confined to `sandbox`.
int within(const Sandbox& sandbox, const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    const Sandboxed held = *enter_sandbox(sandbox);
    if (!held.files) ::_exit(kNoFiles);
    if (!held.calls) ::_exit(kNoCalls);
    ::_exit(work());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Returns the errno of opening a path, or 0 on success.
int opens(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
  if (fd < 0) return errno;
  ::close(fd);
  return 0;
}

class SandboxTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"source", "out", "beside"}) fs::create_directory(dir_ / name);
    for (const char* name : {"source/data", "beside/data"}) std::ofstream(dir_ / name) << "12345678";
    fs::create_symlink("../beside/data", dir_ / "source/link");
    fs::create_symlink("../beside/other", dir_ / "source/allowed");
    std::ofstream(dir_ / "beside/other") << "12345678";
    sandbox_ = {.listed = {}, .read = {dir_ / "source", dir_ / "source/allowed"}, .written = {dir_ / "out"}};
  }
  // Expects the result of `work`.
  void expect(int expected, const std::function<int()>& work) const {
    const int got = within(sandbox_, work);
    if (got == kNoFiles || got == kNoCalls) GTEST_SKIP() << "this kernel has no Landlock or no seccomp";
    EXPECT_EQ(got, expected);
  }

  TempDir dir_;
  Sandbox sandbox_;
};

TEST_F(SandboxTest, OpensNothingElse) {
  expect(EACCES, [] { return opens("/etc/passwd", O_RDONLY); });
  expect(EACCES, [&] { return opens(dir_ / "beside/data", O_RDONLY); });
  expect(EACCES, [&] { return opens(dir_ / "source/link", O_RDONLY); });
}

TEST_F(SandboxTest, ReadsTheSourceAndCannotChangeIt) {
  expect(0, [&] { return opens(dir_ / "source/data", O_RDONLY); });
  expect(0, [&] { return opens(dir_ / "source", O_RDONLY | O_DIRECTORY); });
  expect(0, [&] { return opens(dir_ / "source/allowed", O_RDONLY); });
  expect(EACCES, [&] { return opens(dir_ / "source/data", O_RDWR); });
  expect(EACCES, [&] { return opens(dir_ / "source/new", O_WRONLY | O_CREAT); });
  expect(EACCES, [&] { return ::unlink((dir_ / "source/data").c_str()) == 0 ? 0 : errno; });
  expect(EACCES, [&] { return ::truncate((dir_ / "source/data").c_str(), 0) == 0 ? 0 : errno; });
}

TEST_F(SandboxTest, WritesTheOutput) {
  expect(0, [&] {
    const fs::path work = dir_ / "out/model.partial";
    if (::mkdir(work.c_str(), 0700) != 0) return errno;
    if (const int failed = opens(work / "data", O_RDWR | O_CREAT | O_EXCL)) return failed;
    if (::rename(work.c_str(), (dir_ / "out/model").c_str()) != 0) return errno;
    return opens(dir_ / "out/model/data", O_RDONLY);
  });
}

// Tests each claim of docs/security.md about calls that fail.
TEST_F(SandboxTest, RefusesEveryCallThatTheDocumentNames) {
  const std::string beside = dir_ / "beside/data";
  struct Attempt {
    const char* what;
    std::function<long()> call;
  };
  const auto clone_with = [](unsigned long flags) {
    return [flags] {
      const long child = ::syscall(SYS_clone, flags | SIGCHLD, nullptr, nullptr, nullptr, nullptr);
      if (child == 0) ::_exit(0);
      return child;
    };
  };
  const std::vector<Attempt> attempts = {
      {"socket", [] { return ::socket(AF_INET, SOCK_STREAM, 0); }},
      {"a Unix socket", [] { return ::socket(AF_UNIX, SOCK_STREAM, 0); }},
      {"socketpair",
       [] {
         int pair[2];
         return ::socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
       }},
      {"a program", [] { return ::execl("/bin/true", "true", nullptr); }},
      {"clone into a user namespace", clone_with(CLONE_NEWUSER)},
      {"clone into a mount namespace", clone_with(CLONE_NEWNS)},
      {"clone into a network namespace", clone_with(CLONE_NEWNET)},
      {"clone into a process namespace", clone_with(CLONE_NEWPID)},
      {"unshare", [] { return ::unshare(CLONE_NEWUSER); }},
      {"setns", [] { return ::syscall(SYS_setns, -1, 0); }},
      {"mount", [] { return ::syscall(SYS_mount, "none", "/", "tmpfs", 0, nullptr); }},
      {"umount", [] { return ::syscall(SYS_umount2, "/nothing", 0); }},
      {"open_tree", [] { return ::syscall(428, AT_FDCWD, "/", 1); }},
      {"fsopen", [] { return ::syscall(430, "tmpfs", 0); }},
      {"fsconfig", [] { return ::syscall(431, -1, 0, nullptr, nullptr, 0); }},
      {"fsmount", [] { return ::syscall(432, -1, 0, 0); }},
      {"fspick", [] { return ::syscall(433, AT_FDCWD, "/", 0); }},
      {"mount_setattr", [] { return ::syscall(442, AT_FDCWD, "/nothing", 0, nullptr, 0); }},
      {"pidfd_open", [] { return ::syscall(434, ::getppid(), 0); }},
      {"pidfd_getfd", [] { return ::syscall(438, -1, 0, 0); }},
      {"process_vm_readv", [] { return ::syscall(SYS_process_vm_readv, ::getppid(), nullptr, 0, nullptr, 0, 0); }},
      {"process_madvise", [] { return ::syscall(440, -1, nullptr, 0, 0, 0); }},
      {"chmod", [&] { return ::chmod(beside.c_str(), 0600); }},
      {"chown", [&] { return ::chown(beside.c_str(), 0, 0); }},
      {"utimes", [&] { return ::utimes(beside.c_str(), nullptr); }},
      {"setxattr", [&] { return ::setxattr(beside.c_str(), "user.x", "1", 1, 0); }},
      {"syslog", [] { return ::syscall(SYS_syslog, 3, nullptr, 0); }},
      {"another process's limits",
       [] {
         rlimit limit{};
         return ::syscall(SYS_prlimit64, ::getppid(), RLIMIT_NOFILE, nullptr, &limit);
       }},
      {"io_uring", [] { return ::syscall(425, 1, nullptr); }},
      {"bpf", [] { return ::syscall(SYS_bpf, 0, nullptr, 0); }},
      {"perf_event_open", [] { return ::syscall(SYS_perf_event_open, nullptr, 0, -1, -1, 0); }},
      {"keyctl", [] { return ::syscall(SYS_keyctl, 0, 0, 0, 0, 0); }},
      {"userfaultfd", [] { return ::syscall(SYS_userfaultfd, 0); }},
      {"a kernel module", [] { return ::syscall(SYS_init_module, nullptr, 0, ""); }},
      {"reboot", [] { return ::syscall(SYS_reboot, 0, 0, 0, nullptr); }},
      {"a handle to a file", [] { return ::syscall(SYS_open_by_handle_at, -1, nullptr, 0); }},
      {"typing into the terminal",
       [] {
         char c = 'x';
         return ::ioctl(0, TIOCSTI, &c);
       }},
  };
  for (const Attempt& attempt : attempts) {
    SCOPED_TRACE(attempt.what);
    expect(EPERM, [&] { return attempt.call() < 0 ? errno : 0; });
  }
}

TEST_F(SandboxTest, AnswersCallsThatItDoesNotKnowAsAnOlderKernelWould) {
  expect(ENOSYS,
         [] { return ::syscall(435, nullptr, 0) < 0 ? errno : 0; });  // clone3: the C library falls back on clone
  expect(ENOSYS, [] { return ::syscall(1000) < 0 ? errno : 0; });
}

TEST_F(SandboxTest, HoldsForThreadsAndTheirProcesses) {
  expect(EACCES, [] {
    int found = 0;
    std::thread([&] { found = opens("/etc/passwd", O_RDONLY); }).join();
    return found;
  });
  expect(EACCES, [] {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(opens("/etc/passwd", O_RDONLY));
    int status = 0;
    ::waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  });
}

}  // namespace
}  // namespace reshard::sandbox_test
