// Tests that a row of the table provides the whole program: inspect, convert both ways, verify, --force.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::toy_test {
namespace {

using testing::HasSubstr;

CommandResult toy_cli(std::vector<std::string> args) {
  args.insert(args.begin(), RESHARD_TOY_BINARY);
  return run_command(args);
}

class Toy : public testing::Test {
 protected:
  void convert(const std::string& from, const std::string& to, const std::string& format) {
    const CommandResult done = toy_cli({"convert", from, to, "--to", format, "--names", "hf", "--quiet"});
    ASSERT_EQ(done.exit_code, 0) << done.err;
  }
  const TempDir dir_;
  const std::string source_ = sample("tp8") + "/hf.safetensors", toy_ = dir_ / "toy";
};

TEST_F(Toy, GoesThereAndBack) {
  ASSERT_NO_FATAL_FAILURE(convert(source_, toy_, "toy"));
  ASSERT_NO_FATAL_FAILURE(convert(toy_, dir_ / "back", "dcp"));
  for (const std::string& made : {toy_, dir_ / "back"}) {
    const CommandResult same = toy_cli({"diff", source_, made});
    EXPECT_EQ(same.exit_code, 0) << same.out << same.err;
    const CommandResult verified = toy_cli({"verify", made});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
  const CommandResult shown = toy_cli({"inspect", toy_});
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
  EXPECT_THAT(shown.out, HasSubstr("toy, "));
}

TEST_F(Toy, IsReplacedByForceAlone) {
  ASSERT_NO_FATAL_FAILURE(convert(source_, toy_, "toy"));
  std::filesystem::remove(toy_ + "/reshard_manifest.json");
  const std::vector<std::string> again = {"convert", source_, toy_, "--to", "hf", "--quiet"};
  EXPECT_THAT(toy_cli(again).err, HasSubstr("the destination exists; --force replaces it"));
  std::vector<std::string> forced = again;
  forced.emplace_back("--force");
  const CommandResult done = toy_cli(forced);
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_FALSE(std::filesystem::exists(toy_ + "/toy.json"));
  EXPECT_EQ(toy_cli({"diff", source_, toy_}).exit_code, 0);
}

TEST_F(Toy, IsInTheTablesText) {
  EXPECT_THAT(toy_cli({"convert", "--help"}).out, HasSubstr("    toy                    toys\n"));
  EXPECT_THAT(toy_cli({"convert", source_, toy_, "--to", "toys"}).err, HasSubstr("hdf5-view, toy"));
  EXPECT_THAT(reshard_cli({"convert", source_, toy_, "--to", "toy"}).err,
              HasSubstr("unknown format 'toy'; choose one of: "));
}

}  // namespace
}  // namespace reshard::toy_test
