// Tests names of other programs: they are distinguished from missing parameters, and the advice works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::cli_names_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TensorValues llama() { return load_checkpoint(sample("tp8") + "/hf.safetensors"); }
std::string llama_config() { return read_file(sample("tp8") + "/config.json"); }

TensorValues renamed(const TensorValues& from, const std::function<std::string(const std::string&)>& name) {
  TensorValues out;
  for (const auto& [old, value] : from) out.emplace(name(old), value);
  return out;
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  if (const std::size_t at = text.find(from); at != std::string::npos) text.replace(at, from.size(), to);
  return text;
}

// Returns another program's name for a parameter inside the layers; other names are unchanged.
std::string in_layers(const std::string& name) {
  return replaced(replaced(replaced(name, "model.layers.", "stack."), "_proj", ""), "norm.weight", "scale");
}

struct Checkpoint {
  TempDir dir;
  std::string path = dir / "ck";
  explicit Checkpoint(const TensorValues& tensors, const std::string& config = llama_config()) {
    write_dcp(tensors, path, *Mesh::parse("dp_shard=2"));
    if (!config.empty()) write_file(path + "/config.json", config);
  }
  CommandResult verify(std::vector<std::string> options = {}) const {
    options.insert(options.begin(), {"verify", path});
    return reshard_cli(options);
  }
  CommandResult convert(std::vector<std::string> options) const {
    options.insert(options.begin(), {"convert", path, dir / "out"});
    return reshard_cli(options);
  }
};

// Names that match by chance, bare and under wrappers, are not reported as a missing stage.
TEST(NamesOfOthers, AreNoMissingLayers) {
  const std::vector<std::vector<std::string>> agreeing = {
      {}, {"lm_head.weight"}, {"lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"}};
  for (const auto& same : agreeing)
    for (const std::string wrapper : sampled({"", "module.", "app.model."}, 3)) {
      const auto name = [&](const std::string& old) {
        if (std::find(same.begin(), same.end(), old) != same.end()) return wrapper + old;
        return wrapper + (old.find(".layers.") == std::string::npos ? "the." + old.substr(old.find('.') + 1) + ".table"
                                                                    : in_layers(old));
      };
      const Checkpoint other(renamed(llama(), name));
      SCOPED_TRACE(wrapper + " " + std::to_string(same.size()));
      const CommandResult r = other.verify();
      EXPECT_EQ(r.exit_code, 1) << r.out << r.err;
      EXPECT_THAT(r.out, AllOf(HasSubstr("is of family llama, and "), HasSubstr("1 warning"), Not(HasSubstr("stage")),
                               Not(HasSubstr("missing"))));
      EXPECT_EQ(other.verify({"--config", other.path + "/config.json"}).exit_code, 4);
      const CommandResult refused = other.convert({"--to", "hf"});
      EXPECT_EQ(refused.exit_code, 4) << refused.out;
      EXPECT_THAT(refused.err, AllOf(HasSubstr("--family none"), Not(HasSubstr("--keep-unknown"))));
      const CommandResult followed = other.convert({"--to", "hf", "--family", "none"});
      EXPECT_EQ(followed.exit_code, 0) << followed.err;
    }
}

// Other names of some parameters are one finding, and the advice leads to the model.
TEST(NamesOfOthers, OfSomeParametersAreSaidToBeTheMissingOnes) {
  const auto name = [](const std::string& old) { return replaced(old, "self_attn", "attn"); };
  const Checkpoint other(renamed(llama(), name));
  const CommandResult r = other.verify();
  EXPECT_EQ(r.exit_code, 1) << r.out;
  EXPECT_THAT(r.out,
              AllOf(HasSubstr("under other names"), HasSubstr("--rename"), Not(HasSubstr("missing from all files"))));
  const CommandResult refused = other.convert({"--to", "hf"});
  EXPECT_EQ(refused.exit_code, 4) << refused.out;
  EXPECT_THAT(refused.err, AllOf(HasSubstr("--rename FROM=TO"), HasSubstr("self_attn.k_proj.weight")));
  EXPECT_EQ(other.convert({"--to", "hf", "--rename", "attn=self_attn"}).exit_code, 0);
  EXPECT_EQ(load_checkpoint(other.dir / "out"), llama());
}

// A missing layer is reported whatever else is stored.
TEST(NamesOfOthers, AreNotWhatALostStageIs) {
  TensorValues tensors = llama();
  std::erase_if(tensors, [](const auto& t) { return t.first.starts_with("model.layers.1."); });
  for (const bool beside : {false, true}) {
    if (beside) tensors["probe.weight"] = {DType::kFloat32, {1, 3}, std::string(12, 'x')};
    const CommandResult r = Checkpoint(tensors).verify();
    EXPECT_EQ(r.exit_code, 1);
    EXPECT_THAT(r.out, AllOf(HasSubstr("layer 1 of 0 to "), HasSubstr("missing"), Not(HasSubstr("other names"))));
  }
}

// ---- the names of other programs: tests/data/conventions, made by their own converters

class OfOtherPrograms : public testing::TestWithParam<std::string> {};

TEST_P(OfOtherPrograms, BecomeHuggingFacesAndBackBitForBit) {
  const TempDir dir;
  const std::string saved = test_data("conventions/" + GetParam());
  std::string names = GetParam().substr(0, GetParam().find('_'));
  if (names == "torchtitan" && !GetParam().ends_with("llama4")) names = "torchtitan-2026";
  const CommandResult verified = reshard_cli({"verify", saved, "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  const CommandResult there = reshard_cli({"convert", saved, dir / "hf", "--to", "hf"});
  ASSERT_EQ(there.exit_code, 0) << there.err;
  EXPECT_EQ(digests_of(load_checkpoint(dir / "hf")), read_digests(saved + ".hf.json"));
  TensorValues mine = load_checkpoint(saved);
  // torchtitan's load-balancing biases; Hugging Face's files contain only DeepSeek's.
  const bool is_dropped =
      GetParam().starts_with("torchtitan") && !GetParam().starts_with("torchtitan_deepseek") &&
      std::erase_if(mine, [](const auto& t) { return t.first.find(".moe.expert_bias") != std::string::npos; }) > 0;
  EXPECT_EQ(there.out.find("left out: ") != std::string::npos && there.out.find("expert_bias") != std::string::npos,
            is_dropped)
      << there.out;
  for (const std::string mesh : {"dp_shard=1", "dp_shard=3"}) {
    const CommandResult back =
        reshard_cli({"convert", dir / "hf", dir / "back", "--to", "dcp", "--names", names, "--mesh", mesh, "--force"});
    ASSERT_EQ(back.exit_code, 0) << back.err;
    EXPECT_EQ(load_checkpoint(dir / "back"), mine) << mesh;
  }
}

INSTANTIATE_TEST_SUITE_P(Names, OfOtherPrograms, testing::ValuesIn([] {
                           std::vector<std::string> out;
                           for (const auto& entry : std::filesystem::directory_iterator(test_data("conventions")))
                             if (entry.is_directory()) out.push_back(entry.path().filename());
                           std::sort(out.begin(), out.end());
                           return sampled(out, 4);
                         }()),
                         [](const auto& name) { return name.param; });

// ---- flattened parameters

TensorValues flattened(const TensorValues& from, Index parts) {
  TensorValues out;
  for (const auto& [name, value] : from) {
    TensorValue flat = value;
    flat.shape = {volume(value.shape) / parts};
    flat.bytes.resize(flat.bytes.size() / static_cast<std::size_t>(parts));
    out.emplace(name, std::move(flat));
  }
  return out;
}

TEST(FlatParameters, AreWrittenInTheShapesThatTheConfigSays) {
  const Checkpoint flat(flattened(llama(), 1));
  const CommandResult verified = flat.verify();
  EXPECT_EQ(verified.exit_code, 1);
  EXPECT_THAT(verified.out, AllOf(HasSubstr("flattened by FSDP"), HasSubstr("] is all of ["),
                                  HasSubstr("No data is lost"), Not(HasSubstr("another model"))));
  const CommandResult r = flat.convert({"--to", "hf"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("are flattened, as FSDP stores parameters"));
  EXPECT_EQ(load_checkpoint(flat.dir / "out"), llama());
}

TEST(FlatParameters, OfOneRankAreSaidToBeItsParts) {
  const Checkpoint flat(flattened(llama(), 2));
  const CommandResult verified = flat.verify();
  EXPECT_EQ(verified.exit_code, 1);
  EXPECT_THAT(verified.out, AllOf(HasSubstr("like parameters flattened by FSDP"), HasSubstr("] is 1/2 of ["),
                                  HasSubstr("1 error"), Not(HasSubstr("another model"))));
  const CommandResult r = flat.convert({"--to", "hf"});
  EXPECT_EQ(r.exit_code, 3) << r.out;
  EXPECT_THAT(r.err, HasSubstr("a flattened parameter, as FSDP stores it: 1/2 of its "));
}

TEST(FlatParameters, WithoutAConfigAreNotWrittenAsAModel) {
  const Checkpoint flat(flattened(llama(), 1), "");
  const CommandResult r = flat.convert({"--to", "hf"});
  EXPECT_EQ(r.exit_code, 3) << r.out;
  EXPECT_THAT(r.err, AllOf(HasSubstr("flattened"), HasSubstr("--config")));
}

// ---- Averages alone, other programs' buffers, files without their parameters

TEST(AnAverageAlone, IsNamedByTheErrorAndTaken) {
  for (const std::string word : {"ema_model.", "params_ema.", "shadow_params.", "swa_model."}) {
    TensorValues tensors = renamed(llama(), [&](const std::string& name) { return word + name; });
    tensors["step"] = {DType::kInt64, {}, std::string(8, '\1')};
    tensors["initted"] = {DType::kInt64, {}, std::string(8, '\1')};
    const Checkpoint ema(tensors);
    const CommandResult refused = ema.convert({"--to", "hf"});
    EXPECT_NE(refused.exit_code, 0) << word;
    EXPECT_THAT(refused.err, HasSubstr("--part ema")) << word;
    const CommandResult r = ema.convert({"--to", "hf", "--part", "ema"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(load_checkpoint(ema.dir / "out"), llama()) << word;
  }
}

TEST(AnAverageAlone, BesideItsModelIsOtherState) {
  TensorValues tensors = renamed(llama(), [](const std::string& name) { return "ema_model." + name; });
  for (const auto& [name, value] : llama()) tensors["online_model." + name] = value;
  tensors["step"] = {DType::kInt64, {}, std::string(8, '\1')};
  const Checkpoint both(tensors);
  const CommandResult r = both.convert({"--to", "hf"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(load_checkpoint(both.dir / "out"), llama());
}

// The average's first values differ from the model's, so the output tells which of the two it is.
TensorValues averaged_llama() {
  TensorValues out = llama();
  for (auto& [name, value] : out) value.bytes[0] = static_cast<char>(value.bytes[0] ^ 1);
  return out;
}

constexpr std::array<const char*, 9> kOtherAverages = {
    "shadow.",     "model_averaged.",        "ema_unet.", "G_EMA.",      "emaModel.model.",
    "polyak_net.", "callbacks.EMA.weights.", "swa.",      "trainer.avg."};

TEST(AnAverageAlone, UnderWordsOfAnyProgramIsNotTakenUnasked) {
  for (const std::string prefix : kOtherAverages) {
    const Checkpoint average(renamed(averaged_llama(), [&](const std::string& name) { return prefix + name; }));
    const CommandResult refused = average.convert({"--to", "hf"});
    EXPECT_EQ(refused.exit_code, 4) << prefix << refused.out;
    EXPECT_THAT(refused.err, HasSubstr("it contains an average and no model; add --part ema")) << prefix;
    EXPECT_EQ(average.convert({"--to", "hf", "--part", "ema"}).exit_code, 0) << prefix;
    EXPECT_EQ(load_checkpoint(average.dir / "out"), averaged_llama()) << prefix;
  }
}

TEST(AnAverageAlone, UnderWordsOfAnyProgramIsNotTheModelBesideIt) {
  for (std::size_t i = 0; i < kOtherAverages.size(); ++i) {
    const std::string prefix = kOtherAverages[i], model = i % 2 == 0 ? "" : "net.";
    TensorValues tensors = renamed(averaged_llama(), [&](const std::string& name) { return prefix + name; });
    for (const auto& [name, value] : llama()) tensors[model + name] = value;
    const Checkpoint both(tensors);
    const CommandResult r = both.convert({"--to", "hf"});
    ASSERT_EQ(r.exit_code, 0) << model << " " << prefix << r.err;
    EXPECT_THAT(r.out, HasSubstr("left out: average of the weights (39 tensors")) << model << " " << prefix;
    EXPECT_EQ(load_checkpoint(both.dir / "out"), llama()) << model << " " << prefix;
    EXPECT_EQ(both.convert({"--to", "hf", "--part", "ema", "--force"}).exit_code, 0) << model << " " << prefix;
    EXPECT_EQ(load_checkpoint(both.dir / "out"), averaged_llama()) << model << " " << prefix;
  }
}

// A word or torch's counter only suggests an average: the model is taken, and the output says so.
TEST(AnAverageAlone, ThatIsOnlySuggestedIsTakenWithANote) {
  for (const std::string prefix : {"teacher.", "target_encoder.model.", "module.", "model.module."}) {
    TensorValues tensors = renamed(llama(), [&](const std::string& name) { return prefix + name; });
    const bool is_counted = prefix.ends_with("module.");
    if (is_counted)
      tensors[prefix.substr(0, prefix.size() - 7) + "n_averaged"] = {DType::kInt64, {}, std::string(8, '\1')};
    const Checkpoint saved(tensors);
    const CommandResult r = saved.convert({"--to", "hf"});
    EXPECT_EQ(r.exit_code, 0) << prefix << r.err;
    EXPECT_THAT(r.out, HasSubstr(is_counted ? "n_averaged' is next to the model" : "which may mean an average"))
        << prefix;
    EXPECT_THAT(saved.verify().out, HasSubstr("average")) << prefix;
    EXPECT_EQ(load_checkpoint(saved.dir / "out"), llama()) << prefix;
    const CommandResult chosen = saved.convert({"--to", "hf", "--strip-prefix", prefix, "--force"});
    EXPECT_THAT(chosen.out, Not(HasSubstr("which may mean an average"))) << prefix;
  }
}

// Modules of models that no family describes: an average has the names of the rest, a module has its own.
TEST(AnAverageAlone, IsNoModuleOfAnUnknownModel) {
  const TensorValue weight = {DType::kFloat32, {2}, std::string(8, 'w')};
  TensorValues tensors;
  for (const char* name : {"shadow_net.conv.weight", "shadow_net.conv.bias", "avg_pool_head.proj.weight", "stem.weight",
                           "stem.bias", "body.0.weight", "body.1.weight"})
    tensors[name] = weight;
  const Checkpoint modules(tensors, "");
  EXPECT_THAT(reshard_cli({"inspect", modules.path}).out, AllOf(HasSubstr("7 tensors"), Not(HasSubstr("average"))));
  for (const char* name : {"stem.weight", "stem.bias", "body.0.weight", "body.1.weight"})
    tensors["shadow." + std::string(name)] = weight;
  const Checkpoint averaged(tensors, "");
  EXPECT_THAT(reshard_cli({"inspect", averaged.path}).out,
              AllOf(HasSubstr("model       7 tensors"), HasSubstr("ema with prefix 'shadow.'")));
}

TEST(BuffersOfOthers, TablesOfAnglesAreLeftOut) {
  TensorValues tensors = load_checkpoint(sample("tp8") + "/checkpoint");
  for (const char* name : {"freqs_cos", "freqs_sin"}) tensors[name] = {DType::kFloat32, {4, 2}, std::string(32, 'x')};
  const Checkpoint llama2c(tensors);
  const CommandResult r = llama2c.convert({"--to", "hf"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, AllOf(HasSubstr("left out: "), HasSubstr("freqs_cos")));
  EXPECT_EQ(load_checkpoint(llama2c.dir / "out"), llama());
}

TEST(ConsolidatedFiles, OpenAsADirectoryWithoutTheirParameters) {
  const TempDir dir;
  const CommandResult made = reshard_cli({"convert", sample("tp8") + "/checkpoint", dir / "bin", "--to", "bin",
                                          "--names", "torchtitan", "--config", sample("tp8") + "/config.json"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  std::filesystem::create_directory(dir / "meta");
  std::filesystem::rename(dir / "bin/pytorch_model.bin", dir / "meta/consolidated.pth");
  const std::string config = sample("tp8") + "/config.json";
  for (const char* place : {"meta", "meta/consolidated.pth"}) {
    const CommandResult r =
        reshard_cli({"convert", dir / place, dir / "hf", "--to", "hf", "--config", config, "--force"});
    EXPECT_EQ(r.exit_code, 0) << place << ": " << r.err;
    EXPECT_EQ(load_checkpoint(dir / "hf"), llama()) << place;
  }
}

// ---- --family none: names are those that are stored, in every format, unless --strip-prefix or --rename changes them

TEST(FamilyNone, KeepsNamesAsStoredInEveryFormat) {
  const std::string wrapper = "state.model._orig_mod.";
  for (const std::string format : sampled({"hf", "bin", "dcp", "ranks", "torch_checkpointing", "hdf5", "orbax"}, 3)) {
    SCOPED_TRACE(format);
    const Checkpoint source(renamed(llama(), [&](const std::string& name) { return wrapper + name; }), "");
    const std::string out = source.dir / "out";
    const auto names = [&](std::vector<std::string> options) {
      std::vector<std::string> args = {"convert",  source.path, out,       "--to", format,
                                       "--family", "none",      "--force", "-q"};
      args.insert(args.end(), options.begin(), options.end());
      const CommandResult r = reshard_cli(args);
      EXPECT_EQ(r.exit_code, 0) << r.err;
      return load_checkpoint(out);
    };
    const auto with = [&](const std::string& prefix) {
      return renamed(llama(), [&](const std::string& name) { return prefix + name; });
    };
    EXPECT_EQ(names({}), with(wrapper));
    EXPECT_EQ(names({"--strip-prefix", "state.model."}), with(""));
    EXPECT_EQ(names({"--rename", "state.model=a.b"}), with("a.b._orig_mod."));
  }
}

}  // namespace
}  // namespace reshard::cli_names_test
