// SPDX-License-Identifier: Apache-2.0
// Tests reshard delta and reshard patch: the recorded changes between two models, applied to the first, give the second
// bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/changed_model.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::delta_test {
namespace {

using testing::HasSubstr;
using testing::Not;

class Delta : public testing::Test {
 protected:
  void SetUp() override {
    for (const unsigned step : {0u, 1u, 2u, 3u}) steps_.push_back(model("step" + std::to_string(step), step));
  }

  // Returns a model that differs from that of the previous step in one of 50 elements, in their lowest bits.
  std::string model(const std::string& name, unsigned step) const {
    return write_changed_model(dir_ / name, [&](std::size_t at, char byte) {
      for (unsigned s = 1; s <= step; ++s)
        if ((at * 2654435761u + s * 40502u) % 50 == 0) byte = static_cast<char>(byte ^ 1);
      return byte;
    });
  }

  CommandResult run(std::vector<std::string> args) const { return reshard_cli(std::move(args)); }
  std::string delta(const std::string& from, const std::string& to, const std::string& name) const {
    const CommandResult made = run({"delta", from, to, dir_ / name});
    EXPECT_EQ(made.exit_code, 0) << made.err;
    return dir_ / name;
  }

  const TempDir dir_;
  std::vector<std::string> steps_;
};

TEST_F(Delta, ChainGivesTheLastModelInOnePass) {
  const std::string d1 = delta(steps_[0], steps_[1], "d1.h5"), d2 = delta(steps_[1], steps_[2], "d2.h5"),
                    d3 = delta(steps_[2], steps_[3], "d3.h5");
  EXPECT_LT(std::filesystem::file_size(d1), std::filesystem::file_size(steps_[0] + "/model.safetensors") / 2);
  const CommandResult r = run({"patch", steps_[0], d1, d2, d3, dir_ / "out", "--to", "hf"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(dir_ / "out") == load_checkpoint(steps_[3]));
  const CommandResult again = run({"verify", d1, "--lineage"});
  EXPECT_EQ(again.exit_code, 0) << again.out << again.err;
  const CommandResult patched = run({"verify", dir_ / "out", "--lineage"});
  EXPECT_EQ(patched.exit_code, 0) << patched.out << patched.err;
}

// Both models, the base and the output may have any formats, names and layouts.
TEST_F(Delta, HoldsForAnyFormatsAndNames) {
  const std::string sharded =
      converted(steps_[1], dir_ / "dcp", {"--to", "dcp", "--names", "torchtitan", "--mesh", "tp=2,dp_shard=2"});
  const std::string d1 = delta(steps_[0], sharded, "d1.h5");
  const std::string base = converted(steps_[0], dir_ / "megatron", {"--to", "megatron", "--mesh", "tp=2"});
  for (const std::string& from : {steps_[0], base}) {
    for (const std::vector<std::string>& to : {std::vector<std::string>{"--to", "hf"},
                                               {"--to", "dcp", "--mesh", "tp=4"},
                                               {"--to", "hf", "--dtype", "float32"}}) {
      std::vector<std::string> args = {"patch", from, d1, dir_ / "out", "--force"};
      args.insert(args.end(), to.begin(), to.end());
      const CommandResult r = run(args);
      ASSERT_EQ(r.exit_code, 0) << r.err;
      std::vector<std::string> compare = {"diff", dir_ / "out", steps_[1]};
      const CommandResult same = run(compare);
      EXPECT_EQ(same.exit_code, 0) << same.out << same.err;
      std::filesystem::remove_all(dir_ / "out");
    }
  }
}

TEST_F(Delta, IsRefusedForAnotherModelThanItsOwn) {
  const std::string d1 = delta(steps_[0], steps_[1], "d1.h5"), d2 = delta(steps_[1], steps_[2], "d2.h5");
  struct Case {
    std::vector<std::string> sources;
    int exit_code;
    std::string says;
  };
  for (const Case& c : std::vector<Case>{{{steps_[1], d1}, 4, "not the model that"},
                                         {{steps_[0], d2}, 4, steps_[1]},  // the base that is needed
                                         {{steps_[0], d2, d1}, 2, "another model than the result of"},
                                         {{steps_[0], d1, d1}, 2, "another model than the result of"},
                                         {{steps_[0], steps_[1]}, 4, "not a delta"}}) {
    std::vector<std::string> args = {"patch"};
    args.insert(args.end(), c.sources.begin(), c.sources.end());
    args.insert(args.end(), {dir_ / "out", "--to", "hf"});
    const CommandResult r = run(args);
    EXPECT_EQ(r.exit_code, c.exit_code) << r.err;
    EXPECT_THAT(r.err, HasSubstr(c.says));
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
  }
}

// Every command that expects a model says what the file is.
TEST_F(Delta, IsNotTakenForAModel) {
  const std::string d1 = delta(steps_[0], steps_[1], "d1.h5");
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{{"convert", d1, dir_ / "out", "--to", "hf"},
                                             {"plan", d1, "--to", "dcp"},
                                             {"merge", d1, steps_[0], dir_ / "out", "--average", "--to", "hf"},
                                             {"merge", steps_[0], d1, dir_ / "out", "--average", "--to", "hf"},
                                             {"delta", d1, steps_[0], dir_ / "out"}}) {
    const CommandResult r = run(args);
    EXPECT_EQ(r.exit_code, 4) << args[0] << r.err;
    EXPECT_THAT(r.err, HasSubstr("reshard patch"));
  }
  EXPECT_THAT(run({"inspect", d1}).out, HasSubstr("what changed since " + steps_[0]));
}

// A changed byte of a delta's tensor data is found before the output appears: it cannot be decoded, or the digest
// differs.
TEST_F(Delta, DamagedIsFound) {
  const std::string d1 = delta(steps_[0], steps_[1], "d1.h5");
  const std::string whole = read_file(d1);
  constexpr std::string_view kFrame = "\x28\xb5\x2f\xfd";  // the first bytes of a zstd frame
  constexpr std::size_t kInside = 14;                      // bytes from there to a byte of its data
  int damaged = 0;
  for (std::size_t at = whole.find(kFrame); at != std::string::npos && damaged < 10; at = whole.find(kFrame, at + 1)) {
    std::string bytes = whole;
    bytes[at + kInside] = static_cast<char>(bytes[at + kInside] ^ 0x10);
    write_file(d1, bytes);
    const CommandResult r = run({"patch", steps_[0], d1, dir_ / "out", "--to", "hf"});
    EXPECT_EQ(r.exit_code, 3) << at << r.err;
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out")) << r.err;
    ++damaged;
  }
  EXPECT_GT(damaged, 5);
}

// An exclusive or covers integers and bools, and needs equal dtypes.
TEST_F(Delta, TakesTensorsOfAllDtypes) {
  const std::string wide = converted(steps_[1], dir_ / "wide", {"--to", "hf", "--dtype", "float32"});
  const CommandResult r = run({"delta", steps_[0], wide, dir_ / "d.h5"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("float32"));
}

}  // namespace
}  // namespace reshard::delta_test
