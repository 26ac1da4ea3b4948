#include "lib/plan/fragment_grid.h"

#include <gtest/gtest.h>

#include "tests/support/layouts.h"

namespace reshard {
namespace {

FragmentList list_of(int rank, const std::vector<Box>& boxes) {
  FragmentList out(rank);
  for (const Box& box : boxes) out.add(box, {0, 0, 0});
  return out;
}

TEST(FragmentGrid, NamesTheFragmentOfEachCell) {
  // Two rows of three columns, in no order, and an empty box.
  const auto grid = FragmentGrid::find(list_of(2, {{{4, 2}, {4, 3}},
                                                   {{0, 0}, {4, 2}},
                                                   {{0, 5}, {4, 4}},
                                                   {{8, 0}, {0, 9}},
                                                   {{4, 5}, {4, 4}},
                                                   {{0, 2}, {4, 3}},
                                                   {{4, 0}, {4, 2}}}),
                                       {8, 9});
  ASSERT_TRUE(grid);
  ASSERT_EQ(grid->dims.size(), 2u);
  EXPECT_EQ(grid->dims[0].size(), 2u);
  EXPECT_EQ(grid->dims[0][1].begin, 4);
  EXPECT_EQ(grid->dims[0][1].end, 8);
  EXPECT_EQ(grid->dims[0][1].add, 3);
  EXPECT_EQ(grid->dims[1].size(), 3u);
  EXPECT_EQ(grid->dims[1][2].begin, 5);
  EXPECT_EQ(grid->dims[1][2].end, 9);
  EXPECT_EQ(grid->dims[1][2].add, 2);
  EXPECT_EQ(grid->fragment, (std::vector<std::uint32_t>{1, 5, 2, 6, 0, 4}));
}

TEST(FragmentGrid, IsNoneWhereBoxesDoNotLineUp) {
  EXPECT_FALSE(FragmentGrid::find(list_of(2, {{{0, 0}, {4, 4}}, {{0, 4}, {4, 4}}, {{4, 0}, {4, 8}}}), {8, 8}));
  // A wheel around the middle.
  EXPECT_FALSE(FragmentGrid::find(
      list_of(2, {{{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{1, 0}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 1}, {1, 1}}}), {3, 3}));
}

TEST(FragmentGrid, OfAScalarAndOfOneBox) {
  const auto scalar = FragmentGrid::find(list_of(0, {Box{}}), {});
  ASSERT_TRUE(scalar);
  EXPECT_TRUE(scalar->dims.empty());
  EXPECT_EQ(scalar->fragment, std::vector<std::uint32_t>{0});
  const auto one = FragmentGrid::find(list_of(3, {whole({2, 3, 4})}), {2, 3, 4});
  ASSERT_TRUE(one);
  EXPECT_EQ(one->fragment.size(), 1u);
}

TEST(FragmentGrid, IsWhatAnyMeshLeavesBehind) {
  Rng rng(53);
  for (int n = 0; n < 300; ++n) {
    const Dims shape = random_shape(rng);
    if (volume(shape) == 0) continue;
    const Mesh mesh = random_mesh(rng);
    const Placement placement = random_placement(rng, mesh, shape);
    std::vector<Box> boxes;
    for (Index rank = 0; rank < mesh.ranks(); ++rank)
      if (is_first_replica(mesh, placement, rank))
        if (const auto box = owned(mesh, placement, shape, rank)) boxes.push_back(*box);
    const auto grid = FragmentGrid::find(list_of(shape.rank(), boxes), shape);
    ASSERT_TRUE(grid) << "case " << n;
    for (std::size_t cell = 0; cell < grid->fragment.size(); ++cell) {
      Index number = 0;
      for (int d = 0; d < shape.rank(); ++d)
        for (const Cut& cut : grid->dims[static_cast<std::size_t>(d)])
          if (cut.begin == boxes[grid->fragment[cell]].begin(d)) number += cut.add;
      ASSERT_EQ(number, static_cast<Index>(cell));
    }
  }
}

}  // namespace
}  // namespace reshard
