// Tests HDF5 from the command line: messages, and equal digests after every conversion there and back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/checkpoints.h"
#include "tests/support/expect_run.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::cli_hdf5_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

// Runs reshard with additional memory for the sanitizers.
CommandResult with_room(std::vector<std::string> args) { return reshard_cli(std::move(args), {"--memory", "1GiB"}); }

TEST(Hdf5Cli, ThereAndBackIsTheSameCheckpoint) {
  const TempDir dir;
  int n = 0;
  for (const std::string name : {"fsdp2_tp2_optim", "tp8"})
    for (const std::string codec : {"none", "zstd:1"}) {
      if (n++ % every_nth(3) != 0) continue;
      const std::string source = sample(name) + "/checkpoint", file = dir / (name + codec + ".h5");
      expect_success(with_room({"convert", source, file, "--to", "hdf5", "--codec", codec}));
      expect_success(with_room({"verify", source, "--against", file}));
      expect_success(with_room({"verify", file}));
      expect_success(with_room({"convert", file, file + ".dcp", "--to", "dcp", "--mesh", "tp=2"}));
      expect_success(with_room({"verify", source, "--against", file + ".dcp"}));
      expect_success(with_room({"convert", file, file + ".hf", "--to", "hf"}));
      expect_success(with_room({"convert", file + ".hf", file + ".hf.h5", "--to", "hdf5", "--codec", codec}));
      expect_success(with_room({"convert", file + ".hf.h5", file + ".hf2", "--to", "hf"}));
      EXPECT_EQ(read_file(file + ".hf/model.safetensors"), read_file(file + ".hf2/model.safetensors"));
      EXPECT_EQ(read_file(file + ".hf/config.json"), read_file(file + ".hf2/config.json"));
    }
}

TEST(Hdf5Cli, SaysWhereTheDigestsAre) {
  const TempDir dir;
  const CommandResult r =
      with_room({"convert", sample("tp8") + "/checkpoint", dir / "a.h5", "--to", "hdf5", "--codec", "zstd:3"});
  expect_success(r);
  EXPECT_THAT(r.out, AllOf(HasSubstr("done      " + dir / "a.h5 "), HasSubstr("reshard_manifest.json in the file"),
                           HasSubstr("--against " + dir / "a.h5\n")));
  const CommandResult again = with_room({"convert", sample("tp8") + "/checkpoint", dir / "a.h5", "--to", "hdf5"});
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_THAT(again.err, HasSubstr("the destination exists; --force replaces it"));
}

TEST(Hdf5Cli, RefusesWhatMakesNoSense) {
  const TempDir dir;
  const std::string source = sample("tp8") + "/checkpoint", out = dir / "out";
  const auto refused = [&](const std::vector<std::string>& options, const std::string& message) {
    std::vector<std::string> args = {"convert", source, out};
    args.insert(args.end(), options.begin(), options.end());
    const CommandResult r = reshard_cli(args);
    EXPECT_EQ(r.exit_code, 2) << r.out;
    EXPECT_THAT(r.err, HasSubstr(message));
    EXPECT_TRUE(fs::is_empty(dir.path()));
  };
  for (const char* codec : {"zstd", "zstd:", "zstd:0", "zstd:20", "zstd:3x", "gzip", "zstd:-1"})
    refused({"--to", "hdf5", "--codec", codec}, "--codec: expected none or zstd:LEVEL with a level of 1 to 19");
  refused({"--to", "hf", "--codec", "zstd:1"},
          "--codec does not apply to --to hf; it applies to orbax, orbax-zarr2, hdf5");
  refused(
      {"--to", "hdf5", "--mesh", "tp=2"},
      "--mesh does not apply to --to hdf5, whose files are not sharded by rank; it applies to dcp, megatron-legacy, "
      "megatron-legacy-local, megatron, torch_checkpointing, colossalai, vllm, vllm-0.13, ranks");
  refused({"--to", "hdf5-view", "--dtype", "float32"}, "--dtype: a view shows the stored values");
}

TEST(Hdf5Cli, AViewIsSmallAndSaysWhatItShows) {
  const TempDir dir;
  const std::string source = sample("tp8") + "/checkpoint";
  const CommandResult r = with_room({"convert", source, dir / "v.h5", "--to", "hdf5-view"});
  expect_success(r);
  EXPECT_THAT(r.out, AllOf(HasSubstr("39 tensors mapped in place"), HasSubstr("pieces joined")));
  EXPECT_LT(fs::file_size(dir / "v.h5"), 300'000u);
  EXPECT_EQ(with_room({"convert", source, dir / "v.h5", "--to", "hdf5-view"}).exit_code, 2);
  expect_success(with_room({"convert", source, dir / "v.h5", "--to", "hdf5-view", "--force", "--names", "hf"}));
  // Compressed tensors are not stored in their plain form anywhere.
  write_dcp({{"w", {DType::kFloat32, {100, 100}, std::string(40'000, 'x')}}}, dir / "ck", Mesh());
  expect_success(with_room({"convert", dir / "ck", dir / "z.h5", "--to", "hdf5", "--codec", "zstd:1"}));
  const CommandResult none = with_room({"convert", dir / "z.h5", dir / "vz.h5", "--to", "hdf5-view"});
  EXPECT_EQ(none.exit_code, 4);
  EXPECT_THAT(none.err, HasSubstr("stored compressed"));
  EXPECT_FALSE(fs::exists(dir / "vz.h5"));
}

TEST(Hdf5Cli, OtherFilesAreNotTakenForOne) {
  const TempDir dir;
  write_file(dir / "a.h5", "\x89HDF\r\n\x1a\n and then nothing of the kind");
  const CommandResult r = reshard_cli({"inspect", dir / "a.h5"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("a.h5: libhdf5 says '"));
}

}  // namespace
}  // namespace reshard::cli_hdf5_test
