// Tests --to bin, colossalai, ranks and vllm and the way back: every readable target returns the tensors it was made
// from.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

CommandResult convert(const std::string& from, const std::string& to, const std::vector<std::string>& options) {
  std::vector<std::string> args = {"convert", from, to, "-q"};
  args.insert(args.end(), options.begin(), options.end());
  return reshard_cli(args);
}

void expect_success(const CommandResult& r) { ASSERT_EQ(r.exit_code, 0) << r.out << r.err; }

void expect_refusal(const CommandResult& r, int code, const testing::Matcher<std::string>& message) {
  EXPECT_EQ(r.exit_code, code) << r.out << r.err;
  EXPECT_THAT(r.err, message);
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> out;
  for (const auto& e : fs::directory_iterator(directory)) out.push_back(e.path().filename());
  std::sort(out.begin(), out.end());
  return out;
}

std::string checkpoint(const std::string& name) { return sample(name) + "/checkpoint"; }

// Returns the digests in a manifest by name.
std::map<std::string, std::string> digests(const std::string& directory) {
  const Json manifest = *parse_json(read_file(directory + "/reshard_manifest.json"), "manifest");
  std::map<std::string, std::string> out;
  const auto tensors = manifest.get_object("tensors");
  if (!tensors) return out;
  for (const Json::Member& m : *tensors) out[m.key] = std::string(*m.value.get_string("digest"));
  return out;
}

TEST(NativeTargets, RanksAndBackKeepEveryDigest) {
  const TempDir dir;
  expect_success(convert(checkpoint("tp8"), dir / "hf", {"--to", "hf"}));
  int n = 0;
  for (const std::string mesh : {"tp=4,pp=2", "tp=8", "dp_shard=3", "pp=3", "dp_replicate=2,dp_shard=2,tp=2", "tp=1"}) {
    for (const std::string container : {"safetensors", "bin"}) {
      const std::string ranks = dir / ("ranks" + std::to_string(n)), back = dir / ("back" + std::to_string(n));
      if (n++ % every_nth(5) != 0) continue;
      expect_success(convert(dir / "hf", ranks, {"--to", "ranks", "--mesh", mesh, "--shard-format", container}));
      expect_success(convert(ranks, back, {"--to", "hf"}));
      EXPECT_EQ(digests(back), digests(dir / "hf")) << mesh << " " << container;
      EXPECT_TRUE(load_checkpoint(back) == load_checkpoint(dir / "hf")) << mesh << " " << container;
      expect_success(reshard_cli({"verify", ranks, "--replicas"}));
    }
  }
  EXPECT_THAT(
      names_in(dir / "ranks0"),
      ElementsAre("config.json", "rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors",
                  "rank-00003.safetensors", "rank-00004.safetensors", "rank-00005.safetensors",
                  "rank-00006.safetensors", "rank-00007.safetensors", "reshard_layout.json", "reshard_manifest.json"));
}

TEST(NativeTargets, ModelFilesAndBackKeepEveryDigest) {
  const TempDir dir;
  expect_success(convert(checkpoint("tp8"), dir / "hf", {"--to", "hf"}));
  int n = 0;
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"--to", "bin"},
        {"--to", "bin", "--max-shard-size", "100kB"},
        {"--to", "colossalai"},
        {"--to", "colossalai", "--max-shard-size", "100KiB"},
        {"--to", "colossalai", "--mesh", "pp=2"},
        {"--to", "colossalai", "--mesh", "pp=4", "--shard-format", "bin", "--max-shard-size", "50KiB"}}) {
    const std::string there = dir / ("there" + std::to_string(n)), back = dir / ("back" + std::to_string(n));
    if (n++ % every_nth(2) != 0) continue;
    expect_success(convert(dir / "hf", there, options));
    expect_success(convert(there, back, {"--to", "hf"}));
    EXPECT_EQ(digests(back), digests(dir / "hf")) << n;
    EXPECT_TRUE(load_checkpoint(there) == load_checkpoint(dir / "hf")) << n;
    expect_success(reshard_cli({"verify", there}));
  }
}

TEST(NativeTargets, RanksUnderTorchtitansNamesComeBackToo) {
  const TempDir dir;
  expect_success(convert(checkpoint("tp8"), dir / "hf", {"--to", "hf"}));
  for (const std::string names : {"torchtitan", "torchtitan-2026"}) {
    expect_success(convert(dir / "hf", dir / names, {"--to", "ranks", "--mesh", "tp=2,pp=2", "--names", names}));
    expect_success(convert(dir / names, dir / (names + "-back"), {"--to", "hf"}));
    EXPECT_EQ(digests(dir / (names + "-back")), digests(dir / "hf")) << names;
  }
}

TEST(NativeTargets, FusedTensorsAreCutSectionBySection) {
  const TempDir dir;
  const std::string config = dir.write("config.json", R"({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_head": 2, "n_layer": 2})");
  expect_success(reshard_cli({"synth", dir / "gpt2", "--config", config, "--to", "hf", "-q"}));
  expect_success(convert(dir / "gpt2", dir / "ranks", {"--to", "ranks", "--mesh", "tp=2"}));
  expect_success(convert(dir / "ranks", dir / "back", {"--to", "hf"}));
  expect_success(reshard_cli({"verify", dir / "back", "--against", dir / "gpt2"}));
  const Json layout = *parse_json(read_file(dir / "ranks/reshard_layout.json"), "l");
  EXPECT_THAT(to_text(layout), HasSubstr("\"groups\":3"));
}

TEST(NativeTargets, LayoutsOfWholeFilesAreTakenAsTheyLieOnTheRanks) {
  const TempDir dir;
  expect_success(convert(checkpoint("fsdp4_tp2"), dir / "hf", {"--to", "hf"}));
  const CommandResult made =
      convert(dir / "hf", dir / "ranks",
              {"--to", "ranks", "--layout", "torchtitan-llama", "--names", "torchtitan", "--mesh", "tp=2,dp_shard=2"});
  expect_success(made);
  expect_success(convert(dir / "ranks", dir / "back", {"--to", "hf"}));
  EXPECT_EQ(digests(dir / "back"), digests(dir / "hf"));
}

TEST(NativeTargets, DumpsOfRanksJoinByTheFamilysTable) {
  const TempDir dir;
  const std::string dumps = checkpoint("per_rank_tp2");
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

TEST(NativeTargets, DamagedRankFilesAreErrors) {
  const TempDir dir;
  expect_success(
      convert(checkpoint("tp8"), dir / "ranks", {"--to", "ranks", "--mesh", "tp=2", "--shard-format", "bin"}));
  const std::string path = dir / "ranks/rank-00001.bin", good = read_file(path);
  for (std::size_t n = 0; n < good.size(); n += good.size() / 17) {
    write_file(path, good.substr(0, n));
    const CommandResult r = reshard_cli({"inspect", dir / "ranks"});
    EXPECT_EQ(r.exit_code, 3) << n << r.err;
  }
  std::string flipped = good;
  flipped[flipped.size() / 2] ^= 1;  // in a tensor
  write_file(path, flipped);
  const CommandResult r = convert(dir / "ranks", dir / "out", {"--to", "hf"});
  EXPECT_EQ(r.exit_code, 3) << r.err;
  EXPECT_FALSE(fs::exists(dir / "out"));
  write_file(path, good);
  write_file(dir / "ranks/reshard_layout.json", "{}");
  EXPECT_EQ(reshard_cli({"inspect", dir / "ranks"}).exit_code, 3);
}

TEST(NativeTargets, ColossalaiStagesFollowItsOwnRule) {
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

TEST(NativeTargets, ModelsAloneGoIntoThem) {
  const TempDir dir;
  for (const std::string to : {"bin", "colossalai", "ranks", "vllm"}) {
    const CommandResult r = reshard_cli({"convert", checkpoint("fsdp2_tp2_optim"), dir / to, "--to", to});
    expect_success(r);
    EXPECT_THAT(r.out, HasSubstr("left out: optimizer (")) << to;
    EXPECT_TRUE(fs::exists(dir / (to + "/config.json")));
  }
  EXPECT_THAT(names_in(dir / "bin"), ElementsAre("config.json", "pytorch_model.bin", "reshard_manifest.json"));
  EXPECT_EQ(digests(dir / "bin"), digests(dir / "colossalai"));
  EXPECT_EQ(digests(dir / "bin"), digests(dir / "vllm"));
}

// 257 tokens, which vLLM pads to 320 before it cuts them; a mesh alone does not describe that.
TEST(NativeTargets, VllmsWorkersVerifyCleanOnTheirMesh) {
  const TempDir dir;
  for (const std::string mesh : {"tp=2", "pp=3,tp=2"}) {
    const std::string out = dir / mesh;
    expect_success(convert(checkpoint("tp8"), out, {"--to", "vllm", "--mesh", mesh}));
    expect_success(reshard_cli({"verify", out, "--mesh", mesh, "--config", sample("tp8") + "/config.json"}));
    EXPECT_EQ(reshard_cli({"verify", out, "--mesh", "tp=4"}).exit_code, 1);
  }
}

TEST(NativeTargets, VllmNeedsTheConfigsHeads) {
  const TempDir dir;
  expect_success(convert(checkpoint("tp8"), dir / "hf", {"--to", "hf"}));
  fs::remove(dir / "hf/config.json");
  expect_refusal(convert(dir / "hf", dir / "v", {"--to", "vllm", "--mesh", "tp=2"}), 2,
                 HasSubstr("needs the model's config.json"));
  expect_success(
      convert(dir / "hf", dir / "v", {"--to", "vllm", "--mesh", "tp=2", "--config", sample("tp8") + "/config.json"}));
}

// The output can be opened. With --family none the config is copied only if it is given.
TEST(NativeTargets, VllmOfNoFamilyNeedsTheConfigNamed) {
  const TempDir dir;
  const std::string config = sample("tp8") + "/config.json";
  expect_success(convert(checkpoint("tp8"), dir / "hf", {"--to", "hf"}));
  for (const std::string to : {"vllm", "vllm-0.13"}) {
    expect_refusal(convert(dir / "hf", dir / "v", {"--to", to, "--family", "none"}), 2,
                   HasSubstr("needs the model's config.json"));
    EXPECT_FALSE(fs::exists(dir / "v"));
    expect_success(convert(dir / "hf", dir / to, {"--to", to, "--family", "none", "--config", config}));
    EXPECT_EQ(digests(dir / to), digests(dir / "hf"));
  }
}

TEST(NativeTargets, ShardsOfVllmThatAreMadeUpAreThoseOfTheModel) {
  const TempDir dir;
  expect_success(reshard_cli({"synth", dir / "hf", "--model", "llama3-tiny", "--to", "hf", "-q"}));
  expect_success(reshard_cli({"convert", dir / "hf", dir / "shards", "--to", "vllm", "--mesh", "tp=2", "-q"}));
  expect_success(
      reshard_cli({"synth", dir / "made-up", "--model", "llama3-tiny", "--to", "vllm", "--mesh", "tp=2", "-q"}));
  expect_success(reshard_cli({"verify", dir / "made-up", "--against", dir / "shards", "-q"}));
}

TEST(NativeTargets, AnOptimizerThatIsMadeUpHasMadeOneNumberOfSteps) {
  const TempDir dir;
  expect_success(reshard_cli(
      {"synth", dir / "dcp", "--model", "llama3-tiny", "--layers", "1", "--mesh", "dp_shard=2", "--optimizer", "-q"}));
  int parameters = 0;
  for (const auto& [name, value] : load_checkpoint(dir / "dcp")) {
    if (!name.ends_with(".step")) continue;
    float steps = 0;
    ASSERT_EQ(value.bytes.size(), sizeof steps) << name;
    std::memcpy(&steps, value.bytes.data(), sizeof steps);
    EXPECT_EQ(steps, 1000) << name;
    ++parameters;
  }
  EXPECT_EQ(parameters, 12);
}

// A tied head that only the view has is named in no message and no manifest.
TEST(TiedHeads, AreNotNamedWhereTheyAreNotStored) {
  const TempDir dir;
  dir.write("config.json", R"({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 40,
    "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 4,
    "vocab_size": 149, "tie_word_embeddings": true, "torch_dtype": "bfloat16"})");
  const std::string config = dir / "config.json", padded = dir / "padded";
  expect_success(reshard_cli({"synth", padded, "--config", config, "--to", "dcp", "--names", "megatron", "--shape",
                              "*embed_tokens.weight=152x40", "-q"}));
  const CommandResult refused = reshard_cli({"convert", padded, dir / "out", "--to", "hf", "--config", config});
  expect_refusal(refused, 3, HasSubstr("tensor 'model.embed_tokens.weight': "));
  const CommandResult cut =
      reshard_cli({"convert", padded, dir / "out", "--to", "hf", "--config", config, "--repair", "vocab"});
  expect_success(cut);
  EXPECT_THAT(cut.out, HasSubstr("model.embed_tokens.weight."));
  for (const std::string& text : {refused.err, cut.out + cut.err, read_file(dir / "out/reshard_manifest.json")})
    EXPECT_EQ(text.find("lm_head"), std::string::npos) << text;
}

}  // namespace
}  // namespace reshard
