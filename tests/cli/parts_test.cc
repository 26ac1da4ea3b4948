// Tests training states with more than a model and its optimizer: an average of the weights, several models,
// rank-specific state. `--part` selects one part.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "formats/open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::cli_parts_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// Adds the tensors of a Llama under a prefix. `mark` is the first byte of each.
void add_model(TensorValues& values, const std::string& prefix, char mark) {
  for (auto& [name, value] : load_checkpoint(sample("tp8") + "/full.safetensors")) {
    TensorValue marked = value;
    marked.bytes[0] = mark;
    values[prefix + name] = std::move(marked);
  }
}

// A checkpoint "ck/checkpoint" with these tensors, next to the model's config.
struct SavedState {
  TempDir dir;
  std::string path = dir / "ck/checkpoint", out = dir / "out";
  explicit SavedState(const TensorValues& values) {
    fs::create_directory(dir / "ck");
    write_dcp(values, path, *Mesh::parse("dp_shard=2"));
    write_file(dir / "ck/config.json", read_file(sample("tp8") + "/config.json"));
  }
  CommandResult convert(std::vector<std::string> options) const {
    options.insert(options.begin(), {"convert", path, out, "--force"});
    return reshard_cli(options);
  }
};

// {"model": ..., "ema": AveragedModel(model), "optimizer": ...}
TensorValues with_average(const std::string& model, const std::string& ema) {
  TensorValues values;
  add_model(values, model, 'm');
  add_model(values, ema, 'e');
  for (auto& [name, value] : load_checkpoint(sample("tp8") + "/full.safetensors"))
    values["optimizer.state." + name + ".exp_avg"] = value;
  return values;
}

// Returns an object's value as inspect shows it.
std::string object_of(const std::string& path, const std::string& name) {
  const auto open = open_checkpoint(path);
  if (!open) return open.error().message();
  for (const Blob& blob : open->reader->catalog().blobs)
    if (blob.name == name) return open->reader->describe(blob);
  return "none";
}

// torch finds a parameter's group by the parameter's name, so the group lists the name in the output.
TEST(Parts, GroupsOfAnOptimizerListParametersByTheirNewNames) {
  const TempDir dir;
  const std::string source = test_data("runs/tutorial_app_state/checkpoint");
  EXPECT_THAT(object_of(source, "app.optim.param_groups.0.params"), HasSubstr("'layers.0.attention.wq.weight'"));
  const auto list_of = [&](const std::string& from, const std::string& to, const std::string& names) {
    const CommandResult r = reshard_cli({"convert", from, dir / to, "--to", to.starts_with("h5") ? "hdf5" : "dcp",
                                         "--names", names, "--config", source + "/../config.json", "-q"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    return object_of(dir / to, "optimizer.param_groups.0.params");
  };
  const std::string hf = list_of(source, "hf", "hf");
  EXPECT_THAT(hf, HasSubstr("['model.embed_tokens.weight', 'model.layers.0.self_attn.q_proj.weight', "));
  EXPECT_THAT(list_of(source, "h5", "hf"), hf);
  // Three parts of a tensor are stored once when packed and separately when unpacked.
  const std::string packed = list_of(dir / "hf", "packed", "megatron");
  EXPECT_THAT(packed, HasSubstr("'decoder.layers.0.self_attention.linear_qkv.weight', 'decoder.layers.0.self_"));
  EXPECT_THAT(list_of(dir / "packed", "apart", "hf"), HasSubstr("'model.layers.0.self_attn.v_proj.weight'"));
}

TEST(Parts, StateOfNoParameterIsToldWhereTheModelIsRenamed) {
  TensorValues values = with_average("model.", "ema.");
  const SavedState whole(values);
  EXPECT_THAT(whole.convert({"--to", "dcp", "--names", "hf"}).out, Not(HasSubstr("without a parameter")));
  auto moved = values.extract("optimizer.state.layers.0.attention.wq.weight.exp_avg");
  ASSERT_FALSE(moved.empty());
  moved.key() = "optimizer.state.odd.layers.0.attention.wq.weight.exp_avg";
  values.insert(std::move(moved));
  const SavedState odd(values);
  const CommandResult r = odd.convert({"--to", "dcp", "--names", "hf"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out + r.err,
              HasSubstr("Optimizer state without a parameter in the model, 1 tensor "
                        "('optimizer.state.odd.layers.0.attention.wq.weight.exp_avg'), keeps its names"));
}

TEST(Parts, AnAverageOfTheWeightsIsAPartOfItsOwn) {
  for (const auto& [model, ema] :
       {std::pair("model.", "ema."), std::pair("", "model_ema."), std::pair("app.model.", "app.ema_model.module."),
        std::pair("model.net.", "model.ema."), std::pair("state.model.", "state.ema_state_dict.")}) {
    const SavedState run(with_average(model, ema));
    const CommandResult inspected = reshard_cli({"inspect", run.path});
    EXPECT_THAT(inspected.out, AllOf(HasSubstr("model       39 tensors"), HasSubstr("ema with prefix '"),
                                     HasSubstr("an average of the model's weights")))
        << model << " " << ema;
    ASSERT_EQ(run.convert({"--to", "hf"}).exit_code, 0) << model << " " << ema;
    EXPECT_EQ(load_checkpoint(run.out).at("model.norm.weight").bytes[0], 'm');
    const CommandResult taken = run.convert({"--to", "hf", "--part", "ema"});
    ASSERT_EQ(taken.exit_code, 0) << model << " " << ema << taken.err;
    EXPECT_THAT(taken.out, HasSubstr("39 of 39 tensors of "));
    const TensorValues average = load_checkpoint(run.out);
    EXPECT_EQ(average.size(), 39u);
    EXPECT_EQ(average.at("model.norm.weight").bytes[0], 'e');
    ASSERT_EQ(run.convert({"--to", "hf", "--part", "ema", "--family", "none"}).exit_code, 0);
    const TensorValues unnamed = load_checkpoint(run.out);
    EXPECT_EQ(unnamed.size(), 39u);
    for (const auto& [name, value] : unnamed) EXPECT_EQ(value.bytes[0], 'e') << name;
  }
}

// Uses the words of PyTorch's tutorial, {"model_state_dict": model.state_dict(), "optimizer_state_dict":
// optimizer.state_dict()}, of Lightning's .ckpt and of others. The state of numbered parameters has more tensors than
// the model.
TEST(Parts, OptimizersAreKnownByTheWordsThatPeopleUse) {
  for (const auto& [model, optimizer] :
       {std::pair("model_state_dict.", "optimizer_state_dict."), std::pair("state_dict.model.", "optimizer_states.0."),
        std::pair("state.net.", "state.opt."), std::pair("net.", "optim_state_dict."),
        std::pair("policy.", "optimizers.1.")}) {
    TensorValues values;
    add_model(values, model, 'm');
    std::size_t number = 0;
    for (const auto& [name, value] : load_checkpoint(sample("tp8") + "/full.safetensors")) {
      for (const std::string moment : {".exp_avg", ".exp_avg_sq", ".max_exp_avg_sq"})
        values[optimizer + ("state." + std::to_string(number)) + moment] = value;
      ++number;
    }
    const SavedState run(values);
    EXPECT_THAT(reshard_cli({"inspect", run.path}).out,
                AllOf(HasSubstr("model       39 tensors"), HasSubstr("optimizer   117 tensors"),
                      HasSubstr("optimizer with prefix '" + std::string(optimizer) + "'")));
    const CommandResult converted = run.convert({"--to", "hf"});
    ASSERT_EQ(converted.exit_code, 0) << optimizer << ": " << converted.err;
    EXPECT_THAT(converted.out, HasSubstr("39 of 39 tensors of "));
    EXPECT_EQ(load_checkpoint(run.out).size(), 39u);
    ASSERT_EQ(run.convert({"--to", "dcp", "--mesh", "dp_shard=3"}).exit_code, 0);
    EXPECT_EQ(load_checkpoint(run.out), values);
  }
}

TEST(Parts, OnePartIsShownCarriedAndRead) {
  const SavedState run(with_average("model.", "ema."));
  const CommandResult shown = reshard_cli({"inspect", run.path, "--part", "ema"});
  EXPECT_THAT(shown.out, AllOf(HasSubstr("model       39 tensors"), HasSubstr("ema.layers.{0..3}.attention.wq.weight"),
                               Not(HasSubstr("\nmodel.layers")), Not(HasSubstr("\noptimizer"))));
  ASSERT_EQ(run.convert({"--to", "dcp", "--part", "optimizer"}).exit_code, 0);
  for (const auto& [name, value] : load_checkpoint(run.out)) EXPECT_TRUE(name.starts_with("optimizer.state.")) << name;
  const CommandResult carried = run.convert({"--to", "dcp", "--part", "model"});
  EXPECT_THAT(carried.out, HasSubstr("left out: other parts (78 tensors"));
  EXPECT_EQ(load_checkpoint(run.out).size(), 39u);
  const CommandResult verified =
      reshard_cli({"verify", run.path, "--part", "ema", "--bytes", "--config", run.dir / "ck/config.json", "--json"});
  const Json json = *parse_json(verified.out, "out");
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
  const auto tensors = *json.get_array("tensors");
  ASSERT_EQ(tensors.size(), 39u);
  for (const Json& t : tensors) EXPECT_TRUE(t.get_string("name")->starts_with("ema."));
}

TEST(Parts, ADamagedAverageIsFoundWhereItIsAskedAbout) {
  TensorValues values = with_average("model.", "ema.");
  values.erase("ema.layers.2.attention.wq.weight");
  const SavedState run(values);
  EXPECT_EQ(reshard_cli({"verify", run.path, "--config", run.dir / "ck/config.json"}).exit_code, 0);
  const CommandResult r = reshard_cli({"verify", run.path, "--config", run.dir / "ck/config.json", "--part", "ema"});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(r.out, HasSubstr("model.layers.2.self_attn.q_proj.weight: is missing"));
  EXPECT_EQ(run.convert({"--to", "hf", "--part", "ema"}).exit_code, 3);
}

TEST(Parts, SeveralModelsAreToldApartAndNoneIsGuessed) {
  TensorValues values;
  add_model(values, "actor.", 'a');
  add_model(values, "critic.model.", 'c');
  values.erase("critic.model.output.weight");  // so that the actor has more names than the critic
  const SavedState run(values);
  const CommandResult refused = run.convert({"--to", "hf"});
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_THAT(refused.err, HasSubstr("it contains several models; add --part actor, or --part critic"));
  EXPECT_FALSE(fs::exists(run.out));
  const CommandResult inspected = reshard_cli({"inspect", run.path});
  EXPECT_THAT(inspected.out, AllOf(HasSubstr("actor with prefix 'actor.'"), HasSubstr("critic with prefix 'critic.'")));
  const CommandResult verified = reshard_cli({"verify", run.path, "--config", run.dir / "ck/config.json"});
  EXPECT_EQ(verified.exit_code, 4);
  EXPECT_THAT(verified.err, HasSubstr("add --part actor, or --part critic"));
  const CommandResult taken = run.convert({"--to", "hf", "--part", "actor"});
  ASSERT_EQ(taken.exit_code, 0) << taken.err;
  EXPECT_EQ(load_checkpoint(run.out).at("model.norm.weight").bytes[0], 'a');
  const CommandResult critic = reshard_cli(
      {"verify", run.path, "--config", run.dir / "ck/config.json", "--part", "critic", "--fail-on", "error"});
  EXPECT_THAT(critic.out, HasSubstr("lm_head.weight: is missing"));
}

// Lightning's EMAWeightAveraging saves the average where the model is expected, and the model next to it.
TEST(Parts, TheErrorAboutTwoModelsNamesTheAverageAndTheOptions) {
  const std::string question =
      "it contains several models; add --part current_model_state, or --part state_dict (the average of "
      "current_model_state)\n";
  TensorValues values;
  add_model(values, "current_model_state.model.", 'm');
  add_model(values, "state_dict.model.", 'e');
  values["averaging_state.n_averaged"] = {DType::kInt64, {}, std::string(8, '\1')};
  values["callbacks.History.losses"] = {DType::kFloat32, {7}, std::string(28, 'l')};
  const SavedState run(values);
  const CommandResult inspected = reshard_cli({"inspect", run.path});
  EXPECT_THAT(inspected.out, HasSubstr("state_dict with prefix 'state_dict.': the average of"));
  // Both models are counted, and nothing else.
  EXPECT_THAT(inspected.out,
              AllOf(HasSubstr(" 78 tensors      462,208 parameters "),
                    HasSubstr(" 2 tensors       averaging_state.n_averaged, callbacks.History.losses ")));
  for (const std::vector<std::string>& more : {std::vector<std::string>(), {"--config", run.dir / "ck/config.json"}}) {
    std::vector<std::string> options = {"--to", "hf"};
    options.insert(options.end(), more.begin(), more.end());
    const CommandResult refused = run.convert(options);
    EXPECT_EQ(refused.exit_code, 4);
    EXPECT_THAT(refused.err, AllOf(HasSubstr(question), Not(HasSubstr("--family none"))));
  }
  const CommandResult verified = reshard_cli({"verify", run.path, "--fail-on", "note"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
  EXPECT_THAT(verified.out, HasSubstr("add --part current_model_state, or"));
  for (const auto& [part, mark] : {std::pair("state_dict", 'e'), std::pair("current_model_state", 'm')}) {
    const CommandResult taken = run.convert({"--to", "hf", "--part", part});
    ASSERT_EQ(taken.exit_code, 0) << taken.err;
    EXPECT_EQ(load_checkpoint(run.out).at("model.norm.weight").bytes[0], mark);
  }
}

TEST(Parts, AnAverageAloneIsNotTakenUnasked) {
  TensorValues values;
  add_model(values, "ema.", 'e');
  const SavedState run(values);
  const CommandResult r = run.convert({"--to", "hf"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("it contains an average and no model; add --part ema"));
  EXPECT_EQ(run.convert({"--to", "hf", "--part", "ema"}).exit_code, 0);
}

TEST(Parts, APartThatIsNotThereIsRefusedWithThoseThatAre) {
  const SavedState run(with_average("model.", "ema."));
  for (const char* command : {"inspect", "verify"}) {
    const CommandResult r = reshard_cli({command, run.path, "--part", "swa"});
    EXPECT_EQ(r.exit_code, 2);
    EXPECT_THAT(r.err, HasSubstr("unknown part 'swa'; choose one of: model, optimizer, ema"));
  }
  EXPECT_EQ(run.convert({"--to", "hf", "--part", "ema", "--strip-prefix", "model."}).exit_code, 2);
  EXPECT_EQ(run.convert({"--to", "hf", "--part", "optimizer"}).exit_code, 2);  // no model
}

// dcp.save(..., use_collectives=False) on four ranks (torch 2.15): each rank has its own seed under one name.
const std::string kRankLocal = RESHARD_TEST_DATA "/runs/rank_local/checkpoint";

std::map<std::string, std::string> objects_of(const std::string& path) {
  std::map<std::string, std::string> out;
  const auto open = open_checkpoint(path);
  if (!open) ADD_FAILURE() << open.error().message();
  if (!open) return out;
  for (const Blob& blob : open->reader->catalog().blobs) out[blob.name] = open->reader->describe(blob);
  return out;
}

const std::map<std::string, std::string> kObjectsOfRanks = {{"seed", "100"},
                                                            {"extra_state.rank_1.seed", "101"},
                                                            {"extra_state.rank_2.seed", "102"},
                                                            {"extra_state.rank_3.seed", "103"},
                                                            {"step", "7"},
                                                            {"train_state.epoch", "3"},
                                                            {"train_state.rng", "[0, 1]"},
                                                            {"extra_state.rank_1.train_state.rng", "[1, 2]"},
                                                            {"extra_state.rank_2.train_state.rng", "[2, 3]"},
                                                            {"extra_state.rank_3.train_state.rng", "[3, 4]"}};

TEST(RanksSavedOnTheirOwn, EveryRanksObjectsAreThere) {
  EXPECT_EQ(objects_of(kRankLocal), kObjectsOfRanks);
  const CommandResult inspected = reshard_cli({"inspect", kRankLocal});
  EXPECT_THAT(inspected.out, HasSubstr("each box is stored by 2 ranks: r, r + 2"));
  const CommandResult verified = reshard_cli({"verify", kRankLocal, "--replicas", "--fail-on", "note"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

TEST(RanksSavedOnTheirOwn, TheirObjectsAreCarriedAndTold) {
  const TempDir dir;
  const CommandResult r = reshard_cli({"convert", kRankLocal, dir / "out", "--to", "dcp", "--mesh", "dp_shard=2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out + r.err, HasSubstr("6 objects are specific to one rank ('extra_state.rank_1.seed', "));
  EXPECT_EQ(objects_of(dir / "out"), kObjectsOfRanks);
  const CommandResult verified = reshard_cli({"verify", dir / "out", "--bytes"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
}

TEST(RanksSavedOnTheirOwn, AByteOfNobodyIsStillFound) {
  const TempDir dir;
  fs::copy(kRankLocal, dir / "ck");
  const std::string file = dir / "ck/__2_0.distcp";
  write_file(file, read_file(file) + std::string(64, 'x'));
  const CommandResult r = reshard_cli({"verify", dir / "ck"});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(r.out, HasSubstr("64 B of the data files belong to no tensor or object"));
}

TEST(RanksSavedOnTheirOwn, WithoutTheirFilesLengthsTell) {
  const TempDir dir;
  fs::create_directory(dir / "ck");
  for (int rank = 0; rank < 4; ++rank) {
    const std::string name = "/__" + std::to_string(rank) + ".metadata";
    fs::copy(kRankLocal + name, dir / ("ck" + name));
  }
  const CommandResult r = reshard_cli({"inspect", dir / "ck"});
  EXPECT_THAT(r.out, AllOf(HasSubstr("metadata only"), HasSubstr("objects     4 ")));
}

TEST(Parts, FilesOfRanksAreNoModelsOfARun) {
  for (const char* name : {"torch_checkpointing", "fsdp"})
    for (const auto& entry : fs::directory_iterator(test_data(name))) {
      if (!entry.is_directory()) continue;
      const CommandResult r = reshard_cli({"inspect", entry.path().string()});
      EXPECT_THAT(r.out, Not(HasSubstr("model_1 with prefix"))) << entry.path();
    }
  const TempDir dir;
  for (const char* file : {"model_0.safetensors", "model_1.safetensors"})
    fs::copy(sample("tp8") + "/hf.safetensors", dir / file);
  EXPECT_THAT(reshard_cli({"inspect", dir.path()}).out, Not(HasSubstr("model_1 with prefix")));
}

TEST(Parts, OfOptimizerStateVerifyTellsWhatFitsNoParameterOfAModelOfNoFamily) {
  const TempDir dir;
  const auto value = [](const Dims& shape) {
    return TensorValue{DType::kFloat32, shape, std::string(static_cast<std::size_t>(4 * volume(shape)), '\x3f')};
  };
  TensorValues values;
  for (const std::string name : {"tower.a.weight", "tower.b.weight"}) {
    values["model." + name] = value({8, 4});
    for (const std::string moment : {".exp_avg", ".exp_avg_sq"})
      values["optimizer.state.model." + name + moment] = value({8, 4});
  }
  values["optimizer.param_groups.model.tower.a.weight.lr"] =
      value({});  // a group of the parameters that it trains alone
  write_dcp(values, dir / "sound", *Mesh::parse("dp_shard=2"));
  const CommandResult sound = reshard_cli({"verify", dir / "sound", "--fail-on", "warning"});
  EXPECT_EQ(sound.exit_code, 0) << sound.out << sound.err;
  values["optimizer.state.model.tower.b.weight.exp_avg"] = value({4, 4});
  values.erase("optimizer.state.model.tower.a.weight.exp_avg_sq");
  write_dcp(values, dir / "damaged", *Mesh::parse("dp_shard=2"));
  const CommandResult damaged = reshard_cli({"verify", dir / "damaged"});
  EXPECT_EQ(damaged.exit_code, 1);
  EXPECT_THAT(damaged.out, AllOf(HasSubstr("shape [4, 4]; its parameter has [8, 4]"),
                                 HasSubstr("lacks optimizer state that other parameters have")));
}

// An optimizer saved without its model also has its parameters' names: converts to every convention and back, with and
// without a config, and verify finds nothing.
TEST(Parts, AnOptimizerAloneIsRenamedAsItsParameters) {
  const std::string source = sample("fsdp2_tp2_optim") + "/checkpoint";
  const std::string config = sample("fsdp2_tp2_optim") + "/config.json";
  const TempDir dir;
  const auto convert = [&](const std::string& from, const std::string& to, std::vector<std::string> more) {
    more.insert(more.end(), {"--to", "dcp", "-q"});
    return reshard_cli({"convert", from, dir / to}, more);
  };
  ASSERT_EQ(convert(source, "alone", {"--part", "optimizer"}).exit_code, 0);
  ASSERT_EQ(convert(source, "renamed", {"--part", "optimizer", "--names", "hf"}).exit_code, 0);
  const TensorValues alone = load_checkpoint(dir / "alone"), renamed = load_checkpoint(dir / "renamed");
  const auto expect_sound = [&](const std::string& name) {
    const CommandResult r = reshard_cli({"verify", dir / name, "--fail-on", "warning"});
    EXPECT_EQ(r.exit_code, 0) << name << r.out << r.err;
  };
  expect_sound("alone");
  const std::vector<std::vector<std::string>> choices = {{}, {"--family", "llama"}, {"--part", "optimizer"}};
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const std::string number = std::to_string(i);
    std::vector<std::string> line = choices[i];
    line.insert(line.end(), {"--names", "hf"});
    CommandResult r = convert(dir / "alone", "hf" + number, line);
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_TRUE(load_checkpoint(dir / ("hf" + number)) == renamed);
    expect_sound("hf" + number);
    line.back() = "torchtitan";
    r = convert(dir / ("hf" + number), "back" + number, line);
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_TRUE(load_checkpoint(dir / ("back" + number)) == alone);
  }
  fs::remove(dir / "alone/config.json");
  ASSERT_EQ(convert(dir / "alone", "without", {"--names", "hf", "--config", config}).exit_code, 0);
  EXPECT_TRUE(load_checkpoint(dir / "without") == renamed);
}

// An optimizer whose names match no family is not renamed.
TEST(Parts, AnOptimizerAloneOfNoFamilyIsNotRenamed) {
  const TempDir dir;
  TensorValues values;
  values["optimizer.state.tower.a.weight.exp_avg"] = {DType::kFloat32, {2, 2}, std::string(16, 'a')};
  values["optimizer.state.7.exp_avg"] = {DType::kFloat32, {2, 2}, std::string(16, 'b')};
  write_dcp(values, dir / "alone", Mesh({{"dp_shard", 1}}));
  const CommandResult r = reshard_cli({"convert", dir / "alone", dir / "out", "--to", "dcp", "--names", "hf"});
  EXPECT_EQ(r.exit_code, 4) << r.out;
}

TEST(Parts, OptimizerStateOfAdaptersBelongsToThem) {
  for (const char* name : {"z2_lora", "z2_lora_alone"}) {
    const CommandResult r = reshard_cli({"verify", test_data("deepspeed") + "/" + name});
    EXPECT_THAT(r.out, Not(HasSubstr("belong to"))) << name;
  }
  // FSDP's names under every wrapper, and one that belongs to no parameter.
  for (const std::string wrapper : {"", "model.", "module.", "app.model."}) {
    const TempDir dir;
    TensorValues values;
    const auto add = [&](const std::string& name, const Dims& shape) {
      values[name] = {DType::kFloat32, shape, std::string(static_cast<std::size_t>(4 * volume(shape)), '\x3f')};
    };
    const std::string module = "base_model.model.model.layers.0.self_attn.q_proj.";
    add(wrapper + module + "base_layer.weight", {8, 8});
    for (const std::string matrix : {"lora_A.default.weight", "lora_B.default.weight"}) {
      const Dims shape = matrix.starts_with("lora_A") ? Dims{2, 8} : Dims{8, 2};
      add(wrapper + module + matrix, shape);
      add("optimizer.state." + module + matrix + ".exp_avg", shape);
    }
    write_dcp(values, dir / "sound", Mesh({{"dp_shard", 2}}));
    EXPECT_THAT(reshard_cli({"verify", dir / "sound"}).out, Not(HasSubstr("belong to"))) << wrapper;
    add("optimizer.state.base_model.model.model.layers.9.self_attn.q_proj.lora_A.default.weight.exp_avg", {2, 8});
    write_dcp(values, dir / "orphan", Mesh({{"dp_shard", 2}}));
    EXPECT_THAT(reshard_cli({"verify", dir / "orphan"}).out, HasSubstr("belong to")) << wrapper;
  }
}

// Trainer saves a PEFT model under FSDP without the adapter's name, and its optimizer with it.
TEST(Parts, OptimizerStateMayNameTheAdapter) {
  const TempDir dir;
  const std::string step = dir / "checkpoint-4", module = "base_model.model.";
  fs::create_directory(step);
  TensorValues values, state;
  for (const auto& [name, optimized] :
       {std::pair("model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_A.x.weight"),
        std::pair("model.layers.0.self_attn.q_proj.lora_B.weight", "model.layers.0.self_attn.q_proj.lora_B.x.weight"),
        std::pair("lm_head.weight", "lm_head.modules_to_save.x.weight")}) {
    values["model." + module + name] = {DType::kFloat32, {4, 4}, std::string(64, '\x3f')};
    state["optimizer.state." + module + optimized + ".exp_avg"] = values["model." + module + name];
  }
  write_dcp(values, step + "/pytorch_model_fsdp_0", Mesh({{"dp_shard", 2}}));
  write_dcp(state, step + "/optimizer_0", Mesh({{"dp_shard", 2}}));
  EXPECT_THAT(reshard_cli({"verify", step}).out, Not(HasSubstr("belong to")));
  state["optimizer.state." + module + "model.layers.9.self_attn.q_proj.lora_A.x.weight.exp_avg"] = {
      DType::kFloat32, {4, 4}, std::string(64, '\x3f')};
  fs::remove_all(step + "/optimizer_0");
  write_dcp(state, step + "/optimizer_0", Mesh({{"dp_shard", 2}}));
  EXPECT_THAT(reshard_cli({"verify", step}).out, HasSubstr("belong to"));
}

// The state_dict of torch.optim, as saved by Accelerate without FSDP and by Trainer.
TEST(Parts, OfOptimizerStateUnderNumbersANoteTells) {
  const std::string state = test_data("runs") + "/accelerate_full/checkpoint/checkpoint-2/optimizer.bin";
  const TempDir dir;
  fs::copy(sample("tp8") + "/hf.safetensors", dir / "model.safetensors");
  EXPECT_THAT(reshard_cli({"inspect", dir.path()}).out, Not(HasSubstr("optimizer")));
  for (const char* file : {"optimizer.bin", "optimizer.pt"})
    fs::copy(test_data("runs") + "/numbered_optimizer/whole.pt", dir / file);
  const CommandResult r = reshard_cli({"inspect", dir.path(), "--json"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out,
              HasSubstr("Not read with the model: optimizer.bin, optimizer.pt, optimizer state that is stored under "
                        "parameter numbers without names"));
  // With FSDP's names it is read.
  EXPECT_THAT(reshard_cli({"inspect", fs::path(state).parent_path().string()}).out, Not(HasSubstr("Not read with")));
}

// What NeMo AutoModel saves.
TEST(Parts, ModelAndOptimAreOneStep) {
  const TempDir dir;
  const std::string step = dir / "run/epoch_0_step_2", config = read_file(sample("tp8") + "/config.json");
  fs::create_directories(step + "/losses");
  TensorValues values, state;
  for (const auto& [name, value] : load_checkpoint(sample("tp8") + "/hf.safetensors")) {
    values[name] = value;
    for (const char* const moment : {".exp_avg", ".exp_avg_sq"}) state["optim.state." + name + moment] = value;
  }
  write_dcp(values, step + "/model", *Mesh::parse("dp_shard=2"));
  EXPECT_EQ(reshard_cli({"latest", dir / "run"}).out, step + "/model\n");  // there is no optimizer
  fs::create_directory(step + "/optim");
  EXPECT_THAT(reshard_cli({"latest", dir / "run"}).err,
              HasSubstr("optim: is empty or damaged: the save did not finish"));
  fs::remove(step + "/optim");
  write_dcp(state, step + "/optim", *Mesh::parse("dp_shard=2"));
  EXPECT_EQ(reshard_cli({"latest", dir / "run"}).out, step + "\n");
  EXPECT_THAT(reshard_cli({"inspect", step}).out, HasSubstr("exp_avg, exp_avg_sq"));
  EXPECT_EQ(reshard_cli({"verify", step, "--bytes", "--fail-on", "warning"}).exit_code, 0);

  // Its safetensors have the config in a hidden directory.
  ASSERT_EQ(reshard_cli({"convert", step + "/model", dir / "hf", "--to", "hf", "--names", "hf"}).exit_code, 0);
  fs::remove_all(step + "/model");
  fs::create_directories(step + "/model/.hf_metadata");
  fs::rename(dir / "hf/model.safetensors", step + "/model/shard-00001-model-00001-of-00001.safetensors");
  write_file(step + "/model/.hf_metadata/config.json", config);
  const CommandResult r = reshard_cli({"convert", step, dir / "out", "--to", "hf"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("of " + step + "/model/.hf_metadata/config.json"));
  EXPECT_TRUE(fs::exists(dir / "out/config.json"));
  EXPECT_TRUE(load_checkpoint(dir / "out") == values);
}

// What Composer saves without sharding (composer/checkpoint/save.py): the same states, as files.
TEST(Parts, ModelAndOptimMayBeFiles) {
  const TempDir dir;
  const std::string run = test_data("runs/accelerate_full"), files = run + "/checkpoint/checkpoint-2";
  const std::string step = dir / "run/ep0-ba2";
  fs::create_directories(step + "/model");
  fs::create_directories(step + "/optim");
  fs::copy(files + "/pytorch_model_fsdp.bin", step + "/model/model.pt");
  fs::copy(files + "/optimizer.bin", step + "/optim/optim.pt");
  write_file(step + "/composer_metadata.json", "{}");
  EXPECT_EQ(reshard_cli({"latest", dir / "run"}).out, step + "\n");
  EXPECT_TRUE(load_checkpoint(step) == load_checkpoint(files));
  const CommandResult verified = reshard_cli({"verify", step, "--config", run + "/config.json"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

// What LLaMA-Factory saves with FSDP: get_model_state_dict() and get_optimizer_state_dict(), without words around them.
TEST(Parts, ModelAndOptimizerAreOneStep) {
  const TempDir dir;
  const std::string step = dir / "run/checkpoint-200";
  fs::create_directories(step + "/dataloader");
  TensorValues values, state, both;
  for (const auto& [name, value] : load_checkpoint(sample("tp8") + "/hf.safetensors")) {
    values[name] = both[name] = value;
    state["state." + name + ".exp_avg"] = both["optimizer.state." + name + ".exp_avg"] = value;
  }
  state["param_groups.0.lr"] = both["optimizer.param_groups.0.lr"] = {DType::kFloat32, {}, "rate"};
  write_dcp(values, step + "/model", *Mesh::parse("dp_shard=2"));
  write_dcp(state, step + "/optimizer", *Mesh::parse("dp_shard=2"));
  EXPECT_EQ(reshard_cli({"latest", dir / "run"}).out, step + "\n");
  EXPECT_EQ(reshard_cli({"verify", step, "--bytes", "--fail-on", "warning"}).exit_code, 0);
  ASSERT_EQ(reshard_cli({"convert", step, dir / "dcp", "--to", "dcp", "--mesh", "dp_shard=3"}).exit_code, 0);
  EXPECT_TRUE(load_checkpoint(dir / "dcp") == both);
  ASSERT_EQ(reshard_cli({"convert", step, dir / "hf", "--to", "hf", "--names", "hf"}).exit_code, 0);
  EXPECT_TRUE(load_checkpoint(dir / "hf") == values);

  // Alone, it is no model.
  const std::string alone = reshard_cli({"inspect", step + "/optimizer"}).out;
  EXPECT_THAT(alone, AllOf(HasSubstr("\noptimizer "), Not(HasSubstr("\nmodel "))));
  ASSERT_EQ(reshard_cli({"convert", step + "/optimizer", dir / "alone", "--to", "dcp"}).exit_code, 0);
  EXPECT_TRUE(load_checkpoint(dir / "alone") == state);

  // Without FSDP, the optimizer's directory is no checkpoint.
  fs::remove_all(step + "/optimizer");
  fs::create_directory(step + "/optimizer");
  write_file(step + "/optimizer/state_dict.pt", "");
  EXPECT_EQ(reshard_cli({"latest", dir / "run"}).out, step + "/model\n");
}

// Accelerator.save_state() of two models, as directories, as whole files of FSDP, or as plain files.
struct SavedModels {
  const char* name;
  const char* models[2];
  const char* optimizers[2];
};
class ModelsOfARun : public testing::TestWithParam<SavedModels> {};
INSTANTIATE_TEST_SUITE_P(
    Parts, ModelsOfARun,
    testing::Values(
        SavedModels{"sharded", {"pytorch_model_fsdp_0", "pytorch_model_fsdp_1"}, {"optimizer_0", "optimizer_1"}},
        SavedModels{"plain", {"model.safetensors", "model_1.safetensors"}, {nullptr, nullptr}}),
    [](const auto& param) { return std::string(param.param.name); });

TEST_P(ModelsOfARun, AreToldApartByTheirNumbers) {
  const SavedModels& saved = GetParam();
  const TempDir dir;
  const std::string run = dir / "checkpoint-2", config = dir / "config.json";
  fs::create_directory(run);
  write_file(config, read_file(sample("tp8") + "/config.json"));
  const TensorValues model = load_checkpoint(sample("tp8") + "/hf.safetensors");
  for (int m = 0; m < 2; ++m) {
    const std::string to = run + "/" + saved.models[m];
    TensorValues values, state;
    for (const auto& [name, value] : model) {
      if (m == 1 && name.find(".layers.3.") != std::string::npos) continue;  // so that it is another model
      values["model." + name] = value;
      values["model." + name].bytes[0] = static_cast<char>('0' + m);
      state["optimizer.state." + name + ".exp_avg"] = value;
    }
    if (saved.optimizers[m]) {
      write_dcp(values, to, *Mesh::parse("dp_shard=2"));
      write_dcp(state, run + "/" + saved.optimizers[m], *Mesh::parse("dp_shard=2"));
    } else {
      fs::create_directory(dir / "one");
      write_dcp(values, dir / "one/ck", *Mesh::parse("dp_shard=1"));
      ASSERT_EQ(reshard_cli({"convert", dir / "one/ck", dir / "one/hf", "--to", "hf", "--family", "none"}).exit_code,
                0);
      fs::rename(dir / "one/hf/model.safetensors", to);
      fs::remove_all(dir / "one");
    }
  }
  const CommandResult inspected = reshard_cli({"inspect", run});
  EXPECT_THAT(inspected.out, AllOf(HasSubstr("model_0 with prefix 'model_0.': " + std::string(saved.models[0])),
                                   HasSubstr("model_1 with prefix 'model_1.': " + std::string(saved.models[1]))));
  const CommandResult refused = reshard_cli({"convert", run, dir / "hf", "--to", "hf"});
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_THAT(refused.err, HasSubstr("it contains several models; add --part model_0, or --part model_1"));
  EXPECT_EQ(reshard_cli({"convert", run, dir / "hf", "--to", "hf", "--part", "model_1", "--config", config}).exit_code,
            3);  // it lacks some of its layers
  const CommandResult taken =
      reshard_cli({"convert", run, dir / "hf", "--to", "hf", "--part", "model_0", "--config", config});
  ASSERT_EQ(taken.exit_code, 0) << taken.err;
  const TensorValues written = load_checkpoint(dir / "hf");
  EXPECT_EQ(written.size(), model.size());
  for (const auto& [name, value] : written) EXPECT_EQ(value.bytes[0], '0') << name;
  const CommandResult verified = reshard_cli({"verify", run, "--part", "model_0", "--config", config});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
}

// A value head next to the model, as in TRL's AutoModelForCausalLMWithValueHead, was trained like the model.
TEST(Parts, WeightsBesideTheModelAreNotLeftOutWithoutAWord) {
  TensorValues values;
  add_model(values, "pretrained_model.", 1);
  values["v_head.summary.weight"] = values.begin()->second;
  const SavedState run(values);
  const CommandResult r = run.convert({"--to", "hf", "--strip-prefix", "pretrained_model."});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out + r.err, HasSubstr("'v_head.summary.weight' is left out"));
  const CommandResult asked =
      run.convert({"--to", "hf", "--strip-prefix", "pretrained_model.", "--exclude", "v_head.*"});
  EXPECT_EQ(asked.exit_code, 0) << asked.err;
  EXPECT_THAT(asked.out + asked.err, Not(HasSubstr("v_head")));
}

}  // namespace
}  // namespace reshard::cli_parts_test
