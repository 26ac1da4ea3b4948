// Tests reshard layout, and convert and plan with --layout: converting with a printed layout gives the same boxes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "formats/open.h"
#include "lib/base/json.h"
#include "lib/layout/descriptor.h"
#include "tests/support/checkpoints.h"
#include "tests/support/expect_run.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::cli_layout_test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

void expect_failure(const std::vector<std::string>& args, int code, const std::string& message) {
  const CommandResult r = reshard_cli(args);
  EXPECT_EQ(r.exit_code, code) << r.out << r.err;
  EXPECT_THAT(r.err, StartsWith("reshard: error: "));
  EXPECT_THAT(r.err, HasSubstr(message));
}

// The boxes of each tensor, without empty ones.
using Boxes = std::map<std::string, std::set<std::pair<Dims, Dims>>>;
Boxes boxes_of(const std::string& path) {
  const auto open = open_checkpoint(path, {});
  EXPECT_TRUE(open.has_value()) << open.error().message();
  Boxes out;
  for (const Tensor& t : open->reader->catalog().tensors())
    for (std::size_t i = 0; i < t.fragments.size(); ++i)
      if (const Box box = t.fragments.box(i); !box.empty()) out[t.name].emplace(box.origin, box.shape);
  return out;
}

class SampleRoundTrips : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Cli, SampleRoundTrips,
                         testing::Values("tp8", "fsdp8", "fsdp16", "hsdp2x4", "fsdp4_tp2", "fsdp2_tp2_optim", "pp2_tp4",
                                         "single"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(SampleRoundTrips, ComeBackFromAnotherMeshByTheirPrintedLayout) {
  const TempDir dir;
  const std::string original = sample_checkpoint(GetParam());
  const CommandResult printed = reshard_cli({"layout", original, "--json"});
  expect_success(printed);
  const std::string layout = dir.write("l.json", printed.out);
  expect_success(reshard_cli({"convert", original, dir / "away", "--to", "dcp", "--mesh", "tp=3,dp_shard=2"}));
  EXPECT_NE(boxes_of(dir / "away"), boxes_of(original));
  expect_success(reshard_cli({"convert", dir / "away", dir / "back", "--to", "dcp", "--layout", layout}));
  EXPECT_EQ(boxes_of(dir / "back"), boxes_of(original));
  EXPECT_EQ(load_checkpoint(dir / "back"), load_checkpoint(original));
  const CommandResult again = reshard_cli({"layout", dir / "back", "--json"});
  expect_success(again);
  const auto one = LayoutDescriptor::parse(printed.out, "one"), two = LayoutDescriptor::parse(again.out, "two");
  EXPECT_EQ(one->tensors, two->tensors);
  EXPECT_EQ(one->pipeline, two->pipeline);
}

TEST(CliLayout, TheBuiltInTorchtitanLayoutIsWhatMeshAloneDoes) {
  const TempDir dir;
  int n = 0;
  for (const char* name : {"fsdp8", "fsdp2_tp2_optim", "pp2_tp4"})
    for (const char* mesh : {"tp=2,dp_shard=2,pp=2", "dp_replicate=2,dp_shard=3", "cp=2,tp=4"}) {
      if (n++ % every_nth(4) != 0) continue;
      const std::string a = dir / (std::string(name) + mesh + "a"), b = dir / (std::string(name) + mesh + "b");
      expect_success(reshard_cli({"convert", sample_checkpoint(name), a, "--to", "dcp", "--mesh", mesh}));
      expect_success(reshard_cli(
          {"convert", sample_checkpoint(name), b, "--to", "dcp", "--layout", "torchtitan-llama", "--mesh", mesh}));
      auto files_a = all_files(a), files_b = all_files(b);
      for (auto* files : {&files_a, &files_b}) files->erase("reshard_manifest.json");
      EXPECT_EQ(files_a, files_b) << name << " on " << mesh;
    }
}

TEST(CliLayout, WholeTensorsGoToOneRankOfTheirStage) {
  const TempDir dir;
  expect_success(reshard_cli({"convert", sample_checkpoint("tp8"), dir / "out", "--to", "dcp", "--layout", "hf"}));
  for (const auto& [name, boxes] : boxes_of(dir / "out")) EXPECT_EQ(boxes.size(), 1u) << name;
  EXPECT_EQ(load_checkpoint(dir / "out"), load_checkpoint(sample_checkpoint("tp8")));
}

TEST(CliLayout, AFusedTensorIsCutSectionBySection) {
  const TempDir dir;
  TensorValues values;
  TensorValue c_attn{DType::kUint8, {8, 24}, ""};
  for (int i = 0; i < 8 * 24; ++i) c_attn.bytes.push_back(static_cast<char>(i));
  values["h.0.attn.c_attn.weight"] = c_attn;
  write_dcp(values, dir / "in", Mesh());
  const std::string layout = dir.write("l.json", R"({"reshard_layout": 1, "name": "gpt2",
      "mesh": [{"axis": "dp_shard", "size": 2}, {"axis": "tp", "size": 2}], "files": "shards",
      "tensors": [{"names": ["*.c_attn.weight"],
                   "splits": [{"axes": ["tp"], "dim": 1, "groups": 3}, {"axes": ["dp_shard"], "dim": 1}]}]})");
  expect_success(
      reshard_cli({"convert", dir / "in", dir / "out", "--to", "dcp", "--family", "none", "--layout", layout}));
  // Of tp rank 0's columns 0-3, 8-11 and 16-19 the first six go to rank 0: one box and a half.
  const auto boxes = boxes_of(dir / "out").at("h.0.attn.c_attn.weight");
  EXPECT_EQ(boxes, (std::set<std::pair<Dims, Dims>>{{{0, 0}, {8, 4}},
                                                    {{0, 8}, {8, 2}},
                                                    {{0, 10}, {8, 2}},
                                                    {{0, 16}, {8, 4}},
                                                    {{0, 4}, {8, 4}},
                                                    {{0, 12}, {8, 2}},
                                                    {{0, 14}, {8, 2}},
                                                    {{0, 20}, {8, 4}}}));
  EXPECT_EQ(load_checkpoint(dir / "out"), values);
  expect_success(reshard_cli({"verify", dir / "out", "--against", dir / "in", "--family", "none"}));
}

TEST(CliLayout, SaysInOneScreenWhatACheckpointImplies) {
  const CommandResult r = reshard_cli({"layout", sample_checkpoint("pp2_tp4")});
  expect_success(r);
  EXPECT_THAT(r.out, HasSubstr("PyTorch DCP   pp=2, tp=4, files contain the shards of ranks\n"));
  EXPECT_THAT(r.out, HasSubstr("tp=4                                    certain: wo, w2 cut in 4 on dim 1;"));
  EXPECT_THAT(r.out, HasSubstr("            dim 1 by tp                             certain: 8 tensors, 32 boxes, each "
                               "written by an owner\n"));
  EXPECT_THAT(r.out, HasSubstr("pipeline    stage 0: tok_embeddings.weight, layers.{0..1}.*\n"
                               "            stage 1: norm.weight, output.weight, layers.{2..3}.*\n"));
  EXPECT_LT(std::count(r.out.begin(), r.out.end(), '\n'), 30);
  EXPECT_THAT(r.out, testing::Not(HasSubstr(" \n"))) << "no trailing spaces";
}

TEST(CliLayout, ListsEveryLayoutThatFits) {
  const TempDir dir;
  write_dcp({{"a.weight", {DType::kUint8, {2, 8}, std::string(16, 'x')}}}, dir / "in", *Mesh::parse("dp_shard=4"));
  std::set<std::string> meshes;
  for (const char* h : {"1", "2"}) {
    const CommandResult r = reshard_cli({"layout", dir / "in", "--hypothesis", h, "--json"});
    expect_success(r);
    meshes.insert(LayoutDescriptor::parse(r.out, "l.json")->mesh->to_string());
  }
  EXPECT_EQ(meshes, (std::set<std::string>{"dp_shard=4", "dp_replicate=2, dp_shard=2"}));
  EXPECT_THAT(reshard_cli({"layout", dir / "in"}).out, HasSubstr("\nor          "));
  EXPECT_THAT(reshard_cli({"layout", dir / "in"}).out, HasSubstr(" fits as well: --hypothesis 2\n"));
}

TEST(CliLayout, PrintsTheBuiltInOnes) {
  const CommandResult r = reshard_cli({"layout", "--builtin", "megatron-llama", "--mesh", "tp=2", "--json"});
  expect_success(r);
  const auto layout = LayoutDescriptor::parse(r.out, "printed");
  ASSERT_TRUE(layout.has_value()) << layout.error().message();
  EXPECT_EQ(layout->mesh, *Mesh::parse("tp=2"));
  for (const BuiltinLayout& builtin : builtin_layouts()) {
    const CommandResult text = reshard_cli({"layout", "--builtin", std::string(builtin.name)});
    expect_success(text);
    EXPECT_THAT(text.out, StartsWith(std::string(builtin.name) + "   files contain "));
  }
}

TEST(CliLayout, WrongUsageIsRefused) {
  const TempDir dir;
  const std::string source = sample_checkpoint("tp8"), out = dir / "out";
  const std::string meshed = dir.write("l.json", reshard_cli({"layout", source, "--json"}).out);
  expect_failure({"layout"}, 2, "expected PATH or --builtin NAME, and not both");
  expect_failure({"layout", source, "--builtin", "hf"}, 2, "expected PATH or --builtin NAME, and not both");
  expect_failure({"layout", source, "--hypothesis", "2"}, 2, "--hypothesis 2: expected at most 1");
  expect_failure({"layout", source, "--mesh", "tp=2"}, 2, "--mesh needs --builtin");
  expect_failure({"layout", "--builtin", "x"}, 2,
                 "unknown built-in layout 'x'; choose one of: colossalai-llama, hf, megatron-llama, torchtitan-llama");
  expect_failure({"layout", dir / "nothing"}, 5, "");
  const auto convert = [&](std::vector<std::string> options, int code, const std::string& message) {
    options.insert(options.begin(), {"convert", source, out});
    expect_failure(options, code, message);
    EXPECT_FALSE(std::filesystem::exists(out));
    EXPECT_FALSE(std::filesystem::exists(out + ".partial"));
  };
  convert(
      {"--to", "hf", "--layout", "hf"}, 2,
      "--layout does not apply to --to hf, whose files are not sharded by rank; it applies to dcp, megatron-legacy, ");
  convert({"--to", "dcp", "--layout", meshed, "--mesh", "tp=2"}, 2, "already has the mesh tp=8");
  convert({"--to", "dcp", "--layout", "torchtitan-llama"}, 2, "layout 'torchtitan-llama' has no mesh");
  convert({"--to", "dcp", "--layout", dir / "absent.json"}, 5, "no such file or built-in layout");
  convert({"--to", "dcp", "--layout", dir.write("bad.json", "{")}, 3, "bad.json@0x1");
  convert({"--to", "dcp", "--layout", dir.write("odd.json", R"({"reshard_layout": 1, "colour": 2})")}, 3,
          "member 'colour' is unknown");
  convert({"--to", "dcp", "--layout", "colossalai-llama", "--mesh", "tp=2"}, 2,
          "the layout has no pattern for this name");
  convert({"--to", "dcp", "--mesh", "ep=2"}, 2, "families have no rules for ep");
}

TEST(CliLayout, PaddingAndRepeatedHeadsNeedToBeSpelledOut) {
  const TempDir dir;
  const auto layout = [&](const std::string& members) {
    return dir.write("l.json", R"({"reshard_layout": 1, "name": "p", "mesh": [{"axis": "tp", "size": 2}],
        "files": "shards", "tensors": [{"names": ["*"], "splits": []}], )" +
                                   members + "}");
  };
  const std::string out = dir / "out";
  expect_failure({"convert", sample_checkpoint("tp8"), out, "--to", "dcp", "--layout",
                  layout(R"("vocabulary": {"tensors": ["tok_*"], "make_vocab_size_divisible_by": 64})")},
                 2,
                 "has 257 rows, the target's vocabulary 384; choose the content of the added rows with --vocab-padding "
                 "zero, repeat-last or mean");
  expect_failure({"plan", sample_checkpoint("tp8"), "--to", "dcp", "--layout",
                  layout(R"("kv_heads": {"tensors": ["*.wo.weight"], "replication": 2})")},
                 4, "the layout repeats key-value heads; expected rows that are a multiple of");
  EXPECT_FALSE(std::filesystem::exists(out));
}

TEST(CliLayout, PlanAndManifestNameTheLayout) {
  const TempDir dir;
  const CommandResult plan = reshard_cli({"plan", sample_checkpoint("tp8"), "--to", "dcp", "--layout",
                                          "torchtitan-llama", "--mesh", "dp_shard=4", "--json"});
  expect_success(plan);
  const auto json = parse_json(plan.out, "plan");
  ASSERT_TRUE(json.has_value()) << json.error().message();
  EXPECT_EQ(*json->get_string("layout"), "torchtitan-llama");
  EXPECT_EQ(*json->get_string("mesh"), "dp_shard=4");
}

TEST(Layout, ATensorWithoutANameIsWhatNoOtherRuleMatches) {
  const TempDir dir;
  const TensorValue rows = {DType::kFloat32, {4, 2}, std::string(32, 'r')};
  write_dcp({{"", rows}, {"a.weight", rows}}, dir / "ck", *Mesh::parse("dp_shard=2"));
  const CommandResult r = reshard_cli({"layout", dir / "ck", "--json"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  write_file(dir / "layout.json", r.out);
  const CommandResult again =
      reshard_cli({"verify", dir / "ck", "--layout", dir / "layout.json", "--fail-on", "error"});
  EXPECT_EQ(again.exit_code, 0) << again.out << again.err;
}

}  // namespace
}  // namespace reshard::cli_layout_test
