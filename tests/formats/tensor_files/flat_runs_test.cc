#include "formats/tensor_files/flat_runs.h"

#include <gtest/gtest.h>

#include <random>

namespace reshard::flat_runs_test {
namespace {

TEST(BoxesOfRun, CoverExactlyTheElementsOfTheRunInOrder) {
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    Dims shape;
    const int rank = 1 + static_cast<int>(random() % 4);
    for (int d = 0; d < rank; ++d) shape.push_back(1 + static_cast<Index>(random() % 4));
    const Index n = volume(shape);
    const Index begin = static_cast<Index>(random() % static_cast<std::uint32_t>(n));
    const Index end = begin + 1 + static_cast<Index>(random() % static_cast<std::uint32_t>(n - begin));
    const std::vector<Box> boxes = boxes_of_run(shape, begin, end);
    EXPECT_LE(boxes.size(), static_cast<std::size_t>(2 * rank - 1));
    const Dims steps = row_major_strides(shape);
    Index next = begin;
    for (const Box& box : boxes) {
      ASSERT_TRUE(contains(whole(shape), box));
      Index first = 0;
      for (int d = 0; d < rank; ++d) first += box.origin[d] * steps[d];
      EXPECT_EQ(first, next);
      next += volume(box);
    }
    EXPECT_EQ(next, end);
  }
}

}  // namespace
}  // namespace reshard::flat_runs_test
