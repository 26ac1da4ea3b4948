// Calls the tools and the library from several threads, like the Python module (calls.cc). Also run with
// ThreadSanitizer.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::calls_test {
namespace {

// Once, a later call knew the family that an earlier call was given, and threads with families of their own crashed.
TEST(Calls, OfThreadsSeeNothingOfEachOther) {
  const TempDir dir;
  const std::string threads = "4", model = dir / "model";
  ASSERT_EQ(reshard_cli({"synth", model, "--model", "llama3-tiny", "--to", "hf"}).exit_code, 0);
  std::filesystem::copy_file(model + "/config.json", dir / "config.json");
  for (int t = 0; t < std::stoi(threads); ++t) {
    const std::string name = "mine_" + std::to_string(t);
    write_file(dir / ("family_" + std::to_string(t) + ".json"),
               R"({"reshard_family": 1, "name": ")" + name + R"(", "model_types": ["llama"], "extends": "llama"})");
  }
  const CommandResult result = run_command({RESHARD_CALLS_BINARY, dir.path(), threads, "2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

// Locating a tensor adds files to the catalogs of these formats, also while other threads read.
TEST(Calls, OfThreadsShareACheckpoint) {
  for (const char* name : {"megatron/dist_tp2_optim", "megatron/fsdp_dtensor/iter_0000003", "runs/zstd/checkpoint"}) {
    const CommandResult result = run_command({RESHARD_CALLS_BINARY, "--shared", test_data(name), "8"});
    EXPECT_EQ(result.exit_code, 0) << name << ": " << result.err;
  }
}

}  // namespace
}  // namespace reshard::calls_test
