// Compares checkpoints of programs in JAX with what an export makes of them: Levanter's (tests/data/levanter/make.py)
// and EasyDeL's (tests/data/easydel/make.py) own, and for Google's gemma library (tests/data/gemma/make.py)
// transformers' conversion script.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::orbax_programs_test {
namespace {

// A sample: the program, which is also --names; its name; where the checkpoint is below it; what all names of the model
// begin with; and whether the program saves the tensors that are written with its names (its trees have other forms).
struct Sample {
  std::string program, name, step, root;
  bool is_written = true;
};

class JaxProgram : public testing::TestWithParam<Sample> {
 protected:
  static std::string truth(const std::string& suffix) {
    return test_data(GetParam().program + "/" + GetParam().name + suffix);
  }
  static std::vector<std::string> with_config(std::vector<std::string> args) {
    const std::string config = truth(".config.json");
    if (std::filesystem::exists(config)) args.insert(args.end(), {"--config", config});  // or else the sample has it
    return args;
  }
  static void convert(const std::string& from, const std::string& to, const std::vector<std::string>& options) {
    std::vector<std::string> args = with_config({"convert", from, to, "-q"});
    args.insert(args.end(), options.begin(), options.end());
    const CommandResult run = reshard_cli(args);
    ASSERT_EQ(run.exit_code, 0) << run.err;
  }

  const TempDir dir_;
  const std::string saved_ = truth(GetParam().step);
};

// EasyDeL's qwen3 has a tied head: EasyDeL stores numbers for it that it does not use.
TEST_P(JaxProgram, BecomesWhatTheExportMakes) {
  const CommandResult verified = reshard_cli(with_config({"verify", saved_, "--bytes", "--fail-on", "warning"}));
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  convert(saved_, dir_ / "hf", {"--to", "hf"});
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "hf")), read_digests(truth(".json")));
}

TEST_P(JaxProgram, GetsItsNamesBack) {
  convert(saved_, dir_ / "hf", {"--to", "hf"});
  const TensorValues saved = load_checkpoint(saved_);
  const std::vector<std::string> cuts[] = {{"--to", "dcp", "--mesh", "tp=2,dp_shard=3"},
                                           {"--to", "orbax", "--mesh", "dp_shard=3"}};
  for (std::vector<std::string> options : cuts) {
    const std::string out = dir_ / options[1];
    options.insert(options.end(), {"--names", GetParam().program});
    convert(dir_ / "hf", out, options);
    for (const std::string& other : {dir_ / "hf", saved_}) {
      const CommandResult compared = reshard_cli(with_config({"diff", other, out}));
      EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
    }
    const TensorValues made = load_checkpoint(out);
    EXPECT_GE(made.size(), 12U) << options[1];
    if (GetParam().name == "qwen3_unscanned") {
      EXPECT_TRUE(made.contains("transformer.layers.stacked.self_attn.q_proj.weight")) << options[1];
    }
    if (!GetParam().is_written) continue;
    if (GetParam().root.empty()) {
      EXPECT_EQ(made.size(), saved.size()) << options[1];
    }
    for (const auto& [name, value] : made) {
      ASSERT_TRUE(saved.contains(GetParam().root + name)) << name;
      EXPECT_EQ(value, saved.at(GetParam().root + name)) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Samples, JaxProgram,
    testing::Values(Sample{"levanter", "llama", "/step-1", "model."}, Sample{"levanter", "gpt2", "/step-1", "model."},
                    Sample{"levanter", "mixtral", "/step-1", "model."},
                    Sample{"levanter", "qwen3_unscanned", "/step-1", "model.", false},
                    Sample{"easydel", "qwen3", "/run-1", "model."}, Sample{"easydel", "mixtral", "/run-1", "model."},
                    Sample{"gemma", "gemma2", "", ""}, Sample{"gemma", "gemma3", "", ""},
                    Sample{"gemma", "gemma3_flat", "", "", false}, Sample{"gemma", "gemma3_stacked", "", "", false}),
    [](const auto& p) { return p.param.program + "_" + p.param.name; });

using JaxTrainer = JaxProgram;

TEST_P(JaxTrainer, AdamGoesOn) {
  convert(saved_, dir_ / "dcp", {"--to", "dcp", "--names", "hf", "--mesh", "dp_shard=3"});
  const TensorValues all = load_checkpoint(dir_ / "dcp");
  TensorValues moments;
  const std::string begin = "optimizer.state.", end = ".exp_avg";
  for (const auto& [name, value] : all)
    if (name.starts_with(begin) && name.ends_with(end))
      moments.emplace(name.substr(begin.size(), name.size() - begin.size() - end.size()), value);
  EXPECT_EQ(digests_of(moments), read_digests(truth(".moment.json")));
  ASSERT_FALSE(moments.empty());
  EXPECT_TRUE(all.contains(begin + moments.begin()->first + ".step"));
  if (GetParam().program == "levanter") {
    EXPECT_TRUE(all.contains("extra_state.training_key"));
  }
}

INSTANTIATE_TEST_SUITE_P(Samples, JaxTrainer,
                         testing::Values(Sample{"levanter", "llama", "/step-1", "model."},
                                         Sample{"levanter", "gpt2", "/step-1", "model."},
                                         Sample{"levanter", "mixtral", "/step-1", "model."},
                                         Sample{"levanter", "qwen3_unscanned", "/step-1", "model."},
                                         Sample{"easydel", "qwen3", "/run-1", "model."}),
                         [](const auto& p) { return p.param.program + "_" + p.param.name; });

TEST(EasyDelIndex, NamesArraysThatWereLost) {
  const TempDir dir;
  std::filesystem::copy(test_data("easydel/qwen3/run-1"), dir / "run-1", std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(dir / "run-1/tx/1/0/nu/model/norm");
  constexpr const char* kLost = "'tx/1/0/nu/model/norm/kernel/value', and";
  const CommandResult verified = reshard_cli({"verify", dir / "run-1"});
  EXPECT_EQ(verified.exit_code, 1);
  EXPECT_THAT(verified.out, testing::HasSubstr(kLost));
  EXPECT_THAT(reshard_cli({"convert", dir / "run-1", dir / "hf", "--to", "hf"}).err, testing::HasSubstr(kLost));
}

}  // namespace
}  // namespace reshard::orbax_programs_test
