#include "formats/colossalai/rank_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "formats/colossalai/colossalai.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::colossalai {
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

// Made by tests/data/colossalai_ranks/make.py: two tensor-parallel ranks, each with two of ZeRO's parts.
TEST(RankFiles, JoinIntoTheTensorsThatWereCut) {
  const std::string data = RESHARD_TEST_DATA "/colossalai_ranks/";
  ASSERT_TRUE(kColossalaiFormat.recognises(data + "ranks"));
  EXPECT_EQ(load_checkpoint(data + "ranks"), load_checkpoint(data + "full.safetensors"));
}

TEST(RankFiles, APartThatIsMissingIsSaid) {
  TempDir dir;
  for (const auto& [name, bytes] : all_files(RESHARD_TEST_DATA "/colossalai_ranks/ranks"))
    if (name != "global_meta.bin") dir.write(name, bytes);
  const auto without = [&](const std::string& global) {
    dir.write("global_meta.bin", read_file(RESHARD_TEST_DATA "/colossalai_ranks/" + global));
    const auto reader = kColossalaiFormat.open(dir.path(), {});
    return reader ? "accepted" : reader.error().message();
  };
  EXPECT_THAT(without("without_tp1.bin"), testing::HasSubstr("expected the parts of 2 tensor-parallel ranks, got 1"));
  EXPECT_THAT(without("without_dp1.bin"), testing::HasSubstr("the files of a rank are missing"));
}

}  // namespace
}  // namespace reshard::colossalai
