#include "lib/base/checked.h"

#include <gtest/gtest.h>

#include <random>

namespace reshard::checked_test {
namespace {

constexpr Index kMax = INT64_MAX;
using Wide = __int128;

// Returns numbers of every magnitude, including the ends of the range.
Index any_number(std::mt19937_64& rng) {
  switch (rng() % 8) {
    case 0:
      return kMax - static_cast<Index>(rng() % 4);
    case 1:
      return INT64_MIN + static_cast<Index>(rng() % 4);
    case 2:
      return static_cast<Index>(rng() % 5) - 2;
    default:
      return static_cast<Index>(rng()) >> (rng() % 64);
  }
}

bool representable(Wide v) { return v >= INT64_MIN && v <= kMax; }

TEST(Checked, AgreesWith128BitArithmetic) {
  std::mt19937_64 rng(1);
  for (int i = 0; i < 100'000; ++i) {
    const Index a = any_number(rng), b = any_number(rng);
    const Wide sum = static_cast<Wide>(a) + b, product = static_cast<Wide>(a) * b;
    ASSERT_EQ(checked_add(a, b).has_value(), representable(sum)) << a << " + " << b;
    if (representable(sum)) {
      ASSERT_EQ(static_cast<Wide>(*checked_add(a, b)), sum);
    }
    ASSERT_EQ(checked_mul(a, b).has_value(), representable(product)) << a << " * " << b;
    if (representable(product)) {
      ASSERT_EQ(static_cast<Wide>(*checked_mul(a, b)), product);
    }
  }
}

TEST(Checked, FitsInsideAgreesWith128BitArithmetic) {
  std::mt19937_64 rng(2);
  for (int i = 0; i < 100'000; ++i) {
    const Index offset = any_number(rng), length = any_number(rng), size = any_number(rng);
    const bool inside = offset >= 0 && length >= 0 && static_cast<Wide>(offset) + length <= size;
    ASSERT_EQ(fits_inside(offset, length, size), inside) << offset << " + " << length << " in " << size;
  }
}

TEST(Checked, RoundsUpToTheNextMultiple) {
  EXPECT_EQ(checked_round_up(0, 64), 0);
  EXPECT_EQ(checked_round_up(1, 64), 64);
  EXPECT_EQ(checked_round_up(64, 64), 64);
  EXPECT_EQ(checked_round_up(65, 64), 128);
  EXPECT_EQ(checked_round_up(kMax, 1), kMax);
  EXPECT_EQ(checked_round_up(kMax, 64), std::nullopt);
}

TEST(Checked, CeilDivDoesNotOverflowAtTheTop) {
  EXPECT_EQ(ceil_div(0, 4), 0);
  EXPECT_EQ(ceil_div(5, 4), 2);
  EXPECT_EQ(ceil_div(8, 4), 2);
  EXPECT_EQ(ceil_div(kMax, 1), kMax);
  EXPECT_EQ(ceil_div(kMax, 2), Index{1} << 62);
}

TEST(Checked, UnsignedNumbersAboveInt64AreRefused) {
  EXPECT_EQ(to_index(0), 0);
  EXPECT_EQ(to_index(static_cast<std::uint64_t>(kMax)), kMax);
  EXPECT_EQ(to_index(static_cast<std::uint64_t>(kMax) + 1), std::nullopt);
  EXPECT_EQ(to_index(UINT64_MAX), std::nullopt);
}

}  // namespace
}  // namespace reshard::checked_test
