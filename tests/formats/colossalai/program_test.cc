// Tests the program on ColossalAI's pipeline stages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "tests/support/checkpoints.h"
#include "tests/support/expect_run.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

CommandResult convert(const std::string& from, const std::string& to, const std::vector<std::string>& options) {
  std::vector<std::string> args = {"convert", from, to, "-q"};
  args.insert(args.end(), options.begin(), options.end());
  return reshard_cli(args);
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> out;
  for (const auto& e : fs::directory_iterator(directory)) out.push_back(e.path().filename());
  std::sort(out.begin(), out.end());
  return out;
}

std::string checkpoint(const std::string& name) { return sample(name) + "/checkpoint"; }

TEST(ColossalaiByProgram, StagesFollowItsOwnRule) {
  const TempDir dir;
  expect_success(convert(checkpoint("tp8"), dir / "c", {"--to", "colossalai", "--mesh", "pp=3"}));
  EXPECT_THAT(names_in(dir / "c"),
              ElementsAre("config.json", "model-stage-00001-shard-00001.safetensors",
                          "model-stage-00002-shard-00001.safetensors", "model-stage-00003-shard-00001.safetensors",
                          "model.safetensors.index.json", "reshard_manifest.json"));
  // With 4 layers on 3 stages, the middle stage has two.
  const TensorValues middle = load_checkpoint(dir / "c/model-stage-00002-shard-00001.safetensors");
  EXPECT_TRUE(middle.contains("model.layers.1.input_layernorm.weight"));
  EXPECT_TRUE(middle.contains("model.layers.2.input_layernorm.weight"));
  EXPECT_EQ(middle.size(), 18u);
  expect_refusal(convert(checkpoint("tp8"), dir / "d", {"--to", "colossalai", "--mesh", "tp=2"}), 4,
                 HasSubstr("hold whole tensors, which its loader cuts"));
  EXPECT_FALSE(fs::exists(dir / "d"));
}

}  // namespace
}  // namespace reshard
