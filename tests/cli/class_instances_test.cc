// Tests files with instances of classes (tests/data/torch_save/with_args.pt has an argparse.Namespace next to the
// model): commands that do not write them work, and the others say how to leave them out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::class_instances_test {
namespace {

using testing::HasSubstr;

const std::string kSaved = RESHARD_TEST_DATA "/torch_save/with_args.pt";

TEST(ClassInstances, AreNotReadByVerify) {
  const CommandResult r = reshard_cli({"verify", kSaved});
  EXPECT_EQ(r.exit_code, 0) << r.err << r.out;
  EXPECT_THAT(r.out, HasSubstr("not read  1 object of a form that reshard does not read: args"));
  EXPECT_THAT(r.out, HasSubstr("all data read"));
}

TEST(ClassInstances, AreNotCompared) {
  const CommandResult verified = reshard_cli({"verify", kSaved, "--against", kSaved});
  EXPECT_EQ(verified.exit_code, 0) << verified.err << verified.out;
  const CommandResult r = reshard_cli({"diff", kSaved, kSaved});
  EXPECT_EQ(r.exit_code, 0) << r.err << r.out;
  EXPECT_THAT(r.out, HasSubstr("not seen  objects of a form that reshard does not read: args"));
}

TEST(ClassInstances, AreLeftOutAsTheErrorSays) {
  const TempDir dir;
  const CommandResult refused = reshard_cli({"convert", kSaved, dir / "out", "--to", "dcp", "-q"});
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_THAT(refused.err, HasSubstr("object 'args': unsupported value: an object argparse.Namespace()"));
  EXPECT_THAT(refused.err, HasSubstr("; to leave it out, add --exclude args"));
  const CommandResult r = reshard_cli({"convert", kSaved, dir / "out", "--to", "dcp", "-q", "--exclude", "args"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(load_checkpoint(dir / "out").at("w"), load_checkpoint(kSaved).at("w"));
}

}  // namespace
}  // namespace reshard::class_instances_test
