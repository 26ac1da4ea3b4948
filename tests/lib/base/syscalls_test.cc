#include "lib/base/syscalls.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace reshard {
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
  const Syscalls& s = sys();
  EXPECT_TRUE(s.open && s.close && s.fstat && s.pread && s.pwrite && s.fallocate && s.ftruncate && s.fdatasync &&
              s.fsync && s.mkdir && s.rename && s.unlink && s.rmdir);
}

}  // namespace
}  // namespace reshard
