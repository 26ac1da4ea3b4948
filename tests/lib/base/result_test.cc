#include "lib/base/result.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace reshard::result_test {
namespace {

Result<int> half(int n) {
  if (n % 2 != 0) return corrupt(std::to_string(n) + " is odd");
  return n / 2;
}

Result<int> quarter(int n) {
  const int h = TRY(half(n));
  return TRY(half(h).context("second half"));
}

Status check_even(int n) {
  TRY(half(n));
  return {};
}

TEST(Result, HoldsAValueOrAnError) {
  EXPECT_EQ(*half(6), 3);
  EXPECT_TRUE(half(6).has_value());
  const Result<int> odd = half(7);
  ASSERT_FALSE(odd);
  EXPECT_EQ(odd.error().code(), ErrorCode::kCorrupt);
  EXPECT_EQ(odd.error().message(), "7 is odd");
}

TEST(Result, TryHandsTheErrorToTheCaller) {
  EXPECT_EQ(*quarter(12), 3);
  EXPECT_EQ(quarter(3).error().message(), "3 is odd");
  EXPECT_EQ(quarter(6).error().message(), "second half: 3 is odd");
}

TEST(Result, ContextPutsTheOutermostClauseFirst) {
  const Error e = corrupt("3 is odd").context("inner").context("outer");
  EXPECT_EQ(e.message(), "outer: inner: 3 is odd");
}

TEST(Result, ContextLeavesAValueAlone) { EXPECT_EQ(*half(6).context("never seen"), 3); }

TEST(Status, IsFineByDefault) {
  EXPECT_TRUE(Status().has_value());
  EXPECT_TRUE(check_even(4).context("never seen").has_value());
  EXPECT_EQ(check_even(5).context("check").error().message(), "check: 5 is odd");
}

TEST(Result, ALoopKeepsTheValueThatItGoesThrough) {
  auto make = []() -> Result<std::vector<std::string>> {
    return std::vector<std::string>{std::string(40, 'a'), std::string(40, 'b')};
  };
  std::string all;
  for (const std::string& s : *make()) all += s;
  for (const std::string& s : make().value()) all += s;
  EXPECT_EQ(all, std::string(40, 'a') + std::string(40, 'b') + std::string(40, 'a') + std::string(40, 'b'));
}

TEST(Result, MovesWhatCannotBeCopied) {
  auto make = []() -> Result<std::unique_ptr<int>> { return std::make_unique<int>(5); };
  auto use = [&]() -> Result<int> {
    const std::unique_ptr<int> p = TRY(make());
    return *p;
  };
  EXPECT_EQ(*use(), 5);
}

TEST(ErrorCode, IsTheExitCode) {
  EXPECT_EQ(static_cast<int>(usage_error("").code()), 2);
  EXPECT_EQ(static_cast<int>(corrupt("").code()), 3);
  EXPECT_EQ(static_cast<int>(unsupported("").code()), 4);
  EXPECT_EQ(static_cast<int>(io_error("").code()), 5);
  EXPECT_EQ(static_cast<int>(internal_error("").code()), 70);
}

}  // namespace
}  // namespace reshard::result_test
