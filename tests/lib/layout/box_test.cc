#include "lib/layout/box.h"

#include <gtest/gtest.h>

#include <random>

namespace reshard::box_test {
namespace {

TEST(Dims, CompareByTheirOwnRankOnly) {
  EXPECT_EQ(Dims({1, 2}), Dims({1, 2}));
  EXPECT_FALSE(Dims({1, 2}) == Dims({1, 2, 0}));
  EXPECT_LT(Dims({1, 2}), Dims({1, 3}));
  EXPECT_LT(Dims({1}), Dims({1, 0}));
  EXPECT_EQ(Dims::filled(3, 7), Dims({7, 7, 7}));
  Dims d;
  d.push_back(4);
  EXPECT_EQ(d, Dims({4}));
}

TEST(Dims, VolumeOfNoDimensionsIsOne) {
  EXPECT_EQ(volume(Dims{}), 1);
  EXPECT_EQ(volume(Dims{3, 0, 5}), 0);
  EXPECT_EQ(volume(Dims{3, 4, 5}), 60);
}

TEST(Dims, CheckedVolumeRefusesWhatOverflows) {
  EXPECT_EQ(checked_volume({3, 4}), 12);
  EXPECT_EQ(checked_volume({}), 1);
  EXPECT_EQ(checked_volume({3, -1}), std::nullopt);
  EXPECT_EQ(checked_volume({Index{1} << 32, Index{1} << 31}), std::nullopt);
  EXPECT_EQ(checked_volume({INT64_MAX}), INT64_MAX);
  EXPECT_EQ(checked_volume({0, INT64_MAX}), 0);
  EXPECT_EQ(checked_volume({0, INT64_MAX, 2}), std::nullopt) << "the strides would overflow";
}

TEST(Dims, RowMajorStridesCountFromTheLast) {
  EXPECT_EQ(row_major_strides({2, 3, 4}), Dims({12, 4, 1}));
  EXPECT_EQ(row_major_strides({7}), Dims({1}));
  EXPECT_EQ(row_major_strides({}), Dims());
}

TEST(Box, PrintsHalfOpenIntervals) {
  EXPECT_EQ(to_string(Box{{512, 0}, {512, 2048}}), "[512:1024, 0:2048]");
  EXPECT_EQ(to_string(Box{}), "[]");
  EXPECT_EQ(to_string(Dims{128256, 2048}), "[128256, 2048]");
}

TEST(Box, IsEmptyWhenSomeExtentIs) {
  EXPECT_TRUE((Box{{0, 0}, {3, 0}}).empty());
  EXPECT_FALSE((Box{{0, 0}, {3, 1}}).empty());
  EXPECT_FALSE(Box{}.empty()) << "a scalar has one element";
}

TEST(Box, IntersectionAndContainmentAgreeWithPoints) {
  std::mt19937 rng(4);
  for (int i = 0; i < 5000; ++i) {
    const int rank = static_cast<int>(rng() % 3) + 1;
    Box a{Dims::filled(rank, 0), Dims::filled(rank, 0)}, b = a;
    for (int d = 0; d < rank; ++d) {
      a.origin[d] = rng() % 5, a.shape[d] = rng() % 5;
      b.origin[d] = rng() % 5, b.shape[d] = rng() % 5;
    }
    const auto inside = [rank](const Box& box, const Dims& p) {
      for (int d = 0; d < rank; ++d)
        if (p[d] < box.begin(d) || p[d] >= box.end(d)) return false;
      return true;
    };
    const Box both = intersect(a, b);
    Index common = 0, in_b = 0;
    for (Index n = 0; n < 1000; ++n) {
      const Dims all{n % 10, n / 10 % 10, n / 100};
      if (rank < 3 && all[2] != 0) continue;
      if (rank < 2 && all[1] != 0) continue;
      const Dims p(all.span().first(static_cast<std::size_t>(rank)));
      common += inside(a, p) && inside(b, p);
      in_b += inside(b, p);
      ASSERT_EQ(inside(both, p), inside(a, p) && inside(b, p));
    }
    ASSERT_EQ(volume(both), common);
    ASSERT_EQ(both.empty(), common == 0);
    if (in_b > 0) {
      ASSERT_EQ(contains(a, b), common == in_b) << to_string(a) << " " << to_string(b);
    }
  }
}

TEST(Box, ContainmentDoesNotOverflow) {
  constexpr Index kHuge = Index{1} << 62;
  EXPECT_FALSE(contains(whole({10}), Box{{kHuge}, {kHuge}}));
  EXPECT_FALSE(contains(whole({10}), Box{{INT64_MAX}, {INT64_MAX}}));
  EXPECT_FALSE(contains(whole({10}), Box{{-1}, {2}}));
  EXPECT_TRUE(contains(whole({INT64_MAX}), Box{{INT64_MAX - 1}, {1}}));
}

}  // namespace
}  // namespace reshard::box_test
