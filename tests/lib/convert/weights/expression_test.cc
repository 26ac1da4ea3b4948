// Compares expressions of a merge with the same arithmetic by hand, element by element and step by step.
#include "lib/convert/weights/expression.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace reshard::expression_test {
namespace {

using testing::HasSubstr;

const std::vector<std::string> kAb = {"a", "b"}, kAbc = {"a", "b", "c"};

template <class Float>
std::vector<Float> evaluated(const std::string& text, const std::vector<std::vector<Float>>& inputs) {
  const std::vector<std::string> names(kAbc.begin(), kAbc.begin() + std::ssize(inputs));
  const auto expression = Expression::parse(text, names);
  EXPECT_TRUE(expression) << expression.error().message();
  std::vector<const Float*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data());
  std::vector<Float> out(inputs[0].size());
  if (expression) expression->evaluate(std::span(std::as_const(pointers)), std::ssize(out), out.data());
  return out;
}

// Returns more than a block of elements, of any size and sign.
template <class Float>
std::vector<Float> values(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Float> out(2500);
  for (Float& v : out)
    v = static_cast<Float>(
        std::ldexp(std::uniform_real_distribution<>(-1, 1)(random), static_cast<int>(random() % 40) - 20));
  return out;
}

template <class Float, class ByHand>
void expect_bits(const std::string& text, ByHand by_hand) {
  const auto a = values<Float>(1), b = values<Float>(2), c = values<Float>(3);
  const auto got = evaluated<Float>(text, {a, b, c});
  for (std::size_t i = 0; i < got.size(); ++i) {
    const volatile Float expected = by_hand(a[i], b[i], c[i]);
    ASSERT_EQ(got[i], expected) << text << " of " << a[i] << ", " << b[i] << ", " << c[i];
  }
}

// Rounds each step to the elements' precision; the compiler must not fuse steps.
template <class Float>
Float step(Float value) {
  volatile Float out = value;
  return out;
}

template <class Float>
void all_forms() {
  expect_bits<Float>("a + b + c", [](Float a, Float b, Float c) { return step(step(a + b) + c); });
  expect_bits<Float>("a - (b - c)", [](Float a, Float b, Float c) { return step(a - step(b - c)); });
  expect_bits<Float>("a - b*c", [](Float a, Float b, Float c) { return step(a - step(b * c)); });
  expect_bits<Float>("-a*b/c", [](Float a, Float b, Float c) { return step(step(-a * b) / c); });
  expect_bits<Float>("c + 0.7*(a - b)",
                     [](Float a, Float b, Float c) { return step(c + step(static_cast<Float>(0.7) * step(a - b))); });
  expect_bits<Float>("(a + b + c)/3", [](Float a, Float b, Float c) { return step(step(step(a + b) + c) / 3); });
  expect_bits<Float>("1 - a/2 + (3 - 0.1)*b + c*0", [](Float a, Float b, Float c) {
    return step(step(step(1 - step(a / 2)) + step(static_cast<Float>(3 - 0.1) * b)) + step(c * 0));
  });
  expect_bits<Float>("2/a - -b + c", [](Float a, Float b, Float c) { return step(step(step(2 / a) - -b) + c); });
}

TEST(Expression, ReckonsStepByStepInTheOrderWritten) {
  all_forms<float>();
  all_forms<double>();
}

TEST(Expression, OfWeightsMeansAndMovingAverages) {
  EXPECT_EQ(weighted_sum(kAbc, {"0.5", "0.3", "0.2"}), "0.5*a + 0.3*b + 0.2*c");
  EXPECT_EQ(weighted_sum(kAb, {"1", "-0.5"}), "1*a + -0.5*b");
  EXPECT_EQ(mean_of(kAbc), "(a + b + c)/3");
  EXPECT_EQ(moving_average(kAbc, "0.9"), "0.9*(0.9*a + (1 - 0.9)*b) + (1 - 0.9)*c");
  const std::vector<float> a = {1, 3}, b = {5, -1};
  EXPECT_EQ(evaluated<float>(weighted_sum(kAb, {"1", "-0.5"}), {a, b}), (std::vector<float>{-1.5, 3.5}));
  EXPECT_EQ(evaluated<float>(mean_of(kAb), {a, b}), (std::vector<float>{3, 1}));
  EXPECT_EQ(evaluated<float>(moving_average(kAb, "0.5"), {a, b}), (std::vector<float>{3, 1}));
}

TEST(Expression, SaysWhereItIsWrong) {
  const auto error = [](const std::string& text) {
    const auto parsed = Expression::parse(text, kAb);
    return parsed ? std::string("fine") : parsed.error().message();
  };
  EXPECT_THAT(error("a + "), HasSubstr("expected a number, a source or '(' at character 5, got the end"));
  EXPECT_THAT(error("a + x*b"), HasSubstr("expected one of the sources a, b at character 5, got 'x*b'"));
  EXPECT_THAT(error("(a + b"), HasSubstr("expected ')' at character 7, got the end"));
  EXPECT_THAT(error("a b"), HasSubstr("expected an operator or the end at character 3, got 'b'"));
  EXPECT_THAT(error("a + nan*b"), HasSubstr("got 'nan*b'"));
  EXPECT_THAT(error("a + 1e999*b"), HasSubstr("expected a number"));
  EXPECT_THAT(error("a + b*(1/0)"), HasSubstr("infinite or NaN"));
  EXPECT_THAT(error("a + b/0"), HasSubstr("divides by zero"));
  EXPECT_THAT(error("a + b/1e-50"), HasSubstr("divides by zero"));  // in float32
  EXPECT_THAT(error("a + 1e39*b"), HasSubstr("exceeds the range of float32"));
  EXPECT_THAT(error("a + 2"), HasSubstr("source 'b' is not used in"));
  EXPECT_THAT(error("1 + 2"), HasSubstr("contains no source"));
  EXPECT_THAT(error(""), HasSubstr("got the end"));
  EXPECT_THAT(error(std::string(100'000, '(')), HasSubstr("nested too deeply"));
  EXPECT_THAT(error(std::string(100'000, '-') + "a"), HasSubstr("nested too deeply"));
  std::string deep = "b";
  for (int i = 0; i < 100; ++i) deep = "a + (" + deep + ")";
  EXPECT_THAT(error(deep), HasSubstr("nested too deeply"));
}

}  // namespace
}  // namespace reshard::expression_test
