#include "formats/colossalai/names.h"

#include <gtest/gtest.h>

namespace reshard::colossalai::names_test {
namespace {

TEST(ColossalaiNames, TakesShardsApart) {
  const auto plain = parse_shard_name("pytorch_model-00002.bin");
  ASSERT_TRUE(plain);
  EXPECT_EQ(plain->part, Part::kModel);
  EXPECT_EQ(plain->stage, 0);
  EXPECT_EQ(plain->shard, 2);
  const auto staged = parse_shard_name("optimizer-stage-00003-shard-00001.safetensors");
  ASSERT_TRUE(staged);
  EXPECT_EQ(staged->part, Part::kOptimizer);
  EXPECT_EQ(staged->stage, 3);
  const auto experts = parse_shard_name("pytorch_optim.run-stage-00001-00004-shard-00002.bin");
  ASSERT_TRUE(experts);
  EXPECT_EQ(experts->stage, 1);
  EXPECT_EQ(experts->expert, 4);
  EXPECT_EQ(experts->shard, 2);
  for (const char* other : {"model-00001-of-00002.safetensors", "pytorch_model.bin", "model-1.safetensors",
                            "pytorch_model-00001.safetensors", "model-stage-1-shard-00001.safetensors",
                            "pytorch_model-shard-00001.bin", "models-00001.safetensors", ""})
    EXPECT_FALSE(parse_shard_name(other)) << other;
}

TEST(ColossalaiNames, TakesIndexesApart) {
  EXPECT_EQ(parse_index_name("model.safetensors.index.json")->part, Part::kModel);
  EXPECT_EQ(parse_index_name("pytorch_optim.bin.index.actor.json")->part, Part::kOptimizer);
  EXPECT_EQ(parse_index_name("pytorch_model.bin.index-stage-00002.json")->stage, 2);
  EXPECT_EQ(parse_index_name("pytorch_model.bin.index-stage-00002-00001.json")->expert, 1);
  EXPECT_FALSE(parse_index_name("model.safetensors.json"));
  EXPECT_FALSE(parse_index_name("model.safetensors.index-stage-2.json"));
}

}  // namespace
}  // namespace reshard::colossalai::names_test
