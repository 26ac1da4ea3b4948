#include "lib/checkpoint/fragment_index.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/support/layouts.h"

namespace reshard::fragment_index_test {
namespace {

FragmentList list_of(int rank, const std::vector<Box>& boxes) {
  FragmentList out(rank);
  for (const Box& box : boxes) {
    Fragment f;
    f.box = box;
    f.strides = row_major_strides(box.shape);
    out.add(f);
  }
  return out;
}

std::map<std::size_t, Box> found(const FragmentList& list, const Box& box) {
  const FragmentIndex index(list);
  std::map<std::size_t, Box> out;
  index.overlapping(
      box, [&](std::size_t i, const Box& both) { EXPECT_TRUE(out.emplace(i, both).second) << "visited twice"; });
  return out;
}

TEST(FragmentIndex, FindsWhatLookingAtAllOfThemFinds) {
  Rng rng(21);
  for (int n = 0; n < 1000; ++n) {
    const Dims shape = random_shape(rng);
    std::vector<Box> boxes;  // any boxes: they may overlap, and some are empty
    for (Index i = below(rng, 30); i > 0; --i) {
      boxes.push_back(random_box(rng, shape));
      if (shape.rank() > 0 && below(rng, 8) == 0) boxes.back().shape[static_cast<int>(below(rng, shape.rank()))] = 0;
    }
    const FragmentList list = list_of(shape.rank(), boxes);
    for (int k = 0; k < 5; ++k) {
      const Box box = random_box(rng, shape);
      std::map<std::size_t, Box> expected;
      for (std::size_t i = 0; i < boxes.size(); ++i)
        if (const Box both = intersect(boxes[i], box); !both.empty()) expected.emplace(i, both);
      ASSERT_EQ(found(list, box), expected) << to_string(shape) << " " << to_string(box);
    }
  }
}

TEST(FragmentIndex, VisitsInOrderOfRows) {
  const FragmentList list = list_of(1, {{{8}, {4}}, {{0}, {4}}, {{12}, {0}}, {{4}, {4}}});
  std::vector<std::size_t> order;
  FragmentIndex(list).overlapping({{2}, {8}}, [&](std::size_t i, const Box&) { order.push_back(i); });
  EXPECT_EQ(order, (std::vector<std::size_t>{1, 3, 0}));
}

TEST(FragmentIndex, FindsAScalar) {
  EXPECT_EQ(found(list_of(0, {Box{}}), Box{}).size(), 1u);
  EXPECT_EQ(found(list_of(0, {}), Box{}).size(), 0u);
}

TEST(FragmentIndex, SeesTheLongOneBehindTheShortOnes) {
  // The first fragment by row reaches the furthest.
  const FragmentList list = list_of(2, {{{0, 0}, {100, 1}}, {{1, 1}, {1, 1}}, {{2, 1}, {1, 1}}});
  EXPECT_EQ(found(list, {{90, 0}, {1, 2}}).size(), 1u);
}

TEST(FragmentIndex, IsSharedByListsOfEqualBoxes) {
  const std::vector<Box> halves = {{{0, 0}, {4, 8}}, {{4, 0}, {4, 8}}}, columns = {{{0, 0}, {8, 4}}, {{0, 4}, {8, 4}}};
  const FragmentList a = list_of(2, halves), b = list_of(2, halves), c = list_of(2, columns);
  SharedIndexes indexes;
  const auto of_a = indexes.of(a), of_c = indexes.of(c);
  EXPECT_EQ(indexes.of(b), of_a);
  EXPECT_NE(of_c, of_a);
  // Only the most recent kinds are cached, and indexes that were given out stay valid.
  std::vector<FragmentList> others;
  for (Index i = 1; i <= 16; ++i) others.push_back(list_of(1, {{{0}, {i}}}));
  for (const FragmentList& list : others) indexes.of(list);
  EXPECT_NE(indexes.of(b), of_a);
  std::size_t met = 0;
  of_c->overlapping({{0, 0}, {8, 4}}, [&](std::size_t i, const Box&) { met += i == 0; });
  EXPECT_EQ(met, 1u);
  EXPECT_EQ(indexes.of(others.back()), indexes.of(list_of(1, {{{0}, {16}}})));
}

}  // namespace
}  // namespace reshard::fragment_index_test
