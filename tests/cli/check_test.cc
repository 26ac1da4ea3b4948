// Tests the exact output of reshard check (tests/support/golden.h), its exit codes, JSON and JUnit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "tests/support/golden.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::check_test {
namespace {

using testing::HasSubstr;
using testing::Not;

const std::string kConfigs = RESHARD_TEST_DATA "/configs/";

CommandResult check(const std::string& config, std::vector<std::string> options) {
  std::vector<std::string> args = {RESHARD_BINARY, "check", "--config", config};
  args.insert(args.end(), options.begin(), options.end());
  return run_command(args);
}

std::string stable(std::string text) { return without(without_times(std::move(text)), kConfigs); }

std::string text_of(const std::string& path) { return read_whole_file(path, 1 << 20).value(); }

struct Golden {
  const char* name;
  const char* model;
  std::vector<std::string> options;
  int exit_code;
};

class CheckGolden : public testing::TestWithParam<Golden> {};

TEST_P(CheckGolden, SaysThis) {
  const Golden& g = GetParam();
  const CommandResult r = check(kConfigs + g.model + ".json", g.options);
  EXPECT_EQ(r.exit_code, g.exit_code) << r.err;
  EXPECT_EQ(r.err, "");
  expect_golden(std::string("check_") + g.name + ".txt", stable(r.out));
}

INSTANTIATE_TEST_SUITE_P(
    Cli, CheckGolden,
    testing::Values(Golden{"fits",
                           "llama-3.1-405b",
                           {"--mesh", "pp=16,cp=16,dp=8,tp=8", "--world", "16384", "--sequence", "131072"},
                           0},
                    Golden{"world_size", "llama-3.1-405b", {"--mesh", "pp=16,cp=16,dp=4,tp=8", "--world", "16384"}, 1},
                    Golden{"no_world_fits", "llama-3.1-8b", {"--mesh", "tp=8,pp=3", "--world", "1000"}, 1},
                    Golden{"kv_heads", "llama-3.1-8b", {"--mesh", "tp=16", "--world", "16"}, 1},
                    Golden{"uneven_tp", "mixtral-8x7b-v0.1", {"--mesh", "tp=3"}, 1},
                    Golden{"vocabulary", "gpt2", {"--mesh", "tp=4"}, 1},
                    Golden{"fused_sections", "gpt2", {"--mesh", "tp=8"}, 1},
                    Golden{"stages", "gpt2", {"--mesh", "pp=20"}, 1},
                    Golden{"uneven_stages", "llama-3.1-8b", {"--mesh", "pp=5,dp_shard=2"}, 0},
                    Golden{"experts", "mixtral-8x7b-v0.1", {"--mesh", "dp=64,ep=6"}, 1},
                    Golden{
                        "expert_memory", "deepseek-v3", {"--mesh", "pp=21,dp=16,ep=64,tp=4", "--dtype", "bfloat16"}, 0},
                    Golden{"empty_shards", "mixtral-8x7b-v0.1", {"--mesh", "dp=64"}, 0},
                    Golden{"sequence", "llama-3.1-8b", {"--mesh", "cp=4", "--sequence", "8196"}, 1},
                    Golden{"tensors", "gpt2", {"--mesh", "tp=1", "--tensors"}, 0}),
    [](const auto& param) { return std::string(param.param.name); });

TEST(Check, FailOnDecidesTheExitCode) {
  const std::string config = kConfigs + "gpt2.json";  // tp=4: a warning
  EXPECT_EQ(check(config, {"--mesh", "tp=4"}).exit_code, 1);
  EXPECT_EQ(check(config, {"--mesh", "tp=4", "--fail-on", "warning"}).exit_code, 1);
  EXPECT_EQ(check(config, {"--mesh", "tp=4", "--fail-on", "error"}).exit_code, 0);
  EXPECT_EQ(check(config, {"--mesh", "tp=8", "--fail-on", "error"}).exit_code, 1);
  EXPECT_EQ(check(config, {"--mesh", "pp=5", "--fail-on", "warning"}).exit_code, 0);
  EXPECT_EQ(check(config, {"--mesh", "tp=4", "--fail-on", "everything"}).exit_code, 2);
}

TEST(Check, JsonHoldsWhatTheTextShows) {
  const CommandResult r =
      check(kConfigs + "llama-3.1-405b.json", {"--mesh", "pp=16,cp=16,dp=4,tp=8", "--world", "16384", "--json"});
  EXPECT_EQ(r.exit_code, 1);
  const Json json = *parse_json(r.out, "out");
  EXPECT_EQ(*json.get_index("parameters"), 405'853'388'800);
  EXPECT_EQ(*json.get_index("mesh_ranks"), 8192);
  EXPECT_EQ(*json.get_index("world"), 16384);
  EXPECT_EQ(*json.get_string("dp_taken_as"), "dp_shard");
  EXPECT_EQ(*json.find("mesh")->get_index("dp_shard"), 4);
  EXPECT_FALSE(*json.get_bool("ok"));
  const auto findings = *json.get_array("findings");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(*findings[0].get_string("id"), "world-size");
  EXPECT_EQ(*findings[0].get_string("severity"), "error");
  EXPECT_THAT(std::string(*findings[0].get_string("advice")), HasSubstr("dp_shard=8"));
  EXPECT_EQ(*json.find("ranks")->find("largest")->get_index("parameters"), 49'811'456);
  EXPECT_EQ(json.find("ranks")->get_array("stages")->size(), 16u);
  EXPECT_EQ(json.find("tensors"), nullptr);
}

TEST(Check, TensorsAreListedWhereTheyAreAskedFor) {
  const CommandResult r = check(kConfigs + "gpt2.json", {"--mesh", "tp=1", "--json", "--tensors"});
  EXPECT_EQ(r.exit_code, 0);
  const Json json = *parse_json(r.out, "out");
  const auto tensors = *json.get_array("tensors");
  ASSERT_EQ(tensors.size(), 149u);
  EXPECT_EQ(*tensors[0].get_string("name"), "wte.weight");
  EXPECT_EQ(*tensors[0].get_string("dtype"), "float32");
  EXPECT_EQ(to_text(*tensors[0].find("shape")), "[50257,768]");
  Index tied = 0;
  for (const Json& t : tensors) tied += *t.get_bool("tied") ? 1 : 0;
  EXPECT_EQ(tied, 1);
}

TEST(Check, JunitHasACaseForEachCheck) {
  const TempDir dir;
  const CommandResult bad =
      check(kConfigs + "gpt2.json", {"--mesh", "tp=8", "--junit", dir / "bad.xml", "--fail-on", "error"});
  EXPECT_EQ(bad.exit_code, 1);
  expect_golden("check_junit_bad.xml", stable(text_of(dir / "bad.xml")));
  const CommandResult good = check(kConfigs + "gpt2.json", {"--mesh", "tp=1", "--junit", dir / "good.xml"});
  EXPECT_EQ(good.exit_code, 0);
  expect_golden("check_junit_good.xml", stable(text_of(dir / "good.xml")));
}

TEST(Check, JunitEscapesWhatXmlForbids) {
  const TempDir dir;
  const std::string config = dir.write("a&b<c>\"d\x01\xff.json", text_of(kConfigs + "gpt2.json"));
  const CommandResult r = check(config, {"--mesh", "tp=1", "--junit", dir / "out.xml"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  const std::string xml = text_of(dir / "out.xml");
  EXPECT_THAT(xml, HasSubstr("a&amp;b&lt;c&gt;&quot;d\\x01\\xff.json"));
  EXPECT_THAT(xml, Not(HasSubstr("\x01")));
  EXPECT_TRUE(is_utf8(xml));
  EXPECT_EQ(check(config, {"--mesh", "tp=1", "--json"}).exit_code, 0);
}

TEST(Check, WhatMakesNoSenseIsSaid) {
  const TempDir dir;
  const std::string gpt2 = kConfigs + "gpt2.json";
  const auto expect = [](const CommandResult& r, int code, const std::string& message) {
    EXPECT_EQ(r.exit_code, code) << r.out;
    EXPECT_THAT(r.err, HasSubstr(message));
    EXPECT_EQ(r.out, "");
  };
  expect(check(gpt2, {"--mesh", "xp=2"}), 2, "expected axis=size");
  expect(check(gpt2, {"--mesh", "tp=2", "--dtype", "int8"}), 2, "unknown dtype 'int8'; choose one of: float32");
  expect(check(gpt2, {"--mesh", "tp=2", "--family", "none"}), 2, "--family none");
  expect(check(dir.write("c.json", R"({"model_type": "mamba", "hidden_size": 8, "num_attention_heads": 1,
                 "num_hidden_layers": 1, "vocab_size": 8})"),
               {"--mesh", "tp=2"}),
         4, "model_type 'mamba'");
  expect(check(dir / "absent.json", {"--mesh", "tp=2"}), 5, "absent.json");
  EXPECT_EQ(check(gpt2, {"--mesh", "tp=2", "--world", "0"}).exit_code, 2);
  EXPECT_EQ(check(gpt2, {}).exit_code, 2);
  const CommandResult r = check(gpt2, {"--mesh", "tp=1", "--junit", dir / "none/out.xml"});
  EXPECT_EQ(r.exit_code, 5);
  EXPECT_THAT(r.err, HasSubstr("cannot create"));
}

// Skipped checks count nothing as checked. Stages that one framework distributes unevenly are not called even.
TEST(Check, SkippedChecksLookAtNothingAndTitlesHold) {
  const CommandResult r =
      reshard_cli({"check", "--config", RESHARD_TEST_DATA "/configs/llama-3.1-8b.json", "--mesh", "pp=4", "--json"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  const Json json = *parse_json(r.out, "out");
  const auto checks = *json.get_array("checks");
  std::set<std::string> skipped;
  for (const Json& check : checks) {
    if (*check.get_string("id") == "stages") {
      EXPECT_EQ(*check.get_string("title"), "every pipeline stage has layers, and stages of equal work are possible");
    }
    if (check.find("skipped")->is_null()) continue;
    skipped.emplace(*check.get_string("id"));
    EXPECT_EQ(*check.get_index("looked_at"), 0) << *check.get_string("id");
  }
  EXPECT_EQ(skipped, (std::set<std::string>{"world-size", "experts", "sequence"}));
  std::vector<Index> layers;
  const auto stages = *json.find("ranks")->get_array("stages");
  for (const Json& stage : stages) layers.push_back(*stage.get_index("layers"));
  EXPECT_EQ(layers, (std::vector<Index>{8, 9, 8, 7}));
  EXPECT_THAT(reshard_cli({"check", "--config", RESHARD_TEST_DATA "/configs/llama-3.1-8b.json", "--mesh", "pp=4"}).out,
              testing::ContainsRegex("Layers are assigned to stages as +in torchtitan"));
}

// Without a checkpoint there are no names to recognise.
TEST(Check, OffersNoNamesOfASource) {
  const CommandResult r = check(kConfigs + "llama-3.1-8b.json", {"--mesh", "tp=2", "--source-names", "maxtext"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, HasSubstr("--source-names"));
}

}  // namespace
}  // namespace reshard::check_test
