#include "lib/base/syscalls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace reshard::syscalls_test {
namespace {

TEST(Syscalls, AreReplacedOnlyWhileTheScopeLives) {
  auto* const real = sys().unlink;
  {
    Syscalls replaced = sys();
    replaced.unlink = [](const char*) {
      errno = EROFS;
      return -1;
    };
    const ScopedSyscalls scope(replaced);
    EXPECT_EQ(sys().unlink("/nonexistent/reshard"), -1);
    EXPECT_EQ(errno, EROFS);
    {
      Syscalls inner = sys();
      inner.unlink = [](const char*) { return 0; };
      const ScopedSyscalls inner_scope(inner);
      EXPECT_EQ(sys().unlink("/nonexistent/reshard"), 0);
    }
    EXPECT_EQ(sys().unlink("/nonexistent/reshard"), -1);
  }
  EXPECT_EQ(sys().unlink, real);
}

TEST(Syscalls, EveryEntryIsFilled) {
  using Call = void (*)();
  std::array<Call, sizeof(Syscalls) / sizeof(Call)> entries{};
  std::memcpy(entries.data(), &sys(), sizeof entries);
  EXPECT_EQ(std::count(entries.begin(), entries.end(), nullptr), 0);
}

}  // namespace
}  // namespace reshard::syscalls_test
