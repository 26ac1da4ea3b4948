// Outputs in a model's format are the model: checkpoints of real trainers, under the names that wrappers add, become it
// bit for bit, and unknown models are refused or reported.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "formats/open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::identity_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

struct TrainersRun {
  const char* name;  // in tests/data/runs
  const char* checkpoint;
  std::string root() const { return RESHARD_TEST_DATA "/runs/" + std::string(name); }
  std::string path() const { return root() + "/" + checkpoint; }
  std::string config() const { return root() + "/config.json"; }
};
// {"app": AppState(model, optimizer)} of torch's DCP tutorial; transformers.Trainer with FSDP1; Lightning with FSDP;
// Accelerate with FSDP2 and FULL_STATE_DICT.
const TrainersRun kTutorial = {"tutorial_app_state", "checkpoint"};
const TrainersRun kTrainer = {"trainer_fsdp1", "checkpoint/checkpoint-2"};
const TrainersRun kLightning = {"lightning_trainer", "checkpoint/epoch=0-step=2.ckpt"};
const TrainersRun kAccelerate = {"accelerate_full", "checkpoint/checkpoint-2"};

class SavedRuns : public testing::TestWithParam<TrainersRun> {};
INSTANTIATE_TEST_SUITE_P(Identity, SavedRuns, testing::Values(kTutorial, kTrainer, kLightning, kAccelerate),
                         [](const auto& param) { return std::string(param.param.name); });

TEST_P(SavedRuns, BecomeTheModelBitForBitAndVerifyClean) {
  const TempDir dir;
  const TrainersRun run = GetParam();
  const CommandResult r = reshard_cli({"convert", run.path(), dir / "hf", "--to", "hf", "--config", run.config()});
  ASSERT_EQ(r.exit_code, 0) << r.out << r.err;
  EXPECT_THAT(r.out, HasSubstr("LlamaForCausalLM, 21 of 21 tensors of "));
  EXPECT_TRUE(load_checkpoint(dir / "hf") == load_checkpoint(run.root() + "/hf.safetensors"));
  const CommandResult verified =
      reshard_cli({"verify", run.path(), "--config", run.config(), "--fail-on", "note", "--against", dir / "hf"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

// Every moment is sharded like its parameter.
TEST_P(SavedRuns, OptimizerStateFollowsItsParameter) {
  const TempDir dir;
  const TrainersRun run = GetParam();
  const CommandResult r = reshard_cli({"convert", run.path(), dir / "dcp", "--to", "dcp", "--mesh", "dp_shard=4",
                                       "--names", "torchtitan", "--config", run.config()});
  ASSERT_EQ(r.exit_code, 0) << r.out << r.err;
  const auto open = open_checkpoint(dir / "dcp");
  ASSERT_TRUE(open) << open.error().message();
  const Catalog& catalog = open->reader->catalog();
  int moments = 0;
  for (const Tensor& t : catalog.tensors()) {
    if (!t.name.starts_with("optimizer")) continue;
    const StateKey key = split_state_key(t.key());
    const auto parameter = catalog.find(key.parameter);
    ASSERT_TRUE(parameter) << t.name;
    if (key.suffix == ".step") continue;
    ++moments;
    EXPECT_TRUE(t.fragments.has_boxes_of(catalog.tensors()[*parameter].fragments)) << t.name;
  }
  EXPECT_EQ(moments, 42);
  const CommandResult verified = reshard_cli(
      {"verify", dir / "dcp", "--mesh", "dp_shard=4", "--config", run.config(), "--against", run.path(), "--bytes"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

TEST(Identity, TheRunsDirectorySaysWhichCheckpointToOpen) {
  const std::string run = kTrainer.root() + "/checkpoint";
  const CommandResult latest = reshard_cli({"latest", run});
  EXPECT_EQ(latest.exit_code, 0) << latest.err;
  EXPECT_EQ(latest.out, kTrainer.path() + "\n");
  const CommandResult inspected = reshard_cli({"inspect", run});
  EXPECT_EQ(inspected.exit_code, 4);
  EXPECT_THAT(inspected.err, HasSubstr("the newest complete one is " + kTrainer.path()));
}

TEST(Identity, TheNewestCompleteStepIsFoundByItsNumber) {
  const TempDir dir;
  for (const char* step : {"step-900", "step-1000", "step-1100"})
    fs::copy(sample("tp8") + "/checkpoint", dir / step, fs::copy_options::recursive);
  fs::remove(dir / "step-1100/.metadata");
  EXPECT_EQ(reshard_cli({"latest", dir.path()}).out, dir / "step-1000" + "\n");
  const CommandResult all = reshard_cli({"latest", dir.path(), "--all"});
  EXPECT_THAT(all.out, AllOf(HasSubstr("step-900   complete\n"), HasSubstr(".metadata is missing")));
  fs::remove_all(dir / "step-1000");
  fs::remove_all(dir / "step-900");
  EXPECT_EQ(reshard_cli({"latest", dir.path()}).exit_code, 3);
  const CommandResult none = reshard_cli({"latest", dir.path(), "--all"});
  EXPECT_EQ(none.exit_code, 3);
  EXPECT_THAT(none.out, HasSubstr("step-1100   "));
  EXPECT_THAT(none.err, HasSubstr("of 1 checkpoint: none of them complete"));
}

// Lightning numbers a run's trials, and the steps of each begin anew. A monitored value may be in front of the step.
TEST(Identity, TheNewestStepOfTheNewestVersionOfALightningRunIsFound) {
  const TempDir dir;
  const std::string logs = dir / "lightning_logs";
  for (const char* step : {"version_9/checkpoints/epoch=0-step=400.ckpt", "version_10/checkpoints/epoch=0-step=8.ckpt",
                           "version_10/checkpoints/epoch=0-step=20.ckpt"}) {
    fs::create_directories(fs::path(logs + "/" + step).parent_path());
    fs::copy(sample("colossalai/unsharded_tied.bin"), logs + "/" + step);
  }
  const std::string newest = logs + "/version_10/checkpoints/epoch=0-step=20.ckpt";
  for (const std::string& run : {dir.path(), logs, logs + "/version_10"})
    EXPECT_EQ(reshard_cli({"latest", run}).out, newest + "\n") << run;
  EXPECT_EQ(reshard_cli({"latest", logs + "/version_9"}).out,
            logs + "/version_9/checkpoints/epoch=0-step=400.ckpt" + "\n");
  const CommandResult inspected = reshard_cli({"inspect", dir.path()});
  EXPECT_THAT(inspected.err, HasSubstr("a directory of 3 checkpoints; the newest complete one is " + newest));
  for (const char* step : {"run/loss=2.5-step=10", "run/loss=1.5-step=20"}) {
    fs::create_directories(dir / step);
    fs::copy(sample("tp8") + "/checkpoint", dir / step, fs::copy_options::recursive);
  }
  EXPECT_EQ(reshard_cli({"latest", dir / "run"}).out, dir / "run/loss=1.5-step=20" + "\n");
}

void make_checkpoints(const std::string& run, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    fs::create_directories(fs::path(run) / name);
    fs::copy(sample("tp8") + "/hf.safetensors", fs::path(run) / name / "model.safetensors");
  }
}

// A program needs the bytes of the name, a terminal must not get its control characters.
TEST(Identity, TheNewestIsMadePrintableForATerminal) {
  const TempDir dir;
  make_checkpoints(dir / "run", {"step-\x1b]0;title\a-100"});
  EXPECT_EQ(reshard_cli({"latest", dir / "run"}).out, dir / "run/step-\x1b]0;title\a-100" + "\n");
  if (!fs::exists("/usr/bin/script")) GTEST_SKIP() << "needs script(1)";
  const CommandResult shown =
      run_command({"/usr/bin/script", "-qec", RESHARD_BINARY " latest " + (dir / "run"), "/dev/null"});
  EXPECT_THAT(shown.out, HasSubstr("step-"));
  EXPECT_THAT(shown.out, Not(HasSubstr("\x1b]0;")));
}

// Trainers write "final" at the end, and a run that is resumed afterwards saves newer steps.
TEST(Identity, ANameWithoutANumberIsOlderThanSteps) {
  const TempDir dir;
  make_checkpoints(dir / "run", {"checkpoint_6", "checkpoint_10", "final", "merged-v2"});
  EXPECT_EQ(reshard_cli({"latest", dir / "run"}).out, dir / "run/checkpoint_10" + "\n");
  EXPECT_THAT(reshard_cli({"inspect", dir / "run"}).err,
              HasSubstr("a directory of 4 checkpoints; the newest complete one is " + dir / "run/checkpoint_10"));
  make_checkpoints(dir / "dates", {"2026-01-31", "2026-02-01", "best"});
  EXPECT_EQ(reshard_cli({"latest", dir / "dates"}).out, dir / "dates/2026-02-01" + "\n");
  make_checkpoints(dir / "ckpt_2", {"9", "10"});
  EXPECT_EQ(reshard_cli({"latest", dir / "ckpt_2"}).out, dir / "ckpt_2/10" + "\n");
  make_checkpoints(dir / "trials", {"trial_9", "trial_10", "best"});
  EXPECT_EQ(reshard_cli({"latest", dir / "trials"}).out, dir / "trials/trial_10" + "\n");
  make_checkpoints(dir / "nested", {"epoch_1/step_8", "epoch_1/step_10"});
  EXPECT_EQ(reshard_cli({"latest", dir / "nested"}).out, dir / "nested/epoch_1/step_10" + "\n");
}

// Checkpoints next to each other that are no steps: the parts of a pipeline, or an actor and its critic.
TEST(Identity, OfModelsNextToEachOtherNoneIsTheNewest) {
  const TempDir dir;
  make_checkpoints(dir / "rl", {"_actor", "_critic"});
  make_checkpoints(dir / "zoo", {"resnet", "vit16", "bert2"});
  make_checkpoints(dir / "pipeline", {"text_encoder", "text_encoder_2", "unet"});
  write_file(dir / "pipeline/model_index.json", "{}");
  make_checkpoints(dir / "modules", {"0_Transformer", "2_Dense"});
  write_file(dir / "modules/modules.json", "[]");
  make_checkpoints(dir / "run",
                   {"checkpoint-500/unet", "checkpoint-500/vae", "checkpoint-1000/unet", "checkpoint-1000/unet_2"});
  for (const auto& [run, names] :
       std::map<std::string, std::vector<std::string>>{{"zoo", {"resnet", "bert2", "vit16"}},
                                                       {"rl", {"_actor", "_critic"}},
                                                       {"pipeline", {"text_encoder", "unet", "text_encoder_2"}},
                                                       {"modules", {"0_Transformer", "2_Dense"}},
                                                       {"run/checkpoint-1000", {"unet", "unet_2"}}}) {
    std::string expected = dir / run + ": a directory of several models; name one of them: ";
    for (const std::string& name : names)
      expected += (name == names.front() ? "" : ", ") + dir / (run + "/").append(name);
    for (const char* const command : {"latest", "inspect"}) {
      const CommandResult r = reshard_cli({command, dir / run});
      EXPECT_EQ(r.exit_code, 4) << r.out;
      EXPECT_EQ(r.out, "");
      EXPECT_THAT(r.err, HasSubstr(expected));
    }
  }
  const std::string last = dir / "run/checkpoint-1000/unet";
  const std::string expected =
      "the newest of 4 checkpoints are several models; name one of them: " + last + ", " + last;
  EXPECT_THAT(reshard_cli({"latest", dir / "run"}).err, HasSubstr(dir / "run: " + expected + "_2"));
  EXPECT_THAT(reshard_cli({"inspect", dir / "run"}).err, HasSubstr(dir / "run: " + expected + "_2"));
  const CommandResult all = reshard_cli({"latest", dir / "run", "--all"});
  EXPECT_EQ(all.exit_code, 4);
  EXPECT_THAT(all.out, HasSubstr(last + "   complete\n"));
  const CommandResult json = reshard_cli({"latest", dir / "run", "--json"});
  EXPECT_EQ(json.exit_code, 4);
  EXPECT_THAT(json.out, AllOf(HasSubstr("\"newest\": null"), HasSubstr("\"problem\": \"" + expected + "_2\""),
                              HasSubstr("\"path\": \"" + last + "\"")));
}

TEST(Identity, APipelineOfOneModelHasANewest) {
  const TempDir dir;
  make_checkpoints(dir / "ddpm", {"unet"});
  write_file(dir / "ddpm/model_index.json", "{}");
  EXPECT_EQ(reshard_cli({"latest", dir / "ddpm"}).out, dir / "ddpm/unet" + "\n");
  EXPECT_THAT(reshard_cli({"inspect", dir / "ddpm"}).err,
              HasSubstr("a directory of 1 checkpoint; the newest complete one is " + dir / "ddpm/unet"));
}

TEST(Identity, TheNewestFileOfAComposerRunIsFound) {
  const TempDir dir;
  for (const char* file : {"ep0-ba9-rank0.pt", "ep0-ba10-rank0.pt", "ep0-ba2-rank0.pt"})
    fs::copy(sample("colossalai/unsharded_tied.bin"), dir / file);
  fs::create_symlink("ep0-ba10-rank0.pt", dir / "latest-rank0.pt");
  EXPECT_EQ(reshard_cli({"latest", dir.path()}).out, dir / "ep0-ba10-rank0.pt" + "\n");
  EXPECT_THAT(reshard_cli({"inspect", dir.path()}).err,
              HasSubstr("a directory of 3 checkpoints; the newest complete one is " + dir / "ep0-ba10-rank0.pt"));
}

TEST(Identity, AFileOfADcpCheckpointStandsForAllOfIt) {
  for (const char* file : {"/.metadata", "/__0_0.distcp"}) {
    const CommandResult r = reshard_cli({"inspect", sample("tp8") + "/checkpoint" + file});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("PyTorch DCP, complete"));
  }
}

// A model whose names match no family.
struct Stranger {
  TempDir dir;
  std::string path = dir / "ck/checkpoint", config = dir / "ck/config.json", out = dir / "out";
  explicit Stranger(const std::string& suffix = "") {
    fs::create_directory(dir / "ck");
    TensorValues tensors;
    for (const char* name : {"blocks.0.w", "blocks.1.w"})
      tensors[name + suffix] = {DType::kFloat32, {2, 2}, std::string(16, 'x')};
    write_dcp(tensors, path, *Mesh::parse("dp_shard=2"));
    write_file(config, read_file(sample("tp8") + "/config.json"));
  }
};

TEST(Identity, WhatIsNoKnownModelIsRefusedBeforeAnythingIsWritten) {
  const Stranger s;
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"--to", "hf"}, {"--to", "bin"}, {"--to", "dcp", "--names", "hf"}}) {
    std::vector<std::string> args = {"convert", s.path, s.out};
    args.insert(args.end(), options.begin(), options.end());
    const CommandResult r = reshard_cli(args);
    EXPECT_EQ(r.exit_code, 4) << r.out << r.err;
    EXPECT_THAT(r.err, AllOf(HasSubstr("'blocks.0.w'"), HasSubstr("is of family llama"), HasSubstr("--family none")));
    EXPECT_FALSE(fs::exists(s.out));
  }
  // verify reports it too, unless it is told to ignore names.
  const CommandResult verified = reshard_cli({"verify", s.path});
  EXPECT_EQ(verified.exit_code, 1) << verified.out;
  EXPECT_THAT(verified.out,
              AllOf(HasSubstr("is of family llama, and no tensor name matches it"), HasSubstr("1 warning")));
  EXPECT_EQ(reshard_cli({"verify", s.path, "--family", "none"}).exit_code, 0);
  // With --family none the output keeps the names with a note, and the config of another model is not copied.
  const CommandResult r = reshard_cli({"convert", s.path, s.out, "--to", "hf", "--family", "none"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("nothing was compared with a model"));
  EXPECT_FALSE(fs::exists(s.out + "/config.json"));
  EXPECT_EQ(reshard_cli({"convert", s.path, s.dir / "dcp", "--to", "dcp"}).exit_code,
            0);  // which makes no claim about a model
}

TEST(Identity, AdaptersAreNoModelUntilTheyAreMerged) {
  const Stranger s(".lora_A.default.weight");
  const CommandResult r = reshard_cli({"convert", s.path, s.out, "--to", "hf"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("adapters"));
}

TEST(Identity, TensorsThatTheConfigDoesNotDescribeAreNamed) {
  const TempDir dir;
  TensorValues tensors = load_checkpoint(sample("tp8") + "/hf.safetensors");
  tensors["model.layers.0.self_attn.q_proj.bias"] = {DType::kBFloat16, {64}, std::string(128, 'x')};
  fs::create_directory(dir / "ck");
  write_dcp(tensors, dir / "ck/checkpoint", *Mesh::parse("dp_shard=2"));
  write_file(dir / "ck/config.json", read_file(sample("tp8") + "/config.json"));
  const CommandResult r = reshard_cli({"convert", dir / "ck/checkpoint", dir / "out", "--to", "hf"});
  EXPECT_EQ(r.exit_code, 3) << r.out << r.err;
  EXPECT_THAT(r.err, AllOf(HasSubstr("q_proj.bias"), HasSubstr("does not describe"), HasSubstr("--exclude")));
}

TEST(Identity, WithoutAConfigItIsSaidThatNothingTellsTheWholeModel) {
  const TempDir dir;
  fs::create_directory(dir / "hf");
  fs::copy(sample("tp8") + "/hf.safetensors", dir / "hf/model.safetensors");
  const CommandResult r = reshard_cli({"convert", dir / "hf", dir / "out", "--to", "bin"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("but the model may be incomplete"));
}

// torchtitan has no names for the scales; its loader would read float8 values as weights.
TEST(Identity, ScaledMatricesAreNotWrittenUnderNamesThatHaveNoScales) {
  const TempDir dir;
  write_file(dir / "config.json", R"({"model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32,
      "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 4, "q_lora_rank": null, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
      "v_head_dim": 6, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
      "num_nextn_predict_layers": 0, "dtype": "bfloat16",
      "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}})");
  const CommandResult made = reshard_cli({"synth", dir / "fp8", "--config", dir / "config.json", "--to", "hf"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const CommandResult r = reshard_cli({"convert", dir / "fp8", dir / "out", "--to", "dcp", "--names", "torchtitan"});
  EXPECT_EQ(r.exit_code, 4) << r.out << r.err;
  EXPECT_THAT(r.err, AllOf(HasSubstr("quantized values or their scales"), HasSubstr("torchtitan names")));
}

// torch.float4_e2m1fn_x2 has two values per byte. It is copied as bytes, to formats that have a name for it.
TEST(Identity, PackedFourBitFloatsAreCarried) {
  const TempDir dir;
  write_dcp({{"w", {DType::kFloat4E2M1x2, {4, 6}, std::string(24, '\x35')}}}, dir / "ck", *Mesh::parse("dp_shard=2"));
  EXPECT_THAT(reshard_cli({"inspect", dir / "ck"}).out, HasSubstr("f4e2m1x2  [4, 6]"));
  const CommandResult r = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "dcp", "--mesh", "dp_shard=3"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(dir / "out") == load_checkpoint(dir / "ck"));
  // safetensors counts the values: [4, 12] (torch 2.15 and safetensors 0.8 write the same header).
  const CommandResult hf = reshard_cli({"convert", dir / "ck", dir / "hf", "--to", "hf", "--family", "none"});
  EXPECT_EQ(hf.exit_code, 0) << hf.err;
  EXPECT_THAT(read_file(dir / "hf/model.safetensors"),
              HasSubstr(R"("w":{"dtype":"F4","shape":[4,12],"data_offsets":[0,24]})"));
  EXPECT_TRUE(load_checkpoint(dir / "hf") == load_checkpoint(dir / "ck"));
  EXPECT_EQ(reshard_cli({"verify", dir / "hf", "--against", dir / "ck"}).exit_code, 0);
  for (const char* format : {"hdf5", "hdf5-view", "orbax"}) {
    const CommandResult refused = reshard_cli({"convert", dir / "hf", dir / "other", "--to", format});
    EXPECT_EQ(refused.exit_code, 4) << format;
    EXPECT_THAT(refused.err, AllOf(HasSubstr("tensor 'w': "), HasSubstr("float4_e2m1fn_x2"))) << format;
  }
}

TEST(Identity, ConfigsOfUnknownModelsAreInNobodysWay) {
  const TempDir dir;
  fs::create_directory(dir / "t5");
  fs::copy(sample("tp8") + "/hf.safetensors", dir / "t5/model.safetensors");
  write_file(dir / "t5/config.json", R"({"model_type": "t5", "d_model": 64})");
  const CommandResult r = reshard_cli({"convert", dir / "t5", dir / "dcp", "--to", "dcp"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(reshard_cli({"verify", dir / "t5", "--against", dir / "dcp"}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"diff", dir / "t5", dir / "dcp"}).exit_code, 0);
  const CommandResult copied = reshard_cli({"convert", dir / "t5", dir / "hf", "--to", "hf"});
  EXPECT_EQ(copied.exit_code, 0) << copied.err;
  EXPECT_THAT(copied.out, HasSubstr("no tensor has a name of T5Model"));
  EXPECT_TRUE(fs::exists(dir / "hf/config.json"));
}

// A trainer's save of a model without a family. The numbers in its config confirm the model.
class Outsider {
 public:
  explicit Outsider(const std::string& wrapper, const std::vector<std::string>& names = kNames) {
    TensorValues tensors;
    for (const std::string& name : names) tensors[wrapper + name] = value_of(name);
    fs::create_directory(dir / "ck");
    write_dcp(tensors, dir / "ck/checkpoint", *Mesh::parse("dp_shard=2"));
    config(R"({"model_type": "newest", "architectures": ["NewestForCausalLM"], "vocab_size": 64, "d_model": 8,
               "n_layer": 2})");
  }
  void config(const std::string& text) const { write_file(dir / "ck/config.json", text); }
  CommandResult convert(std::vector<std::string> options = {}) const {
    options.insert(options.begin(), {"convert", checkpoint, out, "--to", "hf"});
    return reshard_cli(options);
  }
  static TensorValue value_of(const std::string& name) {
    const Index rows = name.find(".mix.") == std::string::npos ? 64 : 8;
    return {DType::kBFloat16, {rows, 8}, std::string(static_cast<std::size_t>(rows) * 16, name[name.size() / 2])};
  }

  inline static const std::vector<std::string> kNames = {"backbone.wte.weight", "backbone.blocks.0.mix.weight",
                                                         "backbone.blocks.1.mix.weight", "lm_head.weight"};
  const TempDir dir;
  const std::string checkpoint = dir / "ck/checkpoint", out = dir / "out";
};

TEST(Identity, AModelOfNoFamilyIsWrittenWhereItsConfigConfirmsIt) {
  for (const std::string wrapper : sampled({"", "app.model.", "model.", "module.", "state_dict."}, 3)) {
    const Outsider m(wrapper);
    const CommandResult r = m.convert();
    ASSERT_EQ(r.exit_code, 0) << r.out << r.err;
    EXPECT_THAT(r.out, AllOf(HasSubstr("checked d_model, vocab_size and n_layer; not checked: other names and shapes"),
                             HasSubstr("no family describes model_type 'newest'")));
    TensorValues expected;
    for (const std::string& name : Outsider::kNames) expected[name] = Outsider::value_of(name);
    EXPECT_TRUE(load_checkpoint(m.out) == expected) << wrapper;
    EXPECT_EQ(read_file(m.out + "/config.json"), read_file(m.dir / "ck/config.json"));
    const CommandResult against = reshard_cli({"verify", m.checkpoint, "--against", m.out});
    EXPECT_EQ(against.exit_code, 0) << against.out;
    EXPECT_THAT(against.out, HasSubstr("4 of 4 tensors"));
    EXPECT_EQ(reshard_cli({"diff", m.checkpoint, m.out}).exit_code, 0);
  }
}

// A state_dict has all names of tied tensors and files have one of them. Transformers may also use other names in files
// than in memory.
TEST(Identity, AModelOfNoFamilyIsTheSameUnderTheNamesOfItsFiles) {
  const Outsider m("app.model.");
  const std::string files_of_it = m.dir / "files";
  const auto files = [&](const std::string& begin, bool has_head, char value_of_mix) {
    TensorValues tensors;
    for (const std::string& name : Outsider::kNames) {
      TensorValue value = Outsider::value_of(name);
      if (name == "lm_head.weight" && !has_head) continue;
      if (name.find(".mix.") != std::string::npos && value_of_mix) value.bytes.assign(value.bytes.size(), value_of_mix);
      tensors[name.starts_with("backbone.") ? begin + name.substr(9) : name] = value;
    }
    fs::remove_all(files_of_it);
    write_dcp(tensors, files_of_it, *Mesh::parse("dp_shard=1"));
  };
  const auto compared = [&](const std::string& command) {
    return command == "diff" ? reshard_cli({"diff", m.checkpoint, files_of_it})
                             : reshard_cli({"verify", m.checkpoint, "--against", files_of_it});
  };
  for (const std::string command : {"diff", "verify"}) {
    files("model.", true, 0);
    CommandResult r = compared(command);
    EXPECT_EQ(r.exit_code, 0) << r.out;
    EXPECT_THAT(r.out, AllOf(HasSubstr("'backbone.*' in "), HasSubstr("is 'model.*' in "), HasSubstr("3 tensors")));
    files("model.", true, 'z');
    EXPECT_EQ(compared(command).exit_code, 1) << "other values";
    files("backbone.", false, 0);
    r = compared(command);
    EXPECT_EQ(r.exit_code, 1) << "nothing else has the head's values";
    EXPECT_THAT(r.out, HasSubstr("'lm_head.weight' is only in"));
  }
}

TEST(Identity, TheSameWeightsOnceMoreAreNoDifferenceWhereTheyMayBeTied) {
  const TempDir dir;
  const auto value = [](char byte) { return TensorValue{DType::kBFloat16, {64, 8}, std::string(1024, byte)}; };
  TensorValues tensors = {{"shared.weight", value('w')}, {"body.blocks.0.mix.weight", value('m')}};
  const auto config = [&](const std::string& tied) {
    for (const char* place : {"a", "b"}) {
      fs::create_directory(dir / place);
      write_file(dir / place + "/config.json",
                 R"({"model_type": "newest", "vocab_size": 64, "d_model": 8)" + tied + "}");
    }
  };
  const auto write = [&](const std::string& place) {
    fs::remove_all(dir / place + "/ck");
    write_dcp(tensors, dir / place + "/ck", *Mesh::parse("dp_shard=1"));
  };
  const auto compared = [&] { return reshard_cli({"diff", dir / "a/ck", dir / "b/ck"}); };
  config("");
  write("b");
  tensors["lm_head.weight"] = tensors["encoder.embed_tokens.weight"] = value('w');
  write("a");
  const CommandResult same = compared();
  EXPECT_EQ(same.exit_code, 0) << same.out;
  EXPECT_THAT(same.out,
              AllOf(HasSubstr("'lm_head.weight', only in "), HasSubstr("the weights of shared.weight once more")));
  config(R"(, "tie_word_embeddings": false)");
  EXPECT_EQ(compared().exit_code, 1) << "the head is another tensor";
  tensors.erase("lm_head.weight");
  write("a");
  EXPECT_EQ(compared().exit_code, 0) << "embeddings are tied all the same";
  tensors["encoder.embed_tokens.weight"] = value('x');
  write("a");
  EXPECT_EQ(compared().exit_code, 1) << "other values";
}

TEST(Identity, AModelOfNoFamilyIsRefusedWhereNothingConfirmsIt) {
  const auto refused = [](const Outsider& m) {
    const CommandResult r = m.convert();
    EXPECT_EQ(r.exit_code, 4) << r.out;
    EXPECT_FALSE(fs::exists(m.out));
  };
  for (const char* other : {R"({"model_type": "newest", "vocab_size": 65, "d_model": 8, "n_layer": 2})",
                            R"({"model_type": "newest", "vocab_size": 64, "d_model": 8, "n_layer": 3})",
                            R"({"model_type": "newest", "d_model": 8, "n_layer": 2})",
                            R"({"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 2,
                                "num_attention_heads": 2, "intermediate_size": 8})"}) {
    const Outsider m("app.model.");
    m.config(other);
    refused(m);
  }
  // Names that no transformers model has: layers next to the embedding; a single module; Megatron's.
  refused(Outsider("app.model.", {"wte.weight", "blocks.0.mix.weight", "blocks.1.mix.weight", "out.weight"}));
  refused(Outsider("model.", {"wte.weight", "blocks.0.mix.weight", "blocks.1.mix.weight", "out.weight"}));
  refused(Outsider("", {"embedding.word_embeddings.weight", "output_layer.weight",
                        "decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"}));
}

// An encoder and a decoder, each with a config of its own inside the model's.
TEST(Identity, AModelOfNoFamilyIsWrittenWhereConfigsOfItsPartsConfirmIt) {
  const std::vector<std::string> names = {"eye.embed.mix.weight",      "eye.blocks.0.mix.weight",   "mouth.wte.weight",
                                          "mouth.blocks.0.mix.weight", "mouth.blocks.1.mix.weight", "output.weight"};
  const auto convert = [&](const std::string& eye, const std::string& mouth) {
    const Outsider m("app.model.", names);
    m.config(R"({"model_type": "pair", "eye": {"model_type": "seer", "hidden_size": 8, )" + eye +
             R"(}, "more": {"mouth": {"model_type": "teller", "d_model": 8, )" + mouth + "}}}");
    const CommandResult r = m.convert();
    EXPECT_EQ(fs::exists(m.out), r.exit_code == 0);
    return r;
  };
  const std::string eye = R"("num_hidden_layers": 1)", mouth = R"("vocab_size": 64, "n_layer": 2)";
  const CommandResult r = convert(eye, mouth);
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out,
              AllOf(HasSubstr("more.mouth.d_model, more.mouth.vocab_size"), HasSubstr("and more.mouth.n_layer;")));
  EXPECT_EQ(convert(R"("num_hidden_layers": 3)", mouth).exit_code, 4);
  EXPECT_EQ(convert(eye, R"("vocab_size": 64, "n_layer": 3)").exit_code, 4);
  EXPECT_EQ(convert(eye, R"("vocab_size": 65, "n_layer": 2)").exit_code, 4);
  EXPECT_EQ(convert(eye + R"(, "vocab_size": 64)", R"("n_layer": 2)").exit_code, 0);  // a part that has all of them
  EXPECT_EQ(convert(R"("vocab_size": 64)", R"("n_layer": 2)").exit_code, 4);          // no part has both
}

TEST(Identity, NamesOfNoFamilyLoseWhatWrapsThem) {
  const Outsider m("her.run.");
  const CommandResult r = m.convert({"--family", "none", "--strip-prefix", "her.run."});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(m.out).contains("backbone.wte.weight"));
  const std::string kept = m.dir / "kept";
  ASSERT_EQ(reshard_cli({"convert", m.checkpoint, kept, "--to", "dcp"}).exit_code, 0);
  EXPECT_TRUE(load_checkpoint(kept).contains("her.run.backbone.wte.weight"));
}

// A truncated vocabulary in a model without a family: the rows of one tensor-parallel rank.
TEST(Identity, ACutVocabularyOfAModelOfNoFamilyIsFound) {
  const Outsider m("app.model.");
  m.config(R"({"model_type": "newest", "vocab_size": 512, "d_model": 8, "n_layer": 2, "num_attention_heads": 8})");
  const CommandResult r = reshard_cli({"verify", m.checkpoint});
  EXPECT_EQ(r.exit_code, 1) << r.out;
  EXPECT_THAT(r.out, AllOf(HasSubstr("64 rows; "), HasSubstr("expects vocab_size = 512"),
                           HasSubstr("64 = 512 / 8: one tensor-parallel rank's rows")));
}

// GPTQ, AWQ and compressed-tensors: a Llama whose tensors are not those of its family's table.
TEST(Identity, AModelQuantizedInAWayThatIsNotKnownIsCopied) {
  const TempDir dir;
  TensorValues tensors;
  const std::string module = "model.layers.0.mlp.up_proj.";
  tensors[module + "qweight"] = {DType::kInt32, {1, 8}, std::string(32, 'q')};
  tensors[module + "qzeros"] = {DType::kInt32, {1, 1}, std::string(4, 'z')};
  tensors[module + "scales"] = {DType::kFloat16, {1, 8}, std::string(16, 's')};
  tensors[module + "g_idx"] = {DType::kInt32, {8}, std::string(32, '\0')};
  tensors["model.embed_tokens.weight"] = {DType::kBFloat16, {64, 8}, std::string(1024, 'e')};
  tensors["lm_head.weight"] = {DType::kBFloat16, {64, 8}, std::string(1024, 'h')};
  write_dcp(tensors, dir / "made", *Mesh::parse("dp_shard=2"));
  ASSERT_EQ(reshard_cli({"convert", dir / "made", dir / "q", "--to", "hf", "--family", "none"}).exit_code, 0);
  write_file(dir / "q/config.json", R"({"model_type": "llama", "vocab_size": 64, "hidden_size": 8,
      "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
      "quantization_config": {"quant_method": "gptq", "bits": 4}})");
  const CommandResult r = reshard_cli({"convert", dir / "q", dir / "out", "--to", "hf"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("no family describes models quantized with gptq"));
  EXPECT_TRUE(load_checkpoint(dir / "out") == tensors);
  ASSERT_EQ(reshard_cli({"convert", dir / "q", dir / "dcp", "--to", "dcp", "--mesh", "dp_shard=2"}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"verify", dir / "q", "--against", dir / "dcp"}).exit_code, 0);
  EXPECT_EQ(
      reshard_cli({"convert", dir / "dcp", dir / "back", "--to", "hf", "--config", dir / "q/config.json"}).exit_code,
      0);
}

// A state_dict of an unknown family is copied unchanged, but its files would have other names for the experts.
TEST(Identity, ExpertsAsTransformersHasThemInMemoryAreTold) {
  const TempDir dir;
  write_dcp({{"trunk.0.experts.gate_up_proj", {DType::kFloat32, {2, 3, 4}, std::string(96, '\x35')}}}, dir / "ck",
            *Mesh::parse("dp_shard=2"));
  const CommandResult r = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "bin", "--family", "none"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("gate_up_proj': all experts in one tensor, as transformers has them in memory"));
}

TEST(Identity, ConfigsOfNoModelAreInNobodysWay) {
  const TempDir dir;
  fs::create_directory(dir / "m");
  fs::copy(sample("tp8") + "/hf.safetensors", dir / "m/model.safetensors");
  int i = 0;
  for (const char* text : {"{}", "[1]", R"({"learning_rate": 0.1, "model_type": null})"}) {
    write_file(dir / "m/config.json", text);
    const std::string to = dir / ("dcp" + std::to_string(i++));
    const CommandResult r = reshard_cli({"convert", dir / "m", to, "--to", "dcp"});
    EXPECT_EQ(r.exit_code, 0) << text << r.err;
    EXPECT_THAT(r.out, HasSubstr("Llama, Hugging Face names"));
    EXPECT_THAT(r.out, HasSubstr("has no model_type, so it does not describe a model and is ignored"));
    EXPECT_EQ(reshard_cli({"verify", dir / "m", "--against", to}).exit_code, 0) << text;
    EXPECT_EQ(reshard_cli({"diff", dir / "m", to}).exit_code, 0) << text;
  }
}

TEST(Identity, AConfigOfNoSenseIsAFindingAndInNobodysWayWithoutFamily) {
  const TempDir dir;
  fs::create_directory(dir / "m");
  fs::copy(sample("tp8") + "/hf.safetensors", dir / "m/model.safetensors");
  for (const char* text : {R"({"model_type": "llama"})", R"({"model_type": "lla)", ""}) {
    write_file(dir / "m/config.json", text);
    const CommandResult r = reshard_cli({"verify", dir / "m"});
    EXPECT_EQ(r.exit_code, 1) << r.out;
    EXPECT_THAT(r.out, HasSubstr("convert stops there. Repair it, or give another with --config."));
    EXPECT_EQ(reshard_cli({"convert", dir / "m", dir / "o", "--to", "dcp"}).exit_code, 3);
    EXPECT_EQ(reshard_cli({"verify", dir / "m", "--config", dir / "m/config.json"}).exit_code, 3);
    for (const auto& command : {std::vector<std::string>{"verify", dir / "m", "--against", dir / "m"},
                                std::vector<std::string>{"diff", dir / "m", dir / "m"}}) {
      std::vector<std::string> without = command;
      without.insert(without.end(), {"--family", "none"});
      const CommandResult held = reshard_cli(without);
      EXPECT_EQ(held.exit_code, 0) << held.out << held.err;
    }
  }
}

}  // namespace
}  // namespace reshard::identity_test
