#include "lib/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <new>

namespace reshard {
namespace {

TEST(ParallelFor, CallsForEachOnce) {
  for (const int threads : {1, 2, 7}) {
    std::vector<std::atomic<int>> calls(100);
    ASSERT_TRUE(parallel_for(100, threads, [&](int thread, Index i) -> Status {
      EXPECT_LT(thread, threads);
      ++calls[static_cast<std::size_t>(i)];
      return {};
    }));
    for (const auto& n : calls) EXPECT_EQ(n, 1);
  }
}

TEST(ParallelFor, StopsAtAnError) {
  const Status failed = parallel_for(1'000'000, 3, [](int, Index i) -> Status {
    if (i == 5) return corrupt("five");
    return {};
  });
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message(), "five");
}

TEST(ParallelFor, NoMemoryIsAnError) {
  const Status failed = parallel_for(100, 3, [](int, Index i) -> Status {
    if (i == 7) throw std::bad_alloc();
    return {};
  });
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code(), ErrorCode::kIo);
  EXPECT_EQ(failed.error().message(), "out of memory");
}

}  // namespace
}  // namespace reshard
