// Tests the program on vLLM's shards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/expect_run.h"
#include "tests/support/temp_dir.h"

namespace reshard::vllm_program_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// 257 tokens, which vLLM pads to 320 before it cuts them; a mesh alone does not describe that.
TEST(VllmByProgram, WorkersVerifyCleanOnTheirMesh) {
  const TempDir dir;
  for (const std::string mesh : {"tp=2", "pp=3,tp=2"}) {
    const std::string out = dir / mesh;
    expect_success(convert_quietly(sample_checkpoint("tp8"), out, {"--to", "vllm", "--mesh", mesh}));
    expect_success(reshard_cli({"verify", out, "--mesh", mesh, "--config", sample("tp8") + "/config.json"}));
    EXPECT_EQ(reshard_cli({"verify", out, "--mesh", "tp=4"}).exit_code, 1);
  }
}

TEST(VllmByProgram, NeedsTheConfigsHeads) {
  const TempDir dir;
  expect_success(convert_quietly(sample_checkpoint("tp8"), dir / "hf", {"--to", "hf"}));
  fs::remove(dir / "hf/config.json");
  expect_refusal(convert_quietly(dir / "hf", dir / "v", {"--to", "vllm", "--mesh", "tp=2"}), 2,
                 HasSubstr("needs the model's config.json"));
  expect_success(convert_quietly(dir / "hf", dir / "v",
                                 {"--to", "vllm", "--mesh", "tp=2", "--config", sample("tp8") + "/config.json"}));
}

// The output can be opened. With --family none the config is copied only if it is given.
TEST(VllmByProgram, OfNoFamilyNeedsTheConfigNamed) {
  const TempDir dir;
  const std::string config = sample("tp8") + "/config.json";
  expect_success(convert_quietly(sample_checkpoint("tp8"), dir / "hf", {"--to", "hf"}));
  for (const std::string to : {"vllm", "vllm-0.13"}) {
    expect_refusal(convert_quietly(dir / "hf", dir / "v", {"--to", to, "--family", "none"}), 2,
                   HasSubstr("needs the model's config.json"));
    EXPECT_FALSE(fs::exists(dir / "v"));
    expect_success(convert_quietly(dir / "hf", dir / to, {"--to", to, "--family", "none", "--config", config}));
    EXPECT_EQ(manifest_digests(dir / to), manifest_digests(dir / "hf"));
  }
}

TEST(VllmByProgram, ShardsThatAreMadeUpAreThoseOfTheModel) {
  const TempDir dir;
  expect_success(reshard_cli({"synth", dir / "hf", "--model", "llama3-tiny", "--to", "hf", "-q"}));
  expect_success(reshard_cli({"convert", dir / "hf", dir / "shards", "--to", "vllm", "--mesh", "tp=2", "-q"}));
  expect_success(
      reshard_cli({"synth", dir / "made-up", "--model", "llama3-tiny", "--to", "vllm", "--mesh", "tp=2", "-q"}));
  expect_success(reshard_cli({"verify", dir / "made-up", "--against", dir / "shards", "-q"}));
}

}  // namespace
}  // namespace reshard::vllm_program_test
