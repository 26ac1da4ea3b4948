// Tests the program on real checkpoints: its results, exit codes and messages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "formats/open.h"
#include "lib/base/json.h"
#include "tests/cli/conversions.h"
#include "tests/support/checkpoints.h"
#include "tests/support/dcp_metadata.h"
#include "tests/support/expect_run.h"
#include "tests/support/run_command.h"
#include "tests/support/sha256.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::cli_test {
namespace {

using namespace conversions;
using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kSamples[] = {"tp8",       "fsdp8",           "fsdp16",  "hsdp2x4",
                                    "fsdp4_tp2", "fsdp2_tp2_optim", "pp2_tp4", "single"};

// ---- healthy conversions

class Samples : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Cli, Samples, testing::ValuesIn(kSamples),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(Samples, BecomeHuggingFaceModelsBitForBit) {
  const TempDir dir;
  const std::string name = GetParam();
  expect_success(convert(sample(name) + "/checkpoint", dir / "hf", {"--to", "hf"}));
  const TensorValues got = load_checkpoint(dir / "hf");
  if (name != "fsdp2_tp2_optim") {
    EXPECT_TRUE(got == load_checkpoint(sample(name) + "/hf.safetensors"));
  } else {
    // Its hf.safetensors is from before the training step that filled the optimizer. Back under the source's names and
    // in its row order, the tensors have the digests that torch's own reader gave.
    expect_success(convert(dir / "hf", dir / "back", {"--to", "hf", "--names", "torchtitan"}));
    const Json expected = *parse_json(read_file(sample(name) + "/expected.json"), "expected.json");
    const TensorValues back = load_checkpoint(dir / "back");
    EXPECT_EQ(back.size(), got.size());
    for (const auto& [key, value] : back) {
      ASSERT_TRUE(expected.contains(key)) << key;
      EXPECT_EQ(sha256_hex(value.bytes), *expected.find(key)->get_string("sha256")) << key;
    }
  }
  const CommandResult verified = reshard_cli({"verify", sample(name) + "/checkpoint", "--against", dir / "hf"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  EXPECT_EQ(reshard_cli({"verify", dir / "hf"}).exit_code, 0);
}

TEST_P(Samples, SurviveEveryMeshAndTheWayBack) {
  const TempDir dir;
  const std::string source = sample(GetParam()) + "/checkpoint";
  const TensorValues expected = load_checkpoint(source);
  std::string previous = source;
  int n = 0;
  for (const char* mesh : {"tp=2", "dp_shard=3", "tp=2,dp_shard=4", "pp=2,tp=2", "dp_replicate=2,dp_shard=2,cp=2",
                           "dp_shard=16", "dp_shard=1"}) {
    // Each conversion starts from the previous output: A -> B -> C -> ... -> one rank.
    const std::string out = dir / ("out" + std::to_string(n));
    if (n++ % every_nth(6) != 0) continue;
    expect_success(convert(previous, out, {"--to", "dcp", "--mesh", mesh}));
    EXPECT_TRUE(load_checkpoint(out) == expected) << mesh;
    const CommandResult verified = reshard_cli({"verify", source, "--against", out});
    EXPECT_EQ(verified.exit_code, 0) << mesh << "\n" << verified.out << verified.err;
    previous = out;
  }
}

TEST(Cli, PlanSaysHowManyRanksWouldShareTheWork) {
  const std::string source = sample("tp8") + "/checkpoint";
  const CommandResult text = reshard_cli({"plan", source, "--to", "hf", "--ranks", "16"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("ranks     16 ranks on 2 machines   "));
  EXPECT_THAT(text.out, HasSubstr("estimated time in addition to reading and writing: direct "));
  const CommandResult forced =
      reshard_cli({"plan", source, "--to", "hf", "--ranks", "16", "--strategy", "exchange", "--json"});
  const Json json = *parse_json(forced.out, "plan");
  EXPECT_EQ(*json.get_string("strategy"), "exchange");
  EXPECT_FALSE(parse_json(reshard_cli({"plan", source, "--to", "hf", "--json"}).out, "plan")->contains("strategy"));
}

TEST(Cli, PlanSaysWhatTheRanksOfAMeshWouldLoad) {
  const std::string source = sample("fsdp8") + "/checkpoint";
  const CommandResult json = reshard_cli({"plan", source, "--to", "dcp", "--mesh", "dp_shard=2", "--json"});
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const Json plan = *parse_json(json.out, "plan");
  EXPECT_EQ(*plan.get_index("mesh_ranks"), 2);
  // The ranks together hold each byte once, and the step, a float32, on both ranks.
  EXPECT_EQ(*plan.get_index("mesh_bytes"), *plan.get_index("bytes_read") + 4);
  const CommandResult replicated =
      reshard_cli({"plan", source, "--to", "dcp", "--mesh", "dp_replicate=3,dp_shard=2", "--json"});
  EXPECT_EQ(*parse_json(replicated.out, "plan")->get_index("mesh_bytes"), 3 * *plan.get_index("mesh_bytes"));
  EXPECT_THAT(reshard_cli({"plan", source, "--to", "dcp", "--mesh", "dp_shard=2"}).out,
              HasSubstr("mesh      2 ranks to load it: at most "));
}

TEST(Cli, DevicesAndTransportsAreCheckedBeforeAnythingIsDone) {
  const TempDir dir;
  const std::string source = sample("tp8") + "/checkpoint";
  const CommandResult unknown = convert(source, dir / "out", {"--to", "hf", "--device", "tpu"});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("expected cpu, cuda, cuda:N or auto, got 'tpu'"));
  const CommandResult nccl = convert(source, dir / "out", {"--to", "hf", "--transport", "nccl"});
  EXPECT_EQ(nccl.exit_code, 2);
  EXPECT_THAT(nccl.err, HasSubstr("--transport nccl moves GPU memory; it needs --device cuda"));
  EXPECT_FALSE(*path_exists(dir / "out"));
  expect_success(convert(source, dir / "out", {"--to", "hf", "--device", "auto"}));
}

// Samples whose digests torch itself recorded.
class Recorded : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cli, Recorded, testing::Values("fsdp8", "fsdp2_tp2_optim"));

TEST_P(Recorded, HaveTheDigestsThatTorchSaw) {
  const std::string path = sample(GetParam()) + "/expected.json";
  const TempDir dir;
  expect_success(
      convert(sample(GetParam()) + "/checkpoint", dir / "out", {"--to", "dcp", "--mesh", "tp=2,dp_shard=2"}));
  const Json expected = *parse_json(read_file(path), path);
  const TensorValues got = load_checkpoint(dir / "out");
  const auto members = expected.as_object();
  for (const auto& member : *members)
    if (member.value.contains("sha256")) {
      ASSERT_TRUE(got.contains(member.key)) << member.key;
      EXPECT_EQ(sha256_hex(got.at(member.key).bytes), *member.value.get_string("sha256")) << member.key;
    }
}

TEST(Sha256, IsAsThePublishedExamplesSay) {
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Cli, HuggingFaceToTorchtitanAndBackIsTheIdentity) {
  const TempDir dir;
  for (const std::string names : {"torchtitan", "torchtitan-2026"}) {
    for (const std::string name : {"tp8", "fsdp4_tp2"}) {
      const std::string hf = sample(name) + "/hf.safetensors", tag = names + name;
      expect_success(convert(hf, dir / (tag + "dcp"), {"--to", "dcp", "--names", names, "--mesh", "tp=2,dp_shard=2"}));
      expect_success(
          convert(dir / (tag + "dcp"), dir / (tag + "hf"), {"--to", "hf", "--config", sample(name) + "/config.json"}));
      EXPECT_TRUE(load_checkpoint(dir / (tag + "hf")) == load_checkpoint(hf)) << tag;
    }
    EXPECT_TRUE(load_checkpoint(dir / "torchtitantp8dcp") == load_checkpoint(sample("tp8") + "/full.safetensors"));
  }
  const TensorValues renamed = load_checkpoint(dir / "torchtitan-2026tp8dcp");
  EXPECT_TRUE(renamed.contains("layers.0.attention.qkv_linear.wq.weight"));
  EXPECT_TRUE(renamed.contains("lm_head.weight"));
}

TEST(Cli, FusedProjectionsComeApart) {
  // The model has 8 query heads and 2 key-value heads of 8 rows. Megatron's matrix has a block of (4 queries, key,
  // value) for each of the two.
  const TempDir dir;
  TensorValues values = load_checkpoint(sample("fsdp4_tp2") + "/full.safetensors");
  constexpr std::size_t kHead = 8, kGroup = 4;
  for (const std::string layer : {"layers.0.attention.", "layers.1.attention."}) {
    const TensorValue q = values.at(layer + "wq.weight"), k = values.at(layer + "wk.weight"),
                      v = values.at(layer + "wv.weight");
    const std::size_t head_bytes = kHead * static_cast<std::size_t>(q.shape[1]) * 2;
    TensorValue fused{q.dtype, {q.shape[0] + 2 * k.shape[0], q.shape[1]}, ""};
    for (std::size_t kv = 0; kv < 2; ++kv)
      fused.bytes += q.bytes.substr(kv * kGroup * head_bytes, kGroup * head_bytes) +
                     k.bytes.substr(kv * head_bytes, head_bytes) + v.bytes.substr(kv * head_bytes, head_bytes);
    for (const char* name : {"wq.weight", "wk.weight", "wv.weight"}) values.erase(layer + name);
    values[layer + "qkv_linear.wqkv.weight"] = std::move(fused);
  }
  for (const Index ranks : {1, 3, 8}) {  // cuts at head borders, and elsewhere
    const std::string fused = dir / ("fused" + std::to_string(ranks)), hf = dir / ("hf" + std::to_string(ranks));
    write_dcp(values, fused, Mesh({{"dp_shard", ranks}}));
    expect_success(convert(fused, hf, {"--to", "hf", "--config", sample("fsdp4_tp2") + "/config.json"}));
    EXPECT_TRUE(load_checkpoint(hf) == load_checkpoint(sample("fsdp4_tp2") + "/hf.safetensors")) << ranks;
  }
  expect_failure(dir / "fused1", dir / "none", {"--to", "hf"}, 2,
                 AllOf(HasSubstr("wqkv.weight"), HasSubstr("--config")));
}

TEST(Cli, NamesOfWrappersAreLookedThrough) {
  const TempDir dir;
  const TensorValues plain = load_checkpoint(sample("tp8") + "/full.safetensors");
  for (const std::string prefix : {"_orig_mod.", "model.", "model._orig_mod."}) {
    TensorValues values;
    for (const auto& [name, value] : plain) values[prefix + name] = value;
    write_dcp(values, dir / (prefix + "dcp"), Mesh({{"dp_shard", 2}}));
    expect_success(convert(dir / (prefix + "dcp"), dir / (prefix + "hf"),
                           {"--to", "hf", "--config", sample("tp8") + "/config.json"}));
    EXPECT_TRUE(load_checkpoint(dir / (prefix + "hf")) == load_checkpoint(sample("tp8") + "/hf.safetensors")) << prefix;
  }
}

TEST(Cli, TiedEmbeddingsAreStoredOnce) {
  const TempDir dir;
  std::string config = read_file(sample("tp8") + "/config.json");
  config.replace(config.find("\"tie_word_embeddings\": false"), 28, "\"tie_word_embeddings\": true ");
  dir.write("config.json", config);
  TensorValues values = load_checkpoint(sample("tp8") + "/full.safetensors");
  write_dcp(values, dir / "differs", Mesh({{"dp_shard", 2}}));
  expect_failure(
      dir / "differs", dir / "hf", {"--to", "hf"}, 3,
      AllOf(HasSubstr("tie_word_embeddings"), HasSubstr("differs from the embedding"), HasSubstr("config.json")));

  values["output.weight"] = values["tok_embeddings.weight"];
  write_dcp(values, dir / "tied", Mesh({{"dp_shard", 2}}));
  const CommandResult r = convert(dir / "tied", dir / "hf", {"--to", "hf"});
  expect_success(r);
  EXPECT_THAT(r.out, HasSubstr("tied to the embedding"));
  TensorValues hf = load_checkpoint(sample("tp8") + "/hf.safetensors");
  hf.erase("lm_head.weight");
  EXPECT_TRUE(load_checkpoint(dir / "hf") == hf);
  // A Hugging Face model without a head gives torchtitan one.
  expect_success(convert(dir / "hf", dir / "back", {"--to", "dcp", "--names", "torchtitan", "--mesh", "tp=2"}));
  EXPECT_TRUE(load_checkpoint(dir / "back") == values);
}

TEST(Cli, UnknownTensorsAreNamedUnlessKept) {
  const TempDir dir;
  TensorValues values = load_checkpoint(sample("tp8") + "/full.safetensors");
  const TensorValue extra{DType::kFloat32, {2, 3}, std::string(24, 'x')};
  values["layers.0.attention.gate.weight"] = values["vision.patch"] = extra;
  write_dcp(values, dir / "ck", Mesh({{"dp_shard", 2}}));
  const std::vector<std::string> options = {"--to", "hf", "--config", sample("tp8") + "/config.json"};
  expect_failure(dir / "ck", dir / "hf", options, 4,
                 AllOf(HasSubstr("2 tensors have names that family llama does not know"), HasSubstr("--keep-unknown"),
                       HasSubstr("\n  layers.0.attention.gate.weight"), HasSubstr("\n  vision.patch")));
  std::vector<std::string> keep = options;
  keep.push_back("--keep-unknown");
  expect_success(convert(dir / "ck", dir / "hf", keep));
  TensorValues hf = load_checkpoint(sample("tp8") + "/hf.safetensors");
  hf["layers.0.attention.gate.weight"] = hf["vision.patch"] = extra;
  EXPECT_TRUE(load_checkpoint(dir / "hf") == hf);
}

// ---- options

TEST(Cli, FiltersAndDtypesActOnSourceNames) {
  const TempDir dir;
  const std::string source = sample("tp8") + "/checkpoint";
  expect_success(convert(source, dir / "a", {"--to", "dcp", "--include", "layers.1.*", "--exclude", "*norm*"}));
  const TensorValues all = load_checkpoint(source), some = load_checkpoint(dir / "a");
  EXPECT_EQ(some.size(), 7u);
  for (const auto& [name, value] : some) EXPECT_TRUE(value == all.at(name)) << name;
  expect_failure(source, dir / "none", {"--to", "hf", "--include", "nothing*"}, 2,
                 HasSubstr("no tensor matches --include 'nothing*'"));

  expect_success(convert(source, dir / "b", {"--to", "hf", "--dtype", "float32", "--keep-dtype", "*norm*"}));
  const TensorValues hf = load_checkpoint(sample("tp8") + "/hf.safetensors");
  for (const auto& [name, value] : load_checkpoint(dir / "b")) {
    const bool norm = name.find("norm") != std::string::npos;
    ASSERT_EQ(value.dtype, norm ? DType::kBFloat16 : DType::kFloat32) << name;
    std::string expected = hf.at(name).bytes;
    if (!norm) {  // a bfloat16 is the upper half of a float32
      std::string wide;
      for (std::size_t i = 0; i < expected.size(); i += 2) wide += std::string(2, '\0') + expected.substr(i, 2);
      expected = wide;
    }
    EXPECT_TRUE(value.bytes == expected) << name;
  }
  const Json config = *parse_json(read_file(dir / "b/config.json"), "config.json");
  EXPECT_EQ(*config.get_string("torch_dtype"), "float32");
  EXPECT_EQ(convert(source, dir / "c", {"--to", "hf", "--dtype", "int8"}).exit_code, 2);
}

TEST(Cli, LargeModelsAreCutIntoFilesWithAnIndex) {
  const TempDir dir;
  expect_success(convert(sample("tp8") + "/checkpoint", dir / "hf", {"--to", "hf", "--max-shard-size", "100kB"}));
  const Json index = *parse_json(read_file(dir / "hf/model.safetensors.index.json"), "index");
  std::map<std::string, Index> files;
  const auto members = index.find("weight_map")->as_object();
  for (const auto& member : *members) {
    const std::string file(*member.value.as_string());
    files[file] = static_cast<Index>(fs::file_size(dir / ("hf/" + file)));
  }
  EXPECT_GE(files.size(), 5u);
  for (const auto& [name, size] : files) EXPECT_LT(size, 110'000) << name;
  EXPECT_TRUE(load_checkpoint(dir / "hf") == load_checkpoint(sample("tp8") + "/hf.safetensors"));
}

TEST(Cli, ADryRunWritesNothing) {
  const TempDir dir;
  const CommandResult r = convert(sample("tp8") + "/checkpoint", dir / "hf", {"--to", "hf", "--dry-run"});
  expect_success(r);
  EXPECT_THAT(r.out, HasSubstr("nothing was written"));
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

TEST(Cli, ADestinationIsReplacedOnlyWhenAsked) {
  const TempDir dir;
  const std::string source = sample("tp8") + "/checkpoint", out = dir / "out";
  expect_success(convert(source, out, {"--to", "dcp", "--mesh", "tp=2"}));
  const auto before = all_files(out);
  CommandResult r = convert(source, out, {"--to", "hf"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, AllOf(HasSubstr(out + ": the destination exists"), HasSubstr("--force")));
  EXPECT_TRUE(all_files(out) == before);
  expect_success(convert(source, out, {"--to", "hf", "--force"}));
  EXPECT_TRUE(load_checkpoint(out) == load_checkpoint(sample("tp8") + "/hf.safetensors"));
  EXPECT_FALSE(fs::exists(out + ".partial"));
  EXPECT_FALSE(fs::exists(out + "/.reshard-partial"));

  dir.write("papers/thesis.tex", "mine");
  r = convert(source, dir / "papers", {"--to", "hf", "--force"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, HasSubstr("neither empty nor a checkpoint"));
  EXPECT_EQ(read_file(dir / "papers/thesis.tex"), "mine");
}

TEST(Cli, TheSourceIsNeverTheDestination) {
  const Copy copy("single");
  const auto before = all_files(copy.checkpoint);
  fs::create_directory_symlink(copy.checkpoint, copy.dir / "link");
  for (const std::string& destination : {copy.checkpoint, copy.dir / "link", copy.checkpoint + "/../checkpoint"}) {
    const CommandResult r = convert(copy.checkpoint, destination, {"--to", "hf", "--force"});
    EXPECT_EQ(r.exit_code, 2);
    EXPECT_THAT(r.err, HasSubstr("which this job reads; it will not be replaced"));
  }
  EXPECT_TRUE(all_files(copy.checkpoint) == before);
}

TEST(Cli, TooLittleMemorySaysHowMuchIsNeeded) {
  const TempDir dir;
  expect_failure(sample("tp8") + "/checkpoint", dir / "hf", {"--to", "hf", "--memory", "1MiB"}, 2,
                 AllOf(HasSubstr("--memory 1.05 MB is too small"), HasSubstr("needs at least"), HasSubstr("threads")));
}

TEST(Cli, AConfigOfAnotherModelIsRefusedByTensor) {
  const TempDir dir;
  std::string config = read_file(sample("tp8") + "/config.json");
  config.replace(config.find("\"intermediate_size\": 172"), 24, "\"intermediate_size\": 180");
  dir.write("config.json", config);
  expect_failure(sample("tp8") + "/checkpoint", dir / "hf", {"--to", "hf", "--config", dir / "config.json"}, 3,
                 AllOf(HasSubstr("model.layers.0.mlp.gate_proj.weight"), HasSubstr("[180, 64]"), HasSubstr("[172, 64]"),
                       HasSubstr(dir / "config.json")));
  config = read_file(sample("tp8") + "/config.json");
  config.replace(config.find("\"head_dim\": 8"), 13, "\"head_dim\": 4");
  dir.write("config.json", config);
  expect_failure(sample("tp8") + "/checkpoint", dir / "hf", {"--to", "hf", "--config", dir / "config.json"}, 3,
                 AllOf(HasSubstr("wk.weight"), HasSubstr("num_key_value_heads 8 x head_dim 4"), HasSubstr("[64, 64]")));
  config = read_file(sample("tp8") + "/config.json");
  config.replace(config.find("\"num_hidden_layers\": 4"), 22, "\"num_hidden_layers\": 5");
  dir.write("config.json", config);
  expect_failure(sample("tp8") + "/checkpoint", dir / "hf", {"--to", "hf", "--config", dir / "config.json"}, 3,
                 AllOf(HasSubstr("9 tensors"), HasSubstr("missing"), HasSubstr("model.layers.4.")));
}

TEST(Cli, TensorParallelismThatCutsHeadsIsWarnedOfAndExact) {
  const TempDir dir;
  const std::string source = sample("fsdp4_tp2") + "/checkpoint";
  const CommandResult plan = reshard_cli({"plan", source, "--to", "dcp", "--mesh", "tp=4"});
  EXPECT_EQ(plan.exit_code, 0);
  EXPECT_THAT(plan.out,
              AllOf(HasSubstr("warning   tp=4 does not divide num_key_value_heads 2"), HasSubstr("tp=2 would")));
  for (const std::string family : {"auto", "none"}) {
    expect_success(convert(source, dir / family, {"--to", "dcp", "--mesh", "tp=4", "--family", family}));
    EXPECT_TRUE(load_checkpoint(dir / family) == load_checkpoint(source));
  }
}

TEST(Cli, WrongUsageIsExitCode2) {
  const TempDir dir;
  const std::string source = sample("single") + "/checkpoint";
  EXPECT_EQ(reshard_cli({}).exit_code, 2);
  EXPECT_EQ(reshard_cli({"nonsense"}).exit_code, 2);
  EXPECT_EQ(reshard_cli({"nonsense"}).err, "reshard: error: unknown command 'nonsense'; see reshard --help\n");
  const CommandResult typo = convert(source, dir / "o", {"--to", "hf", "--strategy", "exchnage"});
  EXPECT_EQ(typo.exit_code, 2);
  EXPECT_EQ(typo.err,
            "reshard: error: --strategy: unknown value 'exchnage'; did you mean exchange? Choose one of: auto, direct, "
            "exchange; see reshard convert --help\n");
  EXPECT_EQ(reshard_cli({"--help"}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"--version"}).exit_code, 0);
  expect_failure(source, dir / "o", {"--to", "onnx"}, 2,
                 AllOf(HasSubstr("unknown format 'onnx'; choose one of: "), HasSubstr("dcp"), HasSubstr("hf")));
  expect_failure(source, dir / "o", {"--to", "gguf"}, 4,
                 AllOf(HasSubstr("reshard convert SRC MODEL --to hf; python convert_hf_to_gguf.py MODEL")));
  expect_failure(
      source, dir / "o", {"--to", "hf", "--mesh", "tp=2"}, 2,
      HasSubstr("--mesh does not apply to --to hf, whose files are not sharded by rank; it applies to dcp, megatron"));
  expect_failure(source, dir / "o", {"--to", "dcp", "--mesh", "tp=zero"}, 2,
                 AllOf(HasSubstr("'tp'"), HasSubstr("got 'zero'")));
  expect_failure(source, dir / "o", {"--to", "dcp", "--mesh", "ep=2"}, 2, HasSubstr("ep"));
  expect_failure(source, dir / "o", {"--to", "dcp", "--mesh", "pp=5"}, 2,
                 HasSubstr("pp=5 exceeds the parts of the model"));
  expect_failure(source, dir / "o", {"--to", "hf", "--family", "bert"}, 2,
                 HasSubstr("unknown family 'bert'; choose one of: auto, none, llama"));
  expect_failure(source, dir / "o", {"--to", "hf", "--names", "x"}, 2, HasSubstr("torchtitan-2026"));
  expect_failure(source, dir / "o", {"--to", "hf", "--memory", "lots"}, 2, HasSubstr("--memory: 'lots' is not a size"));
  expect_failure(source, dir / "o", {"--to", "hf", "--gpu-memory", "-1"}, 2, HasSubstr("--gpu-memory: '-1' is not"));
  expect_failure(source, dir / "o", {"--to", "hf", "--config", ""}, 2, HasSubstr("--config: expected a value, got an"));
  EXPECT_THAT(reshard_cli({"convert", source, "", "--to", "hf"}).err, HasSubstr("DST: expected a value, got an empty"));
  expect_failure(source, dir / "no/such/o", {"--to", "hf"}, 5, HasSubstr(dir / "no/such"));
  expect_failure(dir / "missing", dir / "o", {"--to", "hf"}, 5, HasSubstr(dir / "missing: not found"));
  std::filesystem::create_directory(dir / "empty");
  expect_failure(dir / "empty", dir / "o", {"--to", "hf"}, 5, HasSubstr(dir / "empty: an empty directory"));
  dir.write("notes/readme.txt", "hello");
  expect_failure(dir / "notes", dir / "o", {"--to", "hf"}, 4, HasSubstr("unrecognised format; supported: "));
  dir.write("notes/m.onnx", "");
  expect_failure(dir / "notes", dir / "o", {"--to", "hf"}, 4,
                 HasSubstr("unrecognised format (m.onnx is ONNX's); supported: "));
  for (const char* part : {"pipe/unet", "pipe/vae"}) {
    fs::create_directories(dir / part);
    fs::copy_file(sample("tp8") + "/hf.safetensors", dir / (std::string(part) + "/model.safetensors"));
  }
  dir.write("pipe/model_index.json", "{}");
  expect_failure(dir / "pipe", dir / "o", {"--to", "hf"}, 4,
                 HasSubstr("a directory of several models; name one of them: " + dir / "pipe/unet" + ", "));
}

TEST(Cli, VerifyAndDiffTellDifferences) {
  const TempDir dir;
  TensorValues values = load_checkpoint(sample("tp8") + "/full.safetensors");
  write_dcp(values, dir / "a", Mesh({{"dp_shard", 2}}));
  values["layers.2.feed_forward.w1.weight"].bytes[100] ^= 1;
  values.erase("norm.weight");
  write_dcp(values, dir / "b", Mesh({{"dp_shard", 3}}));
  const CommandResult verified = reshard_cli({"verify", dir / "a", "--against", dir / "b"});
  EXPECT_EQ(verified.exit_code, 1);
  EXPECT_THAT(verified.out, AllOf(HasSubstr("model.layers.2.mlp.gate_proj.weight: values differ"),
                                  HasSubstr("'model.norm.weight' is only in"), HasSubstr("2 errors")));
  const CommandResult diff = reshard_cli({"diff", dir / "a", dir / "b"});
  EXPECT_EQ(diff.exit_code, 1);
  EXPECT_THAT(diff.out, AllOf(HasSubstr("model.layers.2.mlp.gate_proj.weight"), HasSubstr("1 of 11,008 elements")));
}

// The manifest is checked before anything is written, not after hours of work.
TEST(Cli, WhatAFamilyOfOnesOwnWroteNeedsItsFileAgain) {
  const TempDir dir;
  std::string family = read_file(RESHARD_SOURCE_DIR "/samples/families/llama.json");
  family.replace(family.find("\"llama\""), 7, "\"mine\"");
  write_file(dir / "mine.json", family);
  const std::vector<std::string> own = {"--family-file", dir / "mine.json"};
  std::vector<std::string> made = {"convert", sample("tp8") + "/checkpoint", dir / "hf", "--to", "hf", "-q"};
  made.insert(made.end(), own.begin(), own.end());
  ASSERT_EQ(reshard_cli(made).exit_code, 0);

  std::vector<std::string> further = {"convert", dir / "hf", dir / "out", "--to", "dcp", "--mesh", "tp=2"};
  const CommandResult refused = reshard_cli(further);
  EXPECT_EQ(refused.exit_code, 4) << refused.out;
  EXPECT_THAT(refused.err,
              AllOf(HasSubstr("hf/reshard_manifest.json: unknown family 'mine'"), HasSubstr("--family-file")));
  EXPECT_THAT(refused.out, Not(HasSubstr("done")));
  further.insert(further.end(), own.begin(), own.end());
  const CommandResult r = reshard_cli(further);
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("39 digests of the source's manifest verified"));
}

// torch.distributed.checkpoint with its ZStandard extension (torch 2.15): objects are longer than their stored items.
TEST(Cli, PlansTheSizesOfCompressedObjects) {
  const TempDir dir;
  const std::string source = RESHARD_TEST_DATA "/runs/zstd/checkpoint";
  const CommandResult planned = reshard_cli({"plan", source, "--to", "dcp", "--mesh", "dp_shard=2", "--json"});
  ASSERT_EQ(planned.exit_code, 0) << planned.err;
  ASSERT_EQ(reshard_cli({"convert", source, dir / "out", "--to", "dcp", "--mesh", "dp_shard=2", "-q"}).exit_code, 0);
  const Json plan = *parse_json(planned.out, "out");
  const auto files = *plan.get_array("files");
  ASSERT_EQ(files.size(), 3u);
  for (const Json& file : files)
    EXPECT_EQ(static_cast<std::uintmax_t>(*file.get_index("bytes")),
              std::filesystem::file_size(dir / ("out/" + std::string(*file.get_string("path")))));
}

TEST(Cli, RenamesNeedWholeComponentsOnBothSides) {
  const TempDir dir;
  for (const std::string rename :
       {"model=", "=p", "=", "model", ".norm=x", "model.=x", "norm=x.", "a..b=x", "norm=."}) {
    const CommandResult r = reshard_cli(
        {"convert", sample("tp8") + "/checkpoint", dir / "out", "--to", "dcp", "--family", "none", "--rename", rename});
    EXPECT_EQ(r.exit_code, 2) << rename;
    EXPECT_THAT(r.err, HasSubstr("expected FROM=TO, whole components of names")) << rename;
    EXPECT_FALSE(fs::exists(dir / "out"));
  }
}

TEST(Cli, GlobsMatchAsInAShell) {
  const TempDir dir;
  const std::string source = sample("tp8") + "/checkpoint";
  const auto kept = [&](const std::vector<std::string>& options) {
    std::vector<std::string> command = {"convert",  source, dir / "out", "--to", "dcp",
                                        "--family", "none", "--force",   "-q"};
    command.insert(command.end(), options.begin(), options.end());
    const CommandResult r = reshard_cli(command);
    EXPECT_EQ(r.exit_code, 0) << r.err;
    std::set<std::string> first;  // by name
    for (const auto& [name, value] : load_checkpoint(dir / "out")) first.insert(name.substr(0, name.find('.')));
    return std::pair(first, load_checkpoint(dir / "out").size());
  };
  const std::size_t in_layer = kept({"--include", "layers.1.*"}).second;
  EXPECT_EQ(kept({"--include", "layers.[0-3].*"}).second, 4 * in_layer);
  EXPECT_EQ(kept({"--include", "layers.*", "--exclude", "layers.[!1-2].*"}).second, 2 * in_layer);
  EXPECT_EQ(kept({"--exclude", "[!l]*"}).first, std::set<std::string>{"layers"});
}

}  // namespace
}  // namespace reshard::cli_test
