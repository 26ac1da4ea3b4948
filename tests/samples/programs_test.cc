// Runs the programs in samples/programs as intended and checks what they print and write.
#include <gmock/gmock.h>

#include <filesystem>
#include <set>
#include <sstream>

#include "formats/load.h"
#include "lib/device/device.h"
#include "tests/support/checkpoints.h"
#include "tests/support/mpirun.h"
#include "tests/support/temp_dir.h"

#ifdef RESHARD_SAMPLE_PROGRAMS

namespace reshard::programs_test {
namespace {

using testing::HasSubstr;

const std::string kLoadRanks = std::string(RESHARD_SAMPLE_PROGRAMS) + "/load_ranks";
const std::string kLoadCuda = std::string(RESHARD_SAMPLE_PROGRAMS) + "/load_cuda";
const std::string kCheckpoint = sample("fsdp4_tp2") + "/checkpoint";

// Returns RANK.NAME -> bytes for all ranks of a mesh, which one process loads one after the other.
std::map<std::string, std::string> parts(const std::string& mesh) {
  std::map<std::string, std::string> out;
  LoadOptions options;
  options.placement.mesh = *Mesh::parse(mesh);
  for (options.rank = 0; options.rank < options.placement.mesh.ranks(); ++options.rank)
    EXPECT_TRUE(load(kCheckpoint, options, [&](const LoadTensor& t) -> Result<Destination> {
      std::string& bytes = out[std::to_string(options.rank) + "." + t.name];
      bytes.resize(static_cast<std::size_t>(t.bytes()));
      return Destination{reinterpret_cast<std::byte*>(bytes.data()), std::nullopt};
    }));
  return out;
}

TEST(LoadRanks, OneRankAloneSaysAndWritesWhatItHas) {
  const TempDir dir;
  const CommandResult r =
      run_command({kLoadRanks, kCheckpoint, "tp=2,dp_shard=2", "--rank", "3", "--dump", dir.path()});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("rank 3: layers.0.attention.wo.weight bfloat16 [32, 32] of [64, 64]\n"));
  auto expected = parts("tp=2,dp_shard=2");
  std::erase_if(expected, [](const auto& part) { return part.first[0] != '3'; });
  EXPECT_TRUE(all_files(dir.path()) == expected);
}

TEST(LoadRanks, RanksUnderMpirunHoldTheSameEitherWay) {
  if (!has_mpirun()) GTEST_SKIP() << "built without MPI";
  const auto expected = parts("dp_replicate=2,tp=2");
  for (const std::string strategy : {"", "--exchange"}) {
    const TempDir dir;
    std::filesystem::create_directory(dir / "parts");
    std::vector<std::string> argv = {kLoadRanks, kCheckpoint, "dp_replicate=2,tp=2", "--dump", dir / "parts"};
    if (!strategy.empty()) argv.push_back(strategy);
    const RanksResult r = program_ranks(4, argv, dir / "logs");
    EXPECT_EQ(r.command.exit_code, 0) << r.command.err;
    EXPECT_TRUE(all_files(dir / "parts") == expected) << strategy;
  }
}

TEST(LoadRanks, SaysOnceWhatIsWrong) {
  const CommandResult alone = run_command({kLoadRanks, kCheckpoint, "tp=2", "--rank", "2"});
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_EQ(alone.err, "load_ranks: rank 2: a mesh of tp=2 has ranks 0 to 1\n");
  if (!has_mpirun()) GTEST_SKIP() << "built without MPI";
  const TempDir dir;
  const RanksResult r = program_ranks(2, {kLoadRanks, kCheckpoint, "tp=3"}, dir / "logs");
  EXPECT_NE(r.command.exit_code, 0);
  EXPECT_THAT(r.err[0], HasSubstr("mesh tp=3 has 3 ranks, but this job has 2"));
  EXPECT_EQ(r.err[1], "");
}

TEST(LoadRanks, TakesADevice) {
  const std::vector<std::string> argv = {kLoadRanks, kCheckpoint, "tp=2", "--device"};
  const auto on = [&](const std::string& device) {
    std::vector<std::string> with = argv;
    with.push_back(device);
    return run_command(with);
  };
  EXPECT_EQ(on("cpu").exit_code, 0);
  EXPECT_THAT(on("tpu").err, HasSubstr("load_ranks: device: expected cpu, cuda, cuda:N or auto, got 'tpu'"));
  if (const auto gpu = open_device("cuda", 0); gpu)
    EXPECT_EQ(on("cuda").out, on("cpu").out);
  else
    EXPECT_EQ(on("cuda").err, "load_ranks: " + gpu.error().message() + "\n");
}

TEST(LoadCuda, EndsWithAReasonWhereThereIsNoGpu) {
  const CommandResult r = run_command({kLoadCuda, kCheckpoint});
  if (open_device("cuda", 0)) {
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("as on the CPU"));
    return;
  }
  EXPECT_EQ(r.exit_code, 4) << r.out;
  EXPECT_THAT(r.err, HasSubstr("load_cuda: cuda"));
  EXPECT_THAT(run_command({kLoadCuda, kCheckpoint, "cpu"}).out, HasSubstr(" on cpu\n"));
}

}  // namespace
}  // namespace reshard::programs_test

#endif
