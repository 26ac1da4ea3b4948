#include "lib/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <new>
#include <string>
#include <vector>

namespace reshard::parallel_test {
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

// Any exception on any thread becomes an error.
TEST(ParallelFor, AnExceptionIsAnError) {
  const auto code_of = [](const std::function<void()>& raise) {
    const Status failed = parallel_for(100, 3, [&](int, Index) -> Status {
      raise();
      return {};
    });
    return failed ? ErrorCode::kUsage : failed.error().code();
  };
  EXPECT_EQ(code_of([] { std::string().resize(std::string().max_size() + 1); }), ErrorCode::kIo);
  EXPECT_EQ(code_of([] { std::vector<int>().reserve(std::vector<int>().max_size() + 1); }), ErrorCode::kIo);
  EXPECT_EQ(code_of([] { (void)std::map<int, int>().at(1); }), ErrorCode::kInternal);
  EXPECT_EQ(code_of([] { (void)std::stoi("x"); }), ErrorCode::kInternal);
}

}  // namespace
}  // namespace reshard::parallel_test
