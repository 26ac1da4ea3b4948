// Tests the program on files of ranks: what they are called, how they are cut, and how they join.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/expect_run.h"
#include "tests/support/temp_dir.h"

namespace reshard::ranks_program_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(RankFilesByProgram, HaveAFileForEachRank) {
  const TempDir dir;
  expect_success(convert_quietly(sample_checkpoint("tp8"), dir / "ranks", {"--to", "ranks", "--mesh", "tp=4,pp=2"}));
  EXPECT_THAT(
      names_in(dir / "ranks"),
      ElementsAre("config.json", "rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors",
                  "rank-00003.safetensors", "rank-00004.safetensors", "rank-00005.safetensors",
                  "rank-00006.safetensors", "rank-00007.safetensors", "reshard_layout.json", "reshard_manifest.json"));
}

// A layout names tensors by patterns, which are not empty.
TEST(RankFilesByProgram, ATensorWithoutANameIsUnsupported) {
  const TempDir dir;
  const std::string header = R"({"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   )";
  ASSERT_EQ(header.size(), 56U);
  dir.write("model.safetensors", "8" + std::string(7, '\0') + header + std::string(8, '\0'));
  expect_success(convert_quietly(dir / "model.safetensors", dir / "dcp", {"--to", "dcp", "--names", "keep"}));
  expect_refusal(
      convert_quietly(dir / "model.safetensors", dir / "ranks", {"--to", "ranks", "--mesh", "tp=2", "--names", "keep"}),
      4, AllOf(HasSubstr("a tensor's name is empty"), HasSubstr("choose another format with --to")));
}

TEST(RankFilesByProgram, FusedTensorsAreCutSectionBySection) {
  const TempDir dir;
  const std::string config = dir.write("config.json", R"({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_head": 2, "n_layer": 2})");
  expect_success(reshard_cli({"synth", dir / "gpt2", "--config", config, "--to", "hf", "-q"}));
  expect_success(convert_quietly(dir / "gpt2", dir / "ranks", {"--to", "ranks", "--mesh", "tp=2"}));
  expect_success(convert_quietly(dir / "ranks", dir / "back", {"--to", "hf"}));
  expect_success(reshard_cli({"verify", dir / "back", "--against", dir / "gpt2"}));
  const Json layout = *parse_json(read_file(dir / "ranks/reshard_layout.json"), "l");
  EXPECT_THAT(to_text(layout), HasSubstr("\"groups\":3"));
}

TEST(RankFilesByProgram, LayoutsOfWholeFilesAreTakenAsTheyLieOnTheRanks) {
  const TempDir dir;
  expect_success(convert_quietly(sample_checkpoint("fsdp4_tp2"), dir / "hf", {"--to", "hf"}));
  const CommandResult made = convert_quietly(
      dir / "hf", dir / "ranks",
      {"--to", "ranks", "--layout", "torchtitan-llama", "--names", "torchtitan", "--mesh", "tp=2,dp_shard=2"});
  expect_success(made);
  expect_success(convert_quietly(dir / "ranks", dir / "back", {"--to", "hf"}));
  EXPECT_EQ(manifest_digests(dir / "back"), manifest_digests(dir / "hf"));
}

TEST(RankFilesByProgram, DumpsOfRanksJoinByTheFamilysTable) {
  const TempDir dir;
  const std::string dumps = sample_checkpoint("per_rank_tp2");
  const CommandResult seen = reshard_cli({"inspect", dumps});
  expect_success(seen);
  EXPECT_THAT(seen.out, AllOf(HasSubstr("tp=2"), HasSubstr("joined      tp=2 certain: with this layout")));
  const TensorValues got = load_checkpoint(dumps), full = load_checkpoint(sample("per_rank_tp2") + "/full.safetensors");
  ASSERT_EQ(got.size(), full.size());
  for (const auto& [name, value] : full) {
    const TensorValue& joined = got.at(name);
    if (value.shape[0] == 1002) {
      EXPECT_EQ(joined.shape, (Dims{1024, 64}));
      EXPECT_EQ(joined.bytes.substr(0, value.bytes.size()), value.bytes) << name;
    } else {
      EXPECT_TRUE(joined == value) << name;
    }
  }
  // Without the config, the files' contents show how they join.
  fs::copy(dumps, dir / "alone");
  EXPECT_TRUE(load_checkpoint(dir / "alone") == got);
  EXPECT_THAT(reshard_cli({"inspect", dir / "alone"}).out,
              HasSubstr("joined      tp=2 likely: the tensors that family"));
  // One file was copied: replicas, or tp ranks with equal parts.
  fs::copy_file(dir / "alone/model-rank0.bin", dir / "alone/model-rank1.bin", fs::copy_options::overwrite_existing);
  expect_refusal(reshard_cli({"inspect", dir / "alone"}), 4, HasSubstr("all ranks hold the same bytes"));
  // With a layout they are joined, whatever they contain.
  expect_success(
      reshard_cli({"inspect", dir / "alone", "--source-layout", "colossalai-llama", "--source-mesh", "tp=2"}));
  expect_refusal(reshard_cli({"inspect", dir / "alone", "--source-mesh", "tp=2"}), 2,
                 HasSubstr("needs --source-layout"));
  expect_refusal(
      reshard_cli({"inspect", dir / "alone", "--source-layout", "colossalai-llama", "--source-mesh", "tp=4"}), 5,
      HasSubstr("the file of rank 2 and those after it are missing"));
}

// Opens the file of one rank in each way that a rank's number appears in paths.
TEST(RankFilesByProgram, TheFileOfOneRankIsNotTakenForTheModel) {
  const TempDir dir;
  expect_success(convert_quietly(sample_checkpoint("tp8"), dir / "ranks", {"--to", "ranks", "--mesh", "tp=2"}));
  expect_success(convert_quietly(sample_checkpoint("tp8"), dir / "hf", {"--to", "hf"}));
  const auto put = [&](const std::string& from, const std::string& to) {
    fs::create_directories(fs::path(dir / to).parent_path());
    fs::copy_file(dir / from, dir / to);
  };
  for (const int rank : {0, 1}) {
    const std::string from = "ranks/rank-0000" + std::to_string(rank) + ".safetensors", n = std::to_string(rank);
    put(from, "plain/model_rank_" + n + ".safetensors");
    put(from, "trees/tp_0" + n + "/model.safetensors");
    put("hf/model.safetensors", "copies/model_rank_" + n + ".safetensors");
  }
  for (const std::string file : {"plain/model_rank_1.safetensors", "trees/tp_00/model.safetensors"}) {
    const CommandResult r = reshard_cli({"verify", dir / file});
    EXPECT_EQ(r.exit_code, 1) << file << r.out;
    EXPECT_THAT(r.out, HasSubstr("This is the file of one rank, next to")) << file;
    const CommandResult converted =
        reshard_cli({"convert", dir / file, dir / "out", "--to", "hf", "--family", "none", "--force"});
    EXPECT_THAT(converted.out, HasSubstr("warning   This is the file of one rank")) << converted.err;
  }
  // Copies of the whole model, as its config confirms.
  fs::copy_file(dir / "hf/config.json", dir / "copies/config.json");
  const CommandResult whole = reshard_cli({"verify", dir / "copies/model_rank_1.safetensors"});
  EXPECT_EQ(whole.exit_code, 0) << whole.out;
  fs::remove(dir / "plain/model_rank_0.safetensors");
  EXPECT_THAT(reshard_cli({"inspect", dir / "plain/model_rank_1.safetensors"}).out,
              testing::Not(HasSubstr("the file of one rank")));
}

// fairseq2's tree: checkpoints/step_4/{model,optimizer}/pp_00/tp_00/sdp_00.pt, trainer/rank_00.pt (its
// checkpoint/manager.py), with what each rank holds as plain tensors.
TEST(RankFilesByProgram, OfFairseq2AreJoinedByALayout) {
  const TempDir dir;
  expect_success(convert_quietly(sample_checkpoint("tp8"), dir / "ranks", {"--to", "ranks", "--mesh", "dp_shard=3"}));
  const std::string step = dir / "run/checkpoints/step_4", rank = step + "/model/pp_00/tp_00";
  fs::create_directories(rank);
  for (const std::string n : {"0", "1", "2"}) {
    fs::copy_file(dir / ("ranks/rank-0000" + n + ".safetensors"), rank + "/sdp_0" + n + ".pt");
    dir.write("run/checkpoints/step_4/trainer/rank_0" + n + ".pt", "x");
  }
  for (const std::string& path : {dir / "run", step, step + "/model", step + "/model/pp_00"})
    expect_refusal(reshard_cli({"inspect", path}), 4,
                   AllOf(HasSubstr(path + ": a fairseq2 checkpoint; open " + rank), HasSubstr("--source-layout")));
  const std::string layout = dir.write("l.json", R"({"reshard_layout": 1, "name": "fairseq2", "files": "shards",
      "mesh": [{"axis": "dp_shard", "size": 3}],
      "tensors": [{"names": ["*"], "splits": [{"axes": ["dp_shard"], "dim": 0}]}]})");
  fs::copy_file(sample("tp8") + "/config.json", rank + "/config.json");
  expect_success(convert_quietly(rank, dir / "hf", {"--to", "hf", "--source-layout", layout}));
  expect_success(reshard_cli({"verify", dir / "hf", "--against", sample_checkpoint("tp8")}));
  fs::create_directories(step + "/model/pp_00/tp_01");
  expect_refusal(reshard_cli({"inspect", step}), 4, HasSubstr("Open the Hugging Face model that fairseq2 exports"));
  fs::remove(step + "/model/pp_00/tp_01");
  fs::remove(rank + "/sdp_01.pt");
  fs::remove(rank + "/sdp_02.pt");
  expect_refusal(reshard_cli({"inspect", step}), 4, HasSubstr("; open " + rank + "/sdp_00.pt"));
}

TEST(RankFilesByProgram, DamagedRankFilesAreErrors) {
  const TempDir dir;
  expect_success(convert_quietly(sample_checkpoint("tp8"), dir / "ranks",
                                 {"--to", "ranks", "--mesh", "tp=2", "--shard-format", "bin"}));
  const std::string path = dir / "ranks/rank-00001.bin", good = read_file(path);
  for (std::size_t n = 0; n < good.size(); n += good.size() / 17) {
    write_file(path, good.substr(0, n));
    const CommandResult r = reshard_cli({"inspect", dir / "ranks"});
    EXPECT_EQ(r.exit_code, 3) << n << r.err;
  }
  std::string flipped = good;
  flipped[flipped.size() / 2] ^= 1;  // in a tensor
  write_file(path, flipped);
  const CommandResult r = convert_quietly(dir / "ranks", dir / "out", {"--to", "hf"});
  EXPECT_EQ(r.exit_code, 3) << r.err;
  EXPECT_FALSE(fs::exists(dir / "out"));
  write_file(path, good);
  write_file(dir / "ranks/reshard_layout.json", "{}");
  EXPECT_EQ(reshard_cli({"inspect", dir / "ranks"}).exit_code, 3);
}

}  // namespace
}  // namespace reshard::ranks_program_test
