#include "formats/colossalai/rank_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/colossalai/colossalai.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::colossalai::rank_files_test {
namespace {

// Made by tests/data/colossalai_ranks/make.py: two tensor-parallel ranks, each with two of ZeRO's parts.
TEST(RankFiles, JoinIntoTheTensorsThatWereCut) {
  const std::string data = RESHARD_TEST_DATA "/colossalai_ranks/";
  ASSERT_TRUE(recognises(kColossalaiFormat, data + "ranks"));
  EXPECT_EQ(load_checkpoint(data + "ranks"), load_checkpoint(data + "full.safetensors"));
}

TEST(RankFiles, APartThatIsMissingIsSaid) {
  TempDir dir;
  for (const auto& [name, bytes] : all_files(RESHARD_TEST_DATA "/colossalai_ranks/ranks"))
    if (name != "global_meta.bin") dir.write(name, bytes);
  const auto without = [&](const std::string& global) {
    dir.write("global_meta.bin", read_file(RESHARD_TEST_DATA "/colossalai_ranks/" + global));
    const auto reader = open_with(kColossalaiFormat, dir.path(), {});
    return reader ? "accepted" : reader.error().message();
  };
  EXPECT_THAT(without("without_tp1.bin"), testing::HasSubstr("expected the parts of 2 tensor-parallel ranks, got 1"));
  EXPECT_THAT(without("without_dp1.bin"), testing::HasSubstr("the files of a rank are missing"));
}

}  // namespace
}  // namespace reshard::colossalai::rank_files_test
