// Compares Levanter's checkpoints (tests/data/levanter/make.py) with what its own export makes of them.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::levanter_test {
namespace {

class Levanter : public testing::TestWithParam<std::string> {
 protected:
  std::string truth(const std::string& suffix) const { return test_data("levanter/" + GetParam() + suffix); }
  void convert(const std::string& from, const std::string& to, std::vector<std::string> options) const {
    std::vector<std::string> args = {"convert", from, to, "--config", truth(".config.json"), "-q"};
    args.insert(args.end(), options.begin(), options.end());
    const CommandResult run = reshard_cli(args);
    ASSERT_EQ(run.exit_code, 0) << run.err;
  }

  const TempDir dir_;
  const std::string saved_ = truth("/step-1");
};

TEST_P(Levanter, BecomesWhatItsOwnExportMakes) {
  const CommandResult verified =
      reshard_cli({"verify", saved_, "--config", truth(".config.json"), "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  convert(saved_, dir_ / "hf", {"--to", "hf"});
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "hf")), read_digests(truth(".json")));
}

TEST_P(Levanter, AdamGoesOn) {
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
  EXPECT_TRUE(all.contains("extra_state.training_key"));
}

TEST_P(Levanter, GetsItsNamesBack) {
  convert(saved_, dir_ / "hf", {"--to", "hf"});
  const TensorValues all = load_checkpoint(saved_);
  const std::vector<std::string> cuts[] = {{"--to", "dcp", "--mesh", "tp=2,dp_shard=3"}, {"--to", "orbax"}};
  for (std::vector<std::string> options : cuts) {
    const std::string out = dir_ / options[1];
    options.insert(options.end(), {"--names", "levanter"});
    convert(dir_ / "hf", out, options);
    const CommandResult compared = reshard_cli({"diff", dir_ / "hf", out, "--config", truth(".config.json")});
    EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
    const TensorValues made = load_checkpoint(out);
    if (GetParam() == "qwen3_unscanned") {  // has no names with stacked layers
      EXPECT_TRUE(made.contains("transformer.layers.stacked.self_attn.q_proj.weight")) << options[1];
      continue;
    }
    EXPECT_GE(made.size(), 12u) << options[1];
    for (const auto& [name, value] : made) {
      ASSERT_TRUE(all.contains("model." + name)) << name;
      EXPECT_EQ(value, all.at("model." + name)) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Levanter, testing::Values("llama", "qwen3_unscanned", "gpt2", "mixtral"),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace reshard::levanter_test
