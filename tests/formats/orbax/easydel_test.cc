// Compares EasyDeL's checkpoints (tests/data/easydel/make.py) with what its own export makes of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::easydel_test {
namespace {

class EasyDel : public testing::TestWithParam<std::string> {
 protected:
  std::string truth(const std::string& suffix) const { return test_data("easydel/" + GetParam() + suffix); }
  static void convert(const std::string& from, const std::string& to, std::vector<std::string> options) {
    std::vector<std::string> args = {"convert", from, to, "-q"};
    args.insert(args.end(), options.begin(), options.end());
    const CommandResult run = reshard_cli(args);
    ASSERT_EQ(run.exit_code, 0) << run.err;
  }

  const TempDir dir_;
  const std::string saved_ = truth("/run-1");
};

// The first model's head is tied: EasyDeL stores numbers for it that it does not use.
TEST_P(EasyDel, BecomesWhatItsOwnExportMakes) {
  const CommandResult verified = reshard_cli({"verify", saved_, "--bytes", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  convert(saved_, dir_ / "hf", {"--to", "hf"});
  EXPECT_EQ(digests_of(load_checkpoint(dir_ / "hf")), read_digests(truth(".json")));
}

TEST_P(EasyDel, GetsItsNamesBack) {
  convert(saved_, dir_ / "hf", {"--to", "hf"});
  convert(dir_ / "hf", dir_ / "back", {"--to", "orbax", "--names", "easydel", "--mesh", "dp_shard=3"});
  const TensorValues made = load_checkpoint(dir_ / "back"), saved = load_checkpoint(saved_);
  EXPECT_GT(made.size(), 10U);
  for (const auto& [name, value] : made) {
    ASSERT_TRUE(saved.contains("model." + name)) << name;
    EXPECT_EQ(value, saved.at("model." + name)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EasyDel, testing::Values("qwen3", "mixtral"), [](const auto& p) { return p.param; });

using EasyDelTrainer = EasyDel;

TEST_P(EasyDelTrainer, AdamFollowsItsParameters) {
  convert(saved_, dir_ / "dcp", {"--to", "dcp", "--names", "hf", "--mesh", "dp_shard=3"});
  const TensorValues all = load_checkpoint(dir_ / "dcp");
  TensorValues moments;
  const std::string begin = "optimizer.state.", end = ".exp_avg";
  for (const auto& [name, value] : all)
    if (name.starts_with(begin) && name.ends_with(end))
      moments.emplace(name.substr(begin.size(), name.size() - begin.size() - end.size()), value);
  EXPECT_EQ(digests_of(moments), read_digests(truth(".moment.json")));
  EXPECT_TRUE(all.contains("optimizer.state.model.norm.weight.step"));
}

INSTANTIATE_TEST_SUITE_P(Models, EasyDelTrainer, testing::Values("qwen3"), [](const auto& p) { return p.param; });

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
}  // namespace reshard::easydel_test
