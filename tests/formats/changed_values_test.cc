// Opens trainers' files with one pickled value replaced: the error must say what is wrong, and where. The exact
// messages are in tests/cli/golden/changed_*.
#include "tests/support/changed_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>
#include <set>

#include "formats/open.h"
#include "lib/base/text.h"
#include "tests/support/checkpoints.h"
#include "tests/support/golden.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::changed_values_test {
namespace {

namespace fs = std::filesystem;

struct Case {
  const char* name;
  const char* checkpoint;  // below tests/data
  const char* file;        // a file of it
};
class ChangedValue : public testing::TestWithParam<Case> {};

const Case kCases[] = {
    {"deepspeed_model", "deepspeed/z2_frozen_tied/global_step1", "mp_rank_00_model_states.pt"},
    {"deepspeed_optimizer", "deepspeed/z2_frozen_tied/global_step1", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"},
    {"deepspeed_zero3_model", "deepspeed/z3_frozen_tied/global_step1", "zero_pp_rank_1_mp_rank_00_model_states.pt"},
    {"deepspeed_zero3_optimizer", "deepspeed/z3_frozen_tied/global_step1",
     "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"},
    {"deepspeed_experts", "deepspeed/z2_moe/global_step1", "mp_rank_00_model_states.pt"},
    {"deepspeed_autoep", "deepspeed/z2_autoep/global_step1", "mp_rank_00_model_states.pt"},
    {"deepspeed_pipeline", "deepspeed/pipe/global_step1", "mp_rank_01_model_states.pt"},
    {"deepspeed_universal", "deepspeed/z1_universal/global_step1_universal", "zero/model.norm.weight/exp_avg.pt"},
    {"colossalai_ranks_meta", "colossalai_ranks/ranks", "meta-rank1.bin"},
    {"colossalai_ranks_list", "colossalai_ranks/ranks", "global_meta.bin"},
    {"colossalai_ranks_optimizer", "colossalai_ranks/ranks", "optim-rank2-shard0.bin"},
    {"colossalai_group", "colossalai_real/tied_pp2", "optimizer/pytorch_optim_group.bin"},
    {"fsdp_dtensors", "fsdp/accelerate_fsdp2", "pytorch_model_fsdp_0_rank1.bin"},
    {"fsdp_sharded_tensors", "fsdp/fsdp1_sharded", "model_world_size_3_rank_1.pt"},
    {"fsdp_optimizer", "fsdp/fsdp1_orig_params", "optim_world_size_3_rank_1.pt"},
    {"torch_checkpointing", "torch_checkpointing/fsdp2/step-2", "metadata.pkl"},
    {"megatron_legacy", "megatron/legacy_pp2_vpp2_dp2_distopt_tied/iter_0000010", "mp_rank_00_000/model_optim_rng.pt"},
    {"meta", "meta/llama2-tp2", "consolidated.01.pth"},
    {"megatron_common", "megatron/dist_tp2_optim/iter_0000010", "common.pt"},
    {"dcp_metadata", "dcp_small/ck2", ".metadata"}};

TEST_P(ChangedValue, IsNamedOrDoesNoHarm) {
  const auto& [name, checkpoint, file] = GetParam();
  const TempDir dir;
  fs::copy(test_data(checkpoint), dir / "ck", fs::copy_options::recursive);
  const std::string path = dir / (std::string("ck/") + file), whole = read_file(path);
  ASSERT_TRUE(open_checkpoint(dir / "ck")) << open_checkpoint(dir / "ck").error().message();
  const auto changes = changed_pickles(pickle_of(whole));
  ASSERT_GT(changes.size(), 30u);
  std::set<std::string> said;
  Index refused = 0;
  // The soak tries all 15,000 replacements, other runs every fifth: each value has eight, so all kinds are tried.
  const auto step = static_cast<std::size_t>(soak_is_asked() ? 1 : 5 * every_nth(5));
  for (std::size_t i = 0; i < changes.size(); i += step) {
    SCOPED_TRACE(changes[i].place + " as " + changes[i].value);
    fs::remove(path);  // overwriting a file costs a flush on some file systems
    write_file(path, with_pickle(whole, changes[i].bytes));
    const auto open = open_checkpoint(dir / "ck");  // checks the metadata against the files
    if (open) {
      for (const Blob& blob : open->reader->catalog().blobs) (void)open->reader->describe(blob);
      continue;
    }
    ++refused;
    std::string message = open.error().message();
    EXPECT_THAT(open.error().code(), testing::AnyOf(ErrorCode::kCorrupt, ErrorCode::kUnsupported, ErrorCode::kIo))
        << message;
    EXPECT_THAT(message, testing::HasSubstr(dir / "ck"));
    EXPECT_LT(message.size(), 3000u) << message;
    message = without(std::move(message), dir / "ck");
    static const std::regex kNumbers("0x[0-9a-f]+|[0-9]+"), kGot(", got .*|'[^']*\\.[^']*'");
    said.insert(std::regex_replace(std::regex_replace(message, kNumbers, "#"), kGot, "..."));
  }
  EXPECT_GT(refused, 0);
  const std::string golden = "changed_" + std::string(name) + ".txt";
  if (step > 1) {
    const std::string known = "\n" + read_golden(golden);
    for (const std::string& message : said)
      EXPECT_THAT(known, testing::HasSubstr("\n" + message + "\n"))
          << "RESHARD_SOAK=1 RESHARD_UPDATE_GOLDEN=1 updates it";
    return;
  }
  std::string text = std::to_string(changes.size()) + " values, " + std::to_string(refused) + " refused\n";
  for (const std::string& message : said) text += message + "\n";
  expect_golden(golden, text);
}

INSTANTIATE_TEST_SUITE_P(Formats, ChangedValue, testing::ValuesIn(kCases),
                         [](const auto& p) { return std::string(p.param.name); });

// Torch's optimizer next to a model: whatever is wrong with it, the model is read.
TEST(ChangedValueOfNumberedOptimizer, DoesNoHarmToTheModel) {
  const TempDir dir;
  const std::string from = test_data("runs/numbered_optimizer");
  fs::copy(from + "/model.safetensors", dir / "model.safetensors");
  dir.write("config.json", R"({"model_type": "llama"})");
  const std::string path = dir / "optimizer.pt", whole = read_file(from + "/whole.pt");
  std::size_t named = 0;
  for (const ChangedPickle& change : changed_pickles(pickle_of(whole))) {
    SCOPED_TRACE(change.place + " as " + change.value);
    fs::remove(path);
    write_file(path, with_pickle(whole, change.bytes));
    const auto open = open_checkpoint(dir.path());
    ASSERT_TRUE(open) << open.error().message();
    const Catalog& catalog = open->reader->catalog();
    EXPECT_TRUE(catalog.find("model.norm.weight"));
    if (catalog.tensors().size() > 7) ++named;
    for (const Blob& blob : catalog.blobs) {
      (void)open->reader->describe(blob);
      (void)open->reader->blob_bytes(blob);
    }
  }
  EXPECT_GT(named, 0u);  // the options of a group do not matter
}

}  // namespace
}  // namespace reshard::changed_values_test
