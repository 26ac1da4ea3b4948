#include "lib/base/sys.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace reshard {
namespace {

TEST(SysCalls, AreReplacedOnlyWhileTheScopeLives) {
  auto* const real = sys().unlink;
  {
    SysCalls replaced = sys();
    replaced.unlink = [](const char*) {
      errno = EROFS;
      return -1;
    };
    const ScopedSysCalls scope(replaced);
    EXPECT_EQ(sys().unlink("/nonexistent/reshard"), -1);
    EXPECT_EQ(errno, EROFS);
    {
      SysCalls inner = sys();
      inner.unlink = [](const char*) { return 0; };
      const ScopedSysCalls inner_scope(inner);
      EXPECT_EQ(sys().unlink("/nonexistent/reshard"), 0);
    }
    EXPECT_EQ(sys().unlink("/nonexistent/reshard"), -1);
  }
  EXPECT_EQ(sys().unlink, real);
}

TEST(SysCalls, EveryEntryIsFilled) {
  const SysCalls& s = sys();
  EXPECT_TRUE(s.open && s.close && s.fstat && s.pread && s.pwrite && s.fallocate && s.ftruncate && s.fdatasync &&
              s.fsync && s.mkdir && s.rename && s.unlink && s.rmdir);
}

}  // namespace
}  // namespace reshard
