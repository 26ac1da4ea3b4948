// Models that transformers holds under other names in memory than in files, as trainers save them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

std::string moe() { return test_data("moe/qwen3_5_moe"); }

// tests/data/moe: experts of two layers fused, on two FSDP ranks; the digests are of what save_pretrained writes.
TEST(FamiliesOnDisk, FusedExpertsBecomeTheFilesOfSavePretrainedAndBack) {
  const TempDir dir;
  const CommandResult there = reshard_cli({"convert", moe(), dir / "hf", "--to", "hf", "-q"});
  ASSERT_EQ(there.exit_code, 0) << there.err;
  const TensorValues files = load_checkpoint(dir / "hf");
  EXPECT_EQ(digests_of(files), read_digests(moe() + ".hf.json"));
  const CommandResult verified = reshard_cli({"verify", moe(), "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;

  const CommandResult back = reshard_cli(
      {"convert", dir / "hf", dir / "back", "--to", "dcp", "--names", "transformers", "--mesh", "dp_shard=3", "-q"});
  ASSERT_EQ(back.exit_code, 0) << back.err;
  TensorValues memory;
  for (auto& [name, value] : load_checkpoint(moe())) memory.emplace(name.substr(name.find('.') + 1), value);
  EXPECT_EQ(load_checkpoint(dir / "back"), memory);
}

}  // namespace
}  // namespace reshard
