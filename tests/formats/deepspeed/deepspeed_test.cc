#include "formats/deepspeed/deepspeed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <set>

#include "formats/deepspeed/file_set.h"
#include "formats/encoding/zip.h"
#include "formats/open.h"
#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::deepspeed_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

// Saves of DeepSpeed 0.19.8 (make.py and make_autoep.py in tests/data/deepspeed), with digests of what they hold: the
// model under Hugging Face names, and masters and moments ("fp32.NAME", "exp_avg.NAME").
constexpr const char* kSaves[] = {
    "z0",       "z1_universal",  "bf16opt",        "z2_align",     "z2_fp16",      "z2_frozen_tied",
    "z2_moe",   "z2_roundrobin", "z3_frozen_tied", "z3_subgroups", "z3_universal", "pipe",
    "pipe_odd", "pipe_tp2",      "z1_autotp",      "z2_autoep",    "z3_autoep"};

std::string saved(const std::string& name) { return test_data("deepspeed/" + name); }

std::string convert(const std::string& source, const std::string& out, const std::vector<std::string>& more) {
  const CommandResult r = reshard_cli({"convert", source, out, "-q"}, more);
  return r.exit_code == 0 ? "" : r.err;
}

// The optimizer's vectors in a checkpoint under the names of the digests, and all steps.
struct OptimizerState {
  std::map<std::string, std::string> vectors;
  std::map<std::string, std::string> steps;
};
OptimizerState optimizer_of(const TensorValues& values) {
  constexpr std::string_view kPrefix = "optimizer.state.";
  OptimizerState out;
  TensorValues vectors;
  for (const auto& [name, value] : values) {
    if (!name.starts_with(kPrefix)) continue;
    const std::size_t dot = name.rfind('.');
    const std::string parameter = name.substr(kPrefix.size(), dot - kPrefix.size()), state = name.substr(dot + 1);
    if (state == "step")
      out.steps.emplace(parameter, value.bytes);
    else
      vectors.emplace((state == "fp32_param" ? "fp32" : state) + "." + parameter, value);
  }
  out.vectors = digests_of(vectors);
  return out;
}

bool has_name_rules(const std::string& name) { return name != "z2_moe"; }  // no family has DeepSpeed's experts

class Deepspeed : public testing::Test {
 protected:
  std::string copy(const std::string& name) {
    const std::string path = dir_ / name;
    fs::remove_all(path);
    fs::copy(saved(name), path, fs::copy_options::recursive);
    return path;
  }
  // Returns the error of opening, without the directory.
  static std::string error_of(const std::string& path) {
    const auto open = open_checkpoint(path);
    if (open) return "opened";
    return shortened(open.error().message(), path);
  }
  // Rewrites a torch.save file with some members changed.
  static void edit(const std::string& path, const std::function<void(const std::string& name, std::string&)>& change) {
    zip::Builder builder(0);
    {
      const auto file = File::open(path);
      ASSERT_TRUE(file) << path;
      const auto archive = zip::Archive::open(*file, 0, *file->size());
      ASSERT_TRUE(archive) << archive.error().message();
      for (const zip::Entry& e : archive->entries()) {
        std::string payload = *archive->read(e, Index{1} << 24);
        change(e.name, payload);
        builder.add(e.name, payload);
      }
    }
    write_file(path, std::move(builder).finish().before);
  }
  // Changes the first small number after a word in the pickle.
  static void set_number(const std::string& path, const std::string& after, char from, char to) {
    edit(path, [&](const std::string& name, std::string& payload) {
      if (!name.ends_with("data.pkl")) return;
      const std::size_t word = payload.find(after);
      ASSERT_NE(word, std::string::npos) << after;
      const std::size_t at = payload.find(std::string("K") + from, word);
      ASSERT_NE(at, std::string::npos) << after;
      payload[at + 1] = to;
    });
  }

  const TempDir dir_;
};

// Optimizers that are not read are reported.
TEST_F(Deepspeed, TellsOfOptimizersThatItDoesNotRead) {
  const std::string path = copy("z0");
  EXPECT_EQ(reshard_cli({"inspect", path}).out.find("Not read"), std::string::npos);
  const std::string step = path + "/" + read_file(path + "/latest");
  write_file(step + "/expp_rank_0_mp_rank_00_optim_states.pt", "");
  EXPECT_THAT(reshard_cli({"inspect", path}).out, HasSubstr("'" + base_name(step) + "/expp_rank_0_mp_rank_00_optim"));
  edit(step + "/mp_rank_00_model_states.pt", [](const std::string& name, std::string& payload) {
    if (!name.ends_with("data.pkl")) return;
    const std::size_t optimizer = payload.find("optimizer");
    for (const std::string word : {"state", "param_groups"}) {
      const std::size_t at = payload.find(word, optimizer + 9);
      ASSERT_NE(at, std::string::npos);
      payload[at] = 'X';
    }
  });
  EXPECT_THAT(reshard_cli({"inspect", path}).out, HasSubstr("The optimizer's states are not read"));
}

class DeepspeedSave : public Deepspeed, public testing::WithParamInterface<const char*> {
 protected:
  const std::string name_ = GetParam();
};
INSTANTIATE_TEST_SUITE_P(All, DeepspeedSave, testing::ValuesIn(kSaves),
                         [](const auto& save) { return std::string(save.param); });

TEST_P(DeepspeedSave, BecomesTheModel) {
  if (!has_name_rules(name_)) return;
  const std::string out = dir_ / name_;
  ASSERT_EQ(convert(saved(name_), out, {"--to", "hf"}), "");
  EXPECT_EQ(digests_of(load_checkpoint(out)), read_digests(saved(name_) + ".hf.json"));
  for (const std::string& path : {saved(name_), out}) {
    const CommandResult verified = reshard_cli({"verify", path, "--fail-on", "warning"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
}

TEST_P(DeepspeedSave, ItsOptimizerStateFollowsTheParameters) {
  const OptimizerState state = optimizer_of(load_checkpoint(saved(name_)));
  EXPECT_EQ(state.vectors, read_digests(saved(name_) + ".optim.json"));
  const bool has_steps = name_ != "z3_universal";  // ds_to_universal.py leaves out ZeRO 3's
  std::size_t moments = 0;
  for (const auto& [parameter, digest] : state.vectors) moments += parameter.starts_with("exp_avg.") ? 1 : 0;
  EXPECT_EQ(state.steps.size(), has_steps ? moments : 0);
  for (const auto& [parameter, step] : state.steps) EXPECT_EQ(step, std::string("\0\0\x80\x3f", 4)) << parameter;
  ASSERT_EQ(convert(saved(name_), dir_ / name_, {"--to", "dcp"}), "");
  const OptimizerState written = optimizer_of(load_checkpoint(dir_ / name_));
  EXPECT_EQ(written.vectors, state.vectors);
  EXPECT_EQ(written.steps, state.steps);
}

// A pickle that is damaged anywhere is read or refused.
TEST_P(DeepspeedSave, DamagedPicklesDoNoHarm) {
  std::mt19937 random(5);
  const std::string path = copy(name_);
  std::size_t files = 0;
  for (const auto& [file, bytes] : all_files(path)) {
    const std::string base = base_name(file);
    if (!base.ends_with(".pt") || base.find("rank_1") != std::string::npos || base.find("rank_01") != std::string::npos)
      continue;
    if (++files > 4) break;
    for (int i = 0; i < 6; ++i) {
      edit(path + "/" + file, [&](const std::string& member, std::string& payload) {
        if (!member.ends_with("data.pkl")) return;
        for (int n = 0; n < 2; ++n) payload[random() % payload.size()] = static_cast<char>(random());
      });
      (void)error_of(path);
      write_file(path + "/" + file, bytes);
    }
  }
  EXPECT_EQ(error_of(path), "opened");
}

TEST_F(Deepspeed, ExpertsHaveTheirNumbersInTheModel) {
  const TensorValues values = load_checkpoint(saved("z2_moe"));
  TensorValues model;
  for (const auto& [name, value] : values)
    if (!name.starts_with("optimizer.") && !name.starts_with("extra_state.")) model.emplace(name, value);
  EXPECT_EQ(digests_of(model), read_digests(saved("z2_moe") + ".full.json"));
}

// DeepSpeed has each router under two names; with ZeRO 3 only one of them has numbers.
TEST_F(Deepspeed, ExpertsOfAutoEpAreWholeInEveryStage) {
  for (const std::string name : {"z2_autoep", "z3_autoep"}) {
    const TensorValues values = load_checkpoint(saved(name));
    const std::string mlp = "model.layers.0.mlp.";
    EXPECT_EQ(values.at(mlp + "gate.gate.weight").bytes.size(), name == "z2_autoep" ? 64U : 128U) << name;
    EXPECT_EQ(values.at(mlp + "experts.w2.3").shape, (Dims{8, 6})) << name;
    const std::string path = copy(name);
    fs::remove(path + "/global_step1/bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt");
    EXPECT_THAT(error_of(path), HasSubstr("rank_3_mp_rank_00_optim_states.pt")) << name;
  }
  const std::string path = copy("z2_autoep");
  EXPECT_THAT(error_of(path), "opened");
  fs::remove(path + "/global_step1/layer_0_expert_2_mp_rank_00_model_states.pt");
  EXPECT_THAT(error_of(path), HasSubstr("layer_0_expert_2_mp_rank_00_model_states.pt"));
}

TEST_F(Deepspeed, MastersAreTheModelWhereAskedFor) {
  for (const std::string name : {"z2_frozen_tied", "z3_frozen_tied"}) {
    const std::string out = dir_ / name;
    ASSERT_EQ(convert(saved(name), out, {"--to", "hf", "--weights", "master"}), "") << name;
    const auto got = digests_of(load_checkpoint(out)), states = read_digests(saved(name) + ".optim.json"),
               model = read_digests(saved(name) + ".hf.json");
    for (const auto& [parameter, digest] : got) {
      const auto master = states.find("fp32." + parameter);
      EXPECT_EQ(digest, master != states.end() ? master->second : model.at(parameter)) << parameter;
    }
    EXPECT_EQ(got.size(), model.size());
    const auto open = open_checkpoint(saved(name), {.weights = Weights::kMaster});
    ASSERT_TRUE(open) << open.error().message();
    for (const Tensor& t : open->reader->catalog().tensors()) EXPECT_FALSE(t.name.ends_with(".fp32_param")) << t.name;
  }
  const CommandResult none = reshard_cli({"inspect", saved("z0"), "--weights", "master"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_THAT(none.err,
              HasSubstr("there are no masters, because only those that ZeRO and BF16_Optimizer save are read"));
  const CommandResult other = reshard_cli({"inspect", test_data("nanotron/tp2"), "--weights", "master"});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.err, HasSubstr("nanotron stores them once"));
}

// Accelerate saves each model under a tag of its own, and `latest` names the last.
TEST_F(Deepspeed, SaysThatThereAreOtherModels) {
  const std::string path = copy("z2_frozen_tied");
  fs::rename(path + "/global_step1", path + "/pytorch_model");
  write_file(path + "/latest", "pytorch_model");
  EXPECT_THAT(reshard_cli({"inspect", path}).out, Not(HasSubstr("several models")));
  fs::copy(path + "/pytorch_model", path + "/pytorch_model_1");
  write_file(path + "/latest", "pytorch_model_1");
  const CommandResult r = reshard_cli({"convert", path, dir_ / "one", "--to", "hf", "--family", "none"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("warning   This is the last of several models that Accelerate saved here. To open "
                               "another, add its directory to the path: pytorch_model\n"));
  EXPECT_THAT(reshard_cli({"inspect", path + "/pytorch_model"}).out, Not(HasSubstr("several models")));
}

// ZeRO 3 has only masters, which diff rounds as the model was.
TEST_F(Deepspeed, DiffComparesWhatTheModelComputesWith) {
  for (const std::string name : {"z2_frozen_tied", "z3_frozen_tied"}) {
    ASSERT_EQ(convert(saved(name), dir_ / name, {"--to", "hf"}), "") << name;
    for (const std::vector<std::string>& pair :
         {std::vector<std::string>{saved(name), dir_ / name}, std::vector<std::string>{dir_ / name, saved(name)}}) {
      const CommandResult r = reshard_cli({"diff", pair[0], pair[1], "--json"});
      EXPECT_EQ(r.exit_code, 0) << r.out;
      EXPECT_THAT(r.out, Not(HasSubstr(R"("dtype_a": "float32")"))) << name;
    }
    const CommandResult masters = reshard_cli({"diff", saved(name), dir_ / name, "--weights", "master"});
    EXPECT_EQ(masters.exit_code, 1) << masters.out;
    EXPECT_THAT(masters.out, HasSubstr("f32 / bf16")) << name;
  }
}

TEST_F(Deepspeed, TellsOfTheRun) {
  const CommandResult r = reshard_cli({"inspect", saved("z3_frozen_tied")});
  EXPECT_THAT(r.out, AllOf(HasSubstr("DeepSpeed 0.19.8"), HasSubstr("ZeRO 3, 3 data-parallel ranks, step 1"),
                           HasSubstr("extra_state.client_note = 'kept by the user'")));
  const auto open = open_checkpoint(saved("z3_frozen_tied"));
  ASSERT_TRUE(open);
  bool has_group = false;
  for (const Blob& blob : open->reader->catalog().blobs)
    if (blob.name == "optimizer.param_groups.1.params") {
      has_group = true;
      EXPECT_THAT(open->reader->describe(blob), HasSubstr("'model.layers.1.input_layernorm.weight'"));
    }
  EXPECT_TRUE(has_group);
}

TEST_F(Deepspeed, IsOpenedByLatestOrAStep) {
  const std::string path = copy("z3_frozen_tied");
  fs::copy(path + "/global_step1", path + "/global_step2");
  EXPECT_EQ(error_of(path), "opened");
  EXPECT_EQ(error_of(path + "/global_step2"), "opened");
  write_file(path + "/latest", "global_step7\n");
  EXPECT_EQ(error_of(path),
            "D/latest: names 'global_step7', which is missing; open the directory of another step by its path");
  write_file(path + "/latest", "../z3_frozen_tied/global_step1");
  EXPECT_FALSE(recognises(kDeepspeedFormat, path));
}

TEST_F(Deepspeed, TellsOfTheModelThatATrainerSavesBesideIt) {
  fs::copy(saved("z2_align"), dir_ / "checkpoint-1", fs::copy_options::recursive);
  ASSERT_EQ(convert(saved("z2_align"), dir_ / "model", {"--to", "hf"}), "");
  fs::copy(dir_ / "model/model.safetensors", dir_ / "checkpoint-1/model.safetensors");
  const CommandResult shown = reshard_cli({"inspect", dir_ / "checkpoint-1"});
  EXPECT_THAT(shown.out,
              AllOf(HasSubstr("DeepSpeed 0.19.8"), HasSubstr("DeepSpeed's state is read, model.safetensors")));
  EXPECT_EQ(reshard_cli({"inspect", dir_ / "checkpoint-1/model.safetensors"}).exit_code, 0);
  EXPECT_THAT(reshard_cli({"inspect", saved("z2_align")}).out, testing::Not(HasSubstr("There is also a model")));
}

// The output has the directories, files and numbers that ds_to_universal.py makes.
TEST_F(Deepspeed, AUniversalCheckpointIsWrittenAsDeepspeedHasIt) {
  const std::string source = test_data("deepspeed/z1_universal"), out = dir_ / "out";
  const CommandResult r = reshard_cli({"convert", source, out, "--to", "deepspeed-universal"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(read_file(out + "/latest_universal"), read_file(source + "/latest_universal"));
  const std::string zero = "/global_step1_universal/zero";
  std::set<std::string> wanted, written;
  for (const auto& [root, names] : {std::pair(source, &wanted), std::pair(out, &written)})
    for (const auto& entry : fs::recursive_directory_iterator(root + zero))
      names->insert(entry.path().string().substr(root.size()));
  EXPECT_EQ(written, wanted);
  EXPECT_EQ(digests_of(load_checkpoint(out)), digests_of(load_checkpoint(source)));
  const CommandResult verified = reshard_cli({"verify", out, "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  ASSERT_EQ(reshard_cli({"convert", out, dir_ / "model", "--to", "hf", "-q"}).exit_code, 0);
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "model")), read_digests(source + ".hf.json"));
}

TEST_F(Deepspeed, AUniversalCheckpointOfWeightsAlone) {
  const std::string source = test_data("deepspeed/z1_universal"), model = dir_ / "model", out = dir_ / "out";
  ASSERT_EQ(reshard_cli({"convert", source, model, "--to", "hf", "-q"}).exit_code, 0);
  ASSERT_EQ(reshard_cli({"convert", model, out, "--to", "deepspeed-universal", "-q"}).exit_code, 0);
  ASSERT_EQ(reshard_cli({"convert", out, dir_ / "back", "--to", "hf", "-q"}).exit_code, 0);
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "back")), read_digests(source + ".hf.json"));
}

// The Trainer's saves of PEFT models: adapters with a frozen model, and adapters alone.
TEST_F(Deepspeed, AdaptersGoOnTrainingFromAUniversalCheckpoint) {
  for (const std::string name : {"z2_lora", "z2_lora_alone"}) {
    const std::string out = dir_ / name, top = out + "/global_step1_universal/";
    ASSERT_EQ(convert(saved(name), out, {"--to", "deepspeed-universal"}), "") << name;
    const auto truth = read_digests(saved(name) + ".optim.json");
    EXPECT_EQ(optimizer_of(load_checkpoint(out)).vectors, truth) << name;
    std::set<std::string> wanted, written;
    for (const auto& [key, digest] : truth) wanted.insert(key.substr(key.find('.') + 1));
    for (const auto& entry : fs::directory_iterator(top + "zero"))
      if (entry.is_directory()) written.insert(entry.path().filename().string());
    EXPECT_EQ(written, wanted) << "the names of the modules that are trained";
    if (name == "z2_lora_alone") {  // adapters next to the model are a warning, for the source too
      const CommandResult verified = reshard_cli({"verify", out, "--fail-on", "warning"});
      EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
      continue;
    }
    TensorValues model;
    for (const auto& [key, value] : load_checkpoint(out))
      if (key.starts_with("base_model.") && key.find("lora_") == std::string::npos) model.emplace(key, value);
    auto frozen = read_digests(saved(name) + ".hf.json");
    std::erase_if(frozen, [](const auto& t) { return t.first.find("lora_") != std::string::npos; });
    EXPECT_EQ(digests_of(model), frozen);
  }
}

// Parameters that were not trained have no optimizer states and are in the model states.
TEST_F(Deepspeed, FrozenParametersGoToAUniversalCheckpoint) {
  for (const std::string name : {"z2_frozen_tied", "z3_frozen_tied"}) {
    const std::string out = dir_ / name, back = dir_ / (name + ".hf");
    ASSERT_EQ(convert(saved(name), out, {"--to", "deepspeed-universal"}), "") << name;
    EXPECT_EQ(optimizer_of(load_checkpoint(out)).vectors, read_digests(saved(name) + ".optim.json"));
    ASSERT_EQ(convert(out, back, {"--to", "hf"}), "");
    EXPECT_EQ(digests_of(load_checkpoint(back)), read_digests(saved(name) + ".hf.json"));
  }
}

TEST_F(Deepspeed, PartsOfTensorParallelRanksAreChecked) {
  const std::string pipe = copy("pipe_tp2") + "/global_step1/", both = dir_ / "pipe_tp2";
  fs::rename(pipe + "layer_02-model_01-model_states.pt", dir_ / "kept");
  EXPECT_THAT(error_of(both), HasSubstr("missing 1 file ('global_step1/layer_02-model_01-model_states.pt')"));
  fs::copy(pipe + "layer_01-model_01-model_states.pt", pipe + "layer_02-model_01-model_states.pt");
  EXPECT_EQ(error_of(both), "opened");  // of the same shapes, so the exchange cannot be seen
  const std::string tp = copy("z1_autotp");
  edit(tp + "/global_step1/mp_rank_00_model_states.pt", [](const std::string& name, std::string& payload) {
    if (!name.ends_with("data.pkl")) return;
    for (std::size_t at; (at = payload.find("universal_checkpoint_info")) != std::string::npos;) payload[at] = 'X';
  });
  EXPECT_THAT(error_of(tp), HasSubstr("the files do not say how their parts join; ds_to_universal.py"));
}

// AutoTP's parts of the head have 12 and 11 rows. If a rank's file cannot be read, DeepSpeed's affine_map says how many
// it has; without one, the shape is unknown.
TEST_F(Deepspeed, NoShapeIsGuessedForAPartThatCannotBeRead) {
  const std::string good = saved("z1_autotp");
  const auto shapes_of = [](const std::string& path) {
    std::map<std::string, std::string> out;
    const Json report = *parse_json(reshard_cli({"inspect", path}, {"--json"}).out, "inspect");
    const auto tensors = *report.get_array("tensors");
    for (const Json& t : tensors) out.emplace(*t.get_string("name"), to_text(*t.find("shape")));
    return out;
  };
  const auto healthy = shapes_of(good);
  ASSERT_EQ(healthy.at("lm_head.weight"), "[23,8]");
  for (const std::string rank : {"0", "1"}) {
    SCOPED_TRACE(rank);
    const std::string path = copy("z1_autotp"), other = rank == "0" ? "1" : "0";
    write_file(path + "/global_step1/mp_rank_0" + rank + "_model_states.pt", "");
    EXPECT_EQ(shapes_of(path), healthy);
    EXPECT_THAT(reshard_cli({"inspect", path}).out, HasSubstr("saved       ZeRO 1, 2 data-parallel ranks"));
    edit(path + "/global_step1/mp_rank_0" + other + "_model_states.pt",
         [](const std::string& name, std::string& payload) {
           const std::size_t at = payload.find("affine_map");
           if (name.ends_with("data.pkl")) payload.at(at) = 'X';
         });
    auto rest = healthy;
    std::erase_if(rest, [](const auto& t) {
      return t.first.find("_proj") != std::string::npos || t.first.find("lm_head") != std::string::npos;
    });
    EXPECT_EQ(shapes_of(path), rest);
    const CommandResult verified = reshard_cli({"verify", path});
    EXPECT_EQ(verified.exit_code, 1);
    EXPECT_THAT(verified.out, AllOf(HasSubstr("mp_rank_0" + rank + "_model_states.pt@"), HasSubstr("lm_head.weight"),
                                    HasSubstr("1 error, 0 warnings"), Not(HasSubstr("shape"))));
  }
}

// All stages of a pipeline and all tensor-parallel ranks have the same groups, so the files of the first part are not
// needed for their options.
TEST_F(Deepspeed, GroupsAreReadWithoutTheFilesOfTheFirstPart) {
  const auto options_of = [](const std::string& path) {
    const CommandResult r = reshard_cli({"inspect", path}, {"--part", "optimizer", "--json"});
    return to_text(*parse_json(r.out, "inspect")->find("objects"));
  };
  for (const std::string name : {"pipe", "pipe_tp2"}) {
    SCOPED_TRACE(name);
    const std::string healthy = options_of(saved(name)), path = copy(name);
    ASSERT_THAT(healthy, HasSubstr("optimizer.param_groups.0.betas"));
    for (const auto& entry : fs::directory_iterator(path + "/global_step1"))
      if (entry.path().string().ends_with("_mp_rank_00_optim_states.pt")) write_file(entry.path().string(), "");
    EXPECT_EQ(options_of(path), healthy);
  }
}

TEST_F(Deepspeed, MissingFilesAreNamed) {
  const auto without = [&](const std::string& name, const std::string& file) {
    const std::string path = copy(name);
    EXPECT_TRUE(fs::remove(path + "/" + file)) << file;
    return error_of(path);
  };
  EXPECT_THAT(
      without("z3_frozen_tied", "global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
      HasSubstr("D: missing 1 file ('global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt') of 3 ranks"));
  EXPECT_THAT(without("z3_frozen_tied", "global_step1/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
              HasSubstr("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt') of 3 ranks"));
  EXPECT_THAT(without("z3_frozen_tied", "global_step1/zero_pp_rank_2_mp_rank_00_model_states.pt"),
              HasSubstr("missing 1 file ('global_step1/zero_pp_rank_2_mp_rank_00_model_states.pt') of 3 ranks"));
  EXPECT_THAT(without("pipe", "global_step1/mp_rank_01_model_states.pt"),
              HasSubstr("missing 1 file ('global_step1/mp_rank_01_model_states.pt')"));
  EXPECT_THAT(without("pipe", "global_step1/layer_02-model_states.pt"),
              HasSubstr("missing 'global_step1/layer_02-model_states.pt'"));
  EXPECT_THAT(without("z2_moe", "global_step1/layer_1_expert_2_mp_rank_00_model_states.pt"),
              HasSubstr("missing 1 file ('global_step1/layer_1_expert_2_mp_rank_00_model_states.pt')"));
  EXPECT_THAT(without("z1_universal", "global_step1_universal/zero/model.norm.weight/fp32.pt"),
              HasSubstr("missing 'global_step1_universal/zero/model.norm.weight/fp32.pt'"));
  // Tensor-parallel parts: a pipeline has files of layers.
  std::string path = copy("z2_frozen_tied");
  fs::copy(path + "/global_step1/mp_rank_00_model_states.pt", path + "/global_step1/mp_rank_01_model_states.pt");
  EXPECT_THAT(error_of(path),
              AllOf(HasSubstr("D: model states of 2 tensor-parallel ranks"), HasSubstr("ds_to_universal.py")));
  path = copy("pipe");
  for (const char* rank : {"00", "01"})
    fs::copy(path + "/global_step1/layer_01-model_states.pt",
             path + "/global_step1/layer_01-model_" + rank + "-model_states.pt");
  fs::remove(path + "/global_step1/layer_01-model_states.pt");
  EXPECT_THAT(error_of(path), HasSubstr("D: missing 4 files ('global_step1/layer_00-model_01-model_states.pt'"));
  // ZeRO 2's model is whole without its optimizer.
  path = copy("z2_frozen_tied");
  for (const char* rank : {"0", "1"})
    fs::remove(path + "/global_step1/bf16_zero_pp_rank_" + rank + "_mp_rank_00_optim_states.pt");
  const CommandResult r = reshard_cli({"inspect", path});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("There are no files of optimizer states"));
}

TEST_F(Deepspeed, FilesOfTwoSavesAreRefused) {
  const std::string third = "/global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt";
  std::string path = copy("z3_frozen_tied");
  const std::string healthy = read_file(path + third);
  edit(path + third, [](const std::string&, std::string& payload) {
    if (payload == std::string("\0\0\x80\x3f", 4)) payload = std::string("\0\0\x00\x40", 4);
  });
  EXPECT_THAT(error_of(path), AllOf(HasSubstr("D" + third + ": group 0: step is 2, and 1 in"), HasSubstr("two steps")));
  write_file(path + third, healthy);
  set_number(path + third, "partition_count", 3, 4);
  EXPECT_THAT(error_of(path), AllOf(HasSubstr(third), HasSubstr("expected 3, the number of rank files, got 4")));
  write_file(path + third, healthy);
  set_number(path + third, "ZeroStageEnum", 3, 2);
  EXPECT_THAT(error_of(path), AllOf(HasSubstr(third), HasSubstr("states of ZeRO 2, and")));
  write_file(path + third, healthy);
  set_number(path + "/global_step1/zero_pp_rank_2_mp_rank_00_model_states.pt", "global_steps", 1, 2);
  EXPECT_THAT(error_of(path), HasSubstr("global_steps is 2, and 1 in"));

  // A rank's file of another model's run.
  path = copy("z3_frozen_tied");
  write_file(path + third, read_file(saved("z3_subgroups") + third));
  EXPECT_THAT(error_of(path), HasSubstr("D" + third));

  path = copy("z2_frozen_tied");
  set_number(path + third, "partition_count", 2, 1);
  EXPECT_THAT(error_of(path), HasSubstr("partition_count of group 0"));
  path = copy("z2_frozen_tied");
  set_number(path + "/global_step1/mp_rank_00_model_states.pt", "param_shapes", 23, 29);
  EXPECT_THAT(error_of(path), AnyOf(HasSubstr("truncated or belongs to another run"), HasSubstr("param_shapes has")));
  path = copy("z3_frozen_tied");
  for (const char* rank : {"0", "1", "2"})
    set_number(path + "/global_step1/zero_pp_rank_" + rank + "_mp_rank_00_model_states.pt", "param_shapes", 23, 29);
  EXPECT_THAT(error_of(path), HasSubstr("expected a vector of"));
}

TEST_F(Deepspeed, AWeightThatIsNotItsMasterIsFound) {
  const std::string path = copy("z2_frozen_tied");
  edit(path + "/global_step1/mp_rank_00_model_states.pt", [](const std::string& name, std::string& payload) {
    if (name.ends_with("data/1")) payload[0] = static_cast<char>(payload[0] ^ 1);
  });
  const CommandResult r = reshard_cli({"verify", path, "--bytes", "--fail-on", "warning"});
  EXPECT_EQ(r.exit_code, 1) << r.out << r.err;
  EXPECT_THAT(r.out, AllOf(HasSubstr("model.embed_tokens.weight"), HasSubstr("not equal its float32 master")));
}

TEST_F(Deepspeed, FilesAreKnownByTheirNames) {
  const auto text = [](std::string_view name) {
    const auto n = deepspeed::parse_file_name(name);
    if (!n) return std::string("none");
    static constexpr const char* kKinds[] = {"model", "optimizer", "layer", "expert"};
    return std::string(kKinds[static_cast<std::size_t>(n->kind)]) + " " + std::to_string(n->part) + " " +
           (n->rank ? std::to_string(*n->rank) : "all") + " " + std::to_string(n->layer) + " " +
           std::to_string(n->expert);
  };
  EXPECT_EQ(text("mp_rank_03_model_states.pt"), "model 3 all 0 0");
  EXPECT_EQ(text("zero_pp_rank_12_mp_rank_00_model_states.pt"), "model 0 12 0 0");
  EXPECT_EQ(text("zero_pp_rank_12_mp_rank_01_optim_states.pt"), "optimizer 1 12 0 0");
  EXPECT_EQ(text("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), "optimizer 0 0 0 0");
  EXPECT_EQ(text("layer_07-model_states.pt"), "layer 0 all 7 0");
  EXPECT_EQ(text("layer_07-model_01-model_states.pt"), "layer 1 all 7 0");
  EXPECT_EQ(text("layer_1_expert_63_mp_rank_00_model_states.pt"), "expert 0 all 1 63");
  for (const char* other :
       {"mp_rank_00_optim_states.pt", "mp_rank_model_states.pt", "layer_7_model_states.pt", "latest",
        "zero_pp_rank_0_mp_rank_00_model_states.pt.tmp", "zero_pp_rank_99999999999_mp_rank_00_model_states.pt"})
    EXPECT_EQ(text(other), "none") << other;
}

// save_pretrained() of a model that ZeRO 3 has partitioned.
TEST_F(Deepspeed, PlaceholdersAreNoModel) {
  const std::string text =
      R"({"a.weight":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]},"b.weight":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}})";
  std::string file(8, '\0');
  const std::uint64_t length = text.size();
  std::memcpy(file.data(), &length, sizeof length);
  fs::create_directories(dir_ / "run/export");
  write_file(dir_ / "run/export/model.safetensors", file + text);
  EXPECT_THAT(error_of(dir_ / "run/export"), HasSubstr("the weights are in the global_stepN/ of its run"));
  fs::copy(saved("z3_frozen_tied") + "/global_step1", dir_ / "run/global_step1", fs::copy_options::recursive);
  EXPECT_THAT(error_of(dir_ / "run/export"),
              AllOf(HasSubstr("2 of 2 weights are placeholders of size [0]"),
                    HasSubstr("the weights are in " + (dir_ / "run/global_step1") + "; open that")));
  // The model states of one rank, opened alone.
  EXPECT_THAT(error_of(dir_ / "run/global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt"),
              HasSubstr("the weights are in"));
}

}  // namespace
}  // namespace reshard::deepspeed_test
