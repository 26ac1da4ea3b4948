// Tests that one cause gives one finding: if the mesh or the config is not the checkpoint's, verify reports that and
// not its consequences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::causes_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> findings_of(const Json& report) {
  std::vector<std::string> out;
  const auto findings = *report.get_array("findings");
  for (const Json& f : findings) out.emplace_back(*f.get_string("id"));
  return out;
}

Json report_of(const std::vector<std::string>& arguments) {
  const CommandResult r = reshard_cli(arguments, {"--json"});
  auto parsed = parse_json(r.out, "out");
  EXPECT_TRUE(parsed) << r.err;
  return parsed ? *std::move(parsed) : Json();
}

// A skipped check reports no tensors checked and no findings.
void expect_skipped_are_empty(const Json& report) {
  const auto checks = *report.get_array("checks");
  for (const Json& check : checks)
    if (!check.find("skipped")->is_null()) {
      EXPECT_EQ(*check.get_index("looked_at"), 0) << *check.get_string("id");
      EXPECT_EQ(*check.get_index("findings"), 0) << *check.get_string("id");
    }
}

class WrongMesh : public testing::TestWithParam<const char*> {};

TEST_P(WrongMesh, IsOneFindingAndNoRankDied) {
  for (const char* mesh : {"tp=12", "dp_shard=20", "dp_shard=3", "pp=4", "dp_shard=2,tp=16", "pp=2,dp_shard=10"}) {
    const Json report = report_of({"verify", sample(GetParam()) + "/checkpoint", "--mesh", mesh});
    const std::vector<std::string> ids = findings_of(report);
    EXPECT_EQ(ids.size(), 1U) << mesh << testing::PrintToString(ids);
    EXPECT_THAT(ids, testing::Each(testing::Ne("ranks-silent"))) << mesh;
    expect_skipped_are_empty(report);
  }
}

INSTANTIATE_TEST_SUITE_P(Causes, WrongMesh,
                         testing::Values("tp8", "fsdp16", "hsdp2x4", "fsdp4_tp2", "pp2_tp4", "single",
                                         "fsdp2_tp2_optim"),
                         [](const auto& param) { return param.param; });

// The finding lists each size on which all tensors agree, and nothing else. Layers, words and dtypes come from another
// model too.
TEST(Causes, AnotherModelsConfigIsOneFinding) {
  const std::string configs = RESHARD_TEST_DATA "/configs/";
  for (const auto& [model, other, says] :
       {std::tuple("qwen2-7b", "qwen2.5-0.5b", "hidden_size 896, and 219 tensors of the checkpoint have 3,584"),
        std::tuple("llama-2-7b", "llama-3.1-70b", "intermediate_size 28,672, and 96 tensors of the checkpoint have"),
        std::tuple("llama-3.1-70b", "llama-2-7b", "hidden_size 4,096, and ")}) {
    const TempDir dir;
    const CommandResult made =
        reshard_cli({"synth", dir / "ck", "--config", configs + model + ".json", "--to", "hf", "--headers-only", "-q"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
    const Json report = report_of({"verify", dir / "ck", "--config", configs + other + ".json"});
    EXPECT_THAT(findings_of(report), ElementsAre("config-other")) << model << other;
    EXPECT_THAT(to_text(report), HasSubstr(says));
    EXPECT_THAT(to_text(report), HasSubstr("this explains "));
    expect_skipped_are_empty(report);
    EXPECT_EQ(findings_of(report_of({"verify", dir / "ck", "--config", configs + model + ".json"})).size(), 0U);
  }
}

// A width that is a multiple of the tensors' looks like a cut of each of them.
TEST(Causes, AConfigOfTwiceTheWidthIsOneFinding) {
  const TempDir dir;
  std::string config = read_file(sample("tp8") + "/config.json");
  config.replace(config.find("\"hidden_size\": 64"), 17, "\"hidden_size\": 128");
  dir.write("config.json", config);
  const Json report = report_of({"verify", sample("tp8") + "/checkpoint", "--config", dir / "config.json"});
  EXPECT_THAT(findings_of(report), ElementsAre("config-other"));
  EXPECT_THAT(to_text(report), HasSubstr("hidden_size 128, and "));
}

// Only one size differs, as between models of equal width. A tensor that is also broken is still reported.
TEST(Causes, WhatTheConfigDoesNotExplainIsReported) {
  const TempDir dir;
  const std::string config = read_file(RESHARD_TEST_DATA "/configs/llama-3.1-8b.json");
  std::string other = config;
  other.replace(other.find("14336"), 5, "11008");
  dir.write("config.json", config);
  dir.write("other.json", other);
  const auto made = reshard_cli({"synth", dir / "ck", "--config", dir / "config.json", "--to", "hf", "--headers-only",
                                 "--shape", "model.layers.3.self_attn.o_proj.weight=4000x4000", "-q"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const Json report = report_of({"verify", dir / "ck", "--config", dir / "other.json"});
  EXPECT_THAT(to_text(report), HasSubstr("intermediate_size 11,008, and 96 tensors of the checkpoint have 14,336"));
  EXPECT_THAT(findings_of(report), ElementsAre("config-other", "shape-other"));
}

}  // namespace
}  // namespace reshard::causes_test
