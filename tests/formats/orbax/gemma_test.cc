// Compares checkpoints of Google's gemma library (tests/data/gemma/make.py) with what transformers' conversion script
// makes of them.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::gemma_test {
namespace {

class Gemma : public testing::TestWithParam<std::string> {
 protected:
  std::string truth(const std::string& suffix) const { return test_data("gemma/" + GetParam() + suffix); }
  void convert(const std::string& from, const std::string& to, std::vector<std::string> options) const {
    std::vector<std::string> args = {"convert", from, to, "--config", truth(".config.json"), "-q"};
    args.insert(args.end(), options.begin(), options.end());
    const CommandResult run = reshard_cli(args);
    ASSERT_EQ(run.exit_code, 0) << run.err;
  }

  const TempDir dir_;
  const std::string saved_ = truth("");
};

TEST_P(Gemma, BecomesWhatTransformersScriptMakes) {
  const CommandResult verified =
      reshard_cli({"verify", saved_, "--config", truth(".config.json"), "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  convert(saved_, dir_ / "hf", {"--to", "hf"});
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "hf")), read_digests(truth(".json")));
}

TEST_P(Gemma, IsWrittenAsItsOwnSaveWritesIt) {
  convert(saved_, dir_ / "hf", {"--to", "hf"});
  convert(dir_ / "hf", dir_ / "back", {"--to", "orbax", "--names", "gemma", "--mesh", "dp_shard=3"});
  const CommandResult compared = reshard_cli({"diff", dir_ / "back", saved_, "--config", truth(".config.json")});
  EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
  if (GetParam() == "gemma2" || GetParam() == "gemma3") {
    EXPECT_EQ(load_checkpoint(dir_ / "back"), load_checkpoint(saved_));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Gemma, testing::Values("gemma2", "gemma3", "gemma3_flat", "gemma3_stacked"),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace reshard::gemma_test
