#include "lib/base/sandbox.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;

constexpr int kNoFiles = 100, kNoCalls = 101;  // this kernel does not have them

// The value of `work` in a process that has given up all but `sandbox`.
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

// errno of opening it, 0 where that succeeds.
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
  // Expects what `work` gives.
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

TEST_F(SandboxTest, HasNoSocketsAndRunsNothing) {
  expect(EPERM, [] { return ::socket(AF_INET, SOCK_STREAM, 0) < 0 ? errno : 0; });
  expect(EPERM, [] { return ::socket(AF_UNIX, SOCK_STREAM, 0) < 0 ? errno : 0; });
  expect(EPERM, [] {
    ::execl("/bin/true", "true", nullptr);
    return errno;
  });
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
}  // namespace reshard
