#include "lib/base/find_function.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/temp_dir.h"

namespace reshard::find_function_test {
namespace {

TEST(OpenLibrary, OpensTheFirstThatIsThere) {
  EXPECT_TRUE(open_library({"libnone.so.1", RESHARD_FAKE_CUFILE}, "it is not installed"));
  const auto none = open_library({"libnone.so.1", "libnone.so.2"}, "it is not installed");
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(none.error().message(), testing::StartsWith("it is not installed: libnone.so.1: cannot open shared "));
}

// Ends this process with 0 if a library that cannot be mapped is called missing by nobody.
[[noreturn]] void open_without_memory(const std::string& library) {
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t now = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
  const rlimit limit{now, now};
  ::setrlimit(RLIMIT_AS, &limit);
  const auto opened = open_library({library.c_str()}, "it is not installed");
  ::_exit(!opened && opened.error().code() == ErrorCode::kIo ? 0 : 1);
}

TEST(OpenLibrary, ALackOfMemoryIsNotAMissingLibrary) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer cannot run in a limited address space";
#endif
  const TempDir dir;  // another test may have opened the library itself
  std::filesystem::copy_file(RESHARD_FAKE_CUFILE, dir / "lib.so");
  EXPECT_EXIT(open_without_memory(dir / "lib.so"), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace reshard::find_function_test
