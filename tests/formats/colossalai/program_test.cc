// Tests the program on ColossalAI's pipeline stages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "tests/support/checkpoints.h"
#include "tests/support/expect_run.h"
#include "tests/support/temp_dir.h"

namespace reshard::colossalai_program_test {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(ColossalaiByProgram, StagesFollowItsOwnRule) {
  const TempDir dir;
  expect_success(convert_quietly(sample_checkpoint("tp8"), dir / "c", {"--to", "colossalai", "--mesh", "pp=3"}));
  EXPECT_THAT(names_in(dir / "c"),
              ElementsAre("config.json", "model-stage-00001-shard-00001.safetensors",
                          "model-stage-00002-shard-00001.safetensors", "model-stage-00003-shard-00001.safetensors",
                          "model.safetensors.index.json", "reshard_manifest.json"));
  // With 4 layers on 3 stages, the middle stage has two.
  const TensorValues middle = load_checkpoint(dir / "c/model-stage-00002-shard-00001.safetensors");
  EXPECT_TRUE(middle.contains("model.layers.1.input_layernorm.weight"));
  EXPECT_TRUE(middle.contains("model.layers.2.input_layernorm.weight"));
  EXPECT_EQ(middle.size(), 18u);
  expect_refusal(convert_quietly(sample_checkpoint("tp8"), dir / "d", {"--to", "colossalai", "--mesh", "tp=2"}), 4,
                 HasSubstr("hold whole tensors, which its loader cuts"));
  EXPECT_FALSE(fs::exists(dir / "d"));
}

}  // namespace
}  // namespace reshard::colossalai_program_test
