// Tests optimizer state that moves between frameworks: Megatron's and DeepSpeed's saves contain the same state of the
// same parameters under other names, in other formats, on other meshes, and after the way back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::optimizer_pairs_test {
namespace {

using testing::HasSubstr;
using Options = std::vector<std::string>;

// One row for each optimizer that a real checkpoint was saved with.
constexpr const char* kSources[] = {"megatron/legacy_pp2_vpp2_dp2_distopt_tied",
                                    "megatron/legacy_tp2_ep2_moe_plain",
                                    "megatron/dist_tp2_dp2_dpreshardable",
                                    "megatron/dist_tp2_optim",
                                    "megatron/dist_old_tp2_dp2_flat",
                                    "deepspeed/z0",
                                    "deepspeed/z2_align",
                                    "deepspeed/z2_fp16",
                                    "deepspeed/z2_frozen_tied",
                                    "deepspeed/z2_roundrobin",
                                    "deepspeed/z3_subgroups",
                                    "deepspeed/z3_frozen_tied",
                                    "deepspeed/bf16opt",
                                    "deepspeed/pipe",
                                    "deepspeed/z1_universal",
                                    "deepspeed/z3_universal"};

class OptimizerPairs : public testing::TestWithParam<const char*> {
 protected:
  // Converts, and checks that the output contains the source's state. Returns false if the model has no names in this
  // convention.
  bool convert(const std::string& from, const std::string& to, const Options& options) {
    Options arguments = {"convert", from, to, "-q", "--config", config_};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const CommandResult r = reshard_cli(arguments);
    if (r.exit_code == 4 && r.err.find(" has no ") != std::string::npos) return false;
    if (r.exit_code == 4 && r.err.find("to leave the optimizer out") != std::string::npos)
      return false;  // frozen parameters
    EXPECT_EQ(r.exit_code, 0) << from << " " << testing::PrintToString(options) << r.err;
    const CommandResult verified = reshard_cli({"verify", source_, "--against", to, "--config", config_});
    EXPECT_EQ(verified.exit_code, 0) << testing::PrintToString(options) << verified.out << verified.err;
    EXPECT_THAT(verified.out, testing::Not(HasSubstr("not seen  optimizer")));
    return true;
  }

  const TempDir dir_;
  const std::string source_ = test_data(GetParam());
  std::string config_ = source_ + "/config.json";
};

TEST_P(OptimizerPairs, StateFollowsItsParameterThereAndBack) {
  const Options ways[] = {{"--to", "dcp", "--names", "hf", "--mesh", "dp_shard=3"},
                          {"--to", "dcp", "--names", "torchtitan", "--mesh", "tp=2"},
                          {"--to", "torch_checkpointing", "--names", "torchtitan-2026", "--mesh", "dp_shard=2,tp=2"},
                          {"--to", "dcp", "--names", "megatron"},
                          {"--to", "megatron"},
                          {"--to", "megatron-legacy"},
                          {"--to", "dcp", "--names", "megatron"},
                          {"--to", "megatron-legacy-local", "--mesh", "tp=2"},
                          {"--to", "deepspeed-universal"},
                          {"--to", "dcp", "--names", "hf"}};
  if (!std::filesystem::exists(config_)) {  // Megatron's args give one
    ASSERT_EQ(reshard_cli({"convert", source_, dir_ / "model", "--to", "hf", "-q"}).exit_code, 0);
    config_ = dir_ / "model/config.json";
  }
  std::string last = source_;
  int made = 0;
  for (const Options& way : ways) {  // each converts the previous output
    const std::string out = dir_ / std::to_string(made);
    if (!convert(last, out, way)) continue;
    last = out;
    ++made;
  }
  EXPECT_GE(made, 3);
  // Compares with the producer's own numbers, if they are stored under Hugging Face names.
  const std::string truth = source_ + ".optim.json";
  if (std::string_view(GetParam()).starts_with("megatron") || std::string_view(GetParam()).ends_with("pipe")) return;
  TensorValues found;
  for (const auto& [name, value] : load_checkpoint(last)) {
    std::string key = name;
    const std::string prefix = "optimizer.state.";
    if (!key.starts_with(prefix)) continue;
    const std::size_t dot = key.rfind('.');
    const std::string word = key.substr(dot + 1);
    if (word == "step") continue;
    found.emplace((word == "fp32_param" ? "fp32" : word) + "." + key.substr(prefix.size(), dot - prefix.size()), value);
  }
  auto wanted = read_digests(truth);
  std::erase_if(wanted, [](const auto& entry) { return entry.first.find("step") != std::string::npos; });
  EXPECT_EQ(digests_of(found), wanted);
}

INSTANTIATE_TEST_SUITE_P(Real, OptimizerPairs, testing::ValuesIn(sampled(kSources, 3)), [](const auto& source) {
  std::string name = source.param;
  std::replace(name.begin(), name.end(), '/', '_');
  return name;
});

}  // namespace
}  // namespace reshard::optimizer_pairs_test
