// Compares reshard merge with the same expression computed on the sources' values, for sources in any format.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "tests/support/changed_model.h"
#include "tests/support/checkpoints.h"
#include "tests/support/mpirun.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::cli_merge_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::vector<float> floats_of(const TensorValue& value) {
  std::vector<float> out(static_cast<std::size_t>(volume(value.shape)));
  convert(value.dtype, DType::kFloat32, reinterpret_cast<const std::byte*>(value.bytes.data()),
          reinterpret_cast<std::byte*>(out.data()), std::ssize(out));
  return out;
}

CommandResult merge(std::vector<std::string> args) {
  args.insert(args.begin(), "merge");
  return reshard_cli(std::move(args));
}

// Models of equal shapes and different values, as Hugging Face files and as conversions of them.
class MergeTest : public testing::Test {
 protected:
  std::string model(const std::string& name, unsigned seed) {
    return write_changed_model(dir_ / name, [&](std::size_t at, char byte) {
      return static_cast<char>(byte ^ static_cast<char>((at * 31 * seed + at / 977) % 128));  // mantissas of bfloat16
    });
  }
  const TempDir dir_;
};

TEST_F(MergeTest, IsTheExpressionOfEachElementWhateverTheSourcesForm) {
  const std::string a = model("a", 1), b = model("b", 2), c = model("c", 3);
  const TensorValues of_a = load_checkpoint(a), of_b = load_checkpoint(b), of_c = load_checkpoint(c);
  const std::string dcp =
      converted(b, dir_ / "b-dcp", {"--to", "dcp", "--mesh", "tp=2,dp_shard=2", "--names", "torchtitan"});
  const std::string wide = converted(c, dir_ / "c-wide", {"--to", "bin", "--dtype", "float32"});
  const CommandResult r = merge({"base=" + a, "x=" + dcp, "y=" + wide, dir_ / "out", "--expression",
                                 "base + 0.7*(x - base) - y/3", "--to", "hf", "--dtype", "float32"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("proof"));
  const TensorValues got = load_checkpoint(dir_ / "out");
  ASSERT_EQ(got.size(), of_a.size());
  for (const auto& [name, value] : got) {
    const auto x = floats_of(of_a.at(name)), y = floats_of(of_b.at(name)), z = floats_of(of_c.at(name));
    const auto merged = floats_of(value);
    for (std::size_t i = 0; i < merged.size(); ++i) {
      volatile float step = y[i] - x[i];
      step = 0.7f * step;
      step = x[i] + step;
      volatile const float third = z[i] / 3.0f;
      step = step - third;
      ASSERT_EQ(merged[i], step) << name;
    }
  }
  const Json manifest = *parse_json(read_file(dir_ / "out/reshard_manifest.json"), "manifest");
  const Json& how = *manifest.find("merge");
  EXPECT_EQ(*how.get_string("expression"), "base + 0.7*(x - base) - y/3");
  EXPECT_EQ(how.find("sources")->size(), 3u);
  // The result has the first source's dtype, bfloat16, and is rounded once, whatever the other dtypes are.
  ASSERT_EQ(merge({a, dcp, dir_ / "mean", "--average", "--to", "hf"}).exit_code, 0);
  ASSERT_EQ(merge({a, dcp, dir_ / "mean32", "--average", "--to", "hf", "--dtype", "float32"}).exit_code, 0);
  const std::string narrow = converted(dir_ / "mean32", dir_ / "narrow", {"--to", "hf", "--dtype", "bfloat16"});
  EXPECT_TRUE(load_checkpoint(dir_ / "mean") == load_checkpoint(narrow));
}

TEST_F(MergeTest, OfOneSourceByItselfIsThatSource) {
  const std::string a = model("a", 1);
  const std::string dcp = converted(a, dir_ / "dcp", {"--to", "dcp", "--mesh", "tp=4"});
  ASSERT_EQ(merge({a, dcp, dir_ / "out", "--weights", "0.5,0.5", "--to", "hf"}).exit_code, 0);
  EXPECT_TRUE(load_checkpoint(dir_ / "out") == load_checkpoint(a));
  ASSERT_EQ(merge({dcp, a, dir_ / "back", "--ema", "0.5", "--to", "dcp", "--mesh", "dp_shard=3"}).exit_code, 0);
  const CommandResult same = reshard_cli({"verify", dir_ / "back", "--against", a});
  EXPECT_EQ(same.exit_code, 0) << same.out << same.err;
}

TEST_F(MergeTest, IsTheSameForAnyNumberOfThreadsAndRanks) {
  const std::string a = model("a", 1), b = converted(model("b", 2), dir_ / "dcp", {"--to", "dcp", "--mesh", "tp=8"});
  const std::vector<std::string> how = {"--weights", "0.3,0.7", "--to", "hf"};
  const auto merged = [&](const std::string& name, std::vector<std::string> more) {
    std::vector<std::string> args = {a, b, dir_ / name};
    args.insert(args.end(), how.begin(), how.end());
    args.insert(args.end(), more.begin(), more.end());
    const CommandResult r = merge(args);
    EXPECT_EQ(r.exit_code, 0) << r.err;
    return all_files(dir_ / name);
  };
  const auto once = merged("t1", {"--threads", "1"});
  for (const char* threads : {"2", "3", "7"})
    EXPECT_TRUE(merged(std::string("t") + threads, {"--threads", threads}) == once);
  if (!has_mpirun()) return;
  for (const int ranks : {2, 3}) {
    const std::string out = dir_ / ("r" + std::to_string(ranks));
    const RanksResult r =
        reshard_ranks(ranks, {"merge", a, b, out, "--weights", "0.3,0.7", "--to", "hf"}, out + "-logs");
    ASSERT_EQ(r.command.exit_code, 0) << r.err[0];
    EXPECT_TRUE(all_files(out) == once) << ranks;
  }
}

TEST_F(MergeTest, ItsLineageIsProvenAndAChangedSourceNamed) {
  const std::string a = model("a", 1), b = model("b", 2);
  ASSERT_EQ(merge({"base=" + a, "tuned=" + b, dir_ / "out", "--expression", "base + 0.5*(tuned - base)", "--to", "hf"})
                .exit_code,
            0);
  const CommandResult proven = reshard_cli({"verify", dir_ / "out", "--lineage", "--json"});
  EXPECT_EQ(proven.exit_code, 0) << proven.out << proven.err;
  EXPECT_THAT(proven.out, HasSubstr("merging the sources again gives the same output"));
  std::filesystem::rename(a, dir_ / "moved");
  EXPECT_THAT(reshard_cli({"verify", dir_ / "out", "--lineage"}).err,
              AllOf(HasSubstr("source base, " + a + ": not found"), HasSubstr("--source base=DIR")));
  EXPECT_EQ(reshard_cli({"verify", dir_ / "out", "--lineage", "--source", "base=" + dir_ / "moved"}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"verify", dir_ / "out", "--lineage", "--source", "other=" + b}).exit_code, 2);
  std::filesystem::rename(dir_ / "moved", a);
  std::string bytes = read_file(b + "/model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(b + "/model.safetensors", bytes);
  const CommandResult changed = reshard_cli({"verify", dir_ / "out", "--lineage"});
  EXPECT_EQ(changed.exit_code, 1) << changed.err;
  EXPECT_THAT(changed.out, AllOf(HasSubstr("source tuned"), HasSubstr("differs from the source that was merged")));
  const CommandResult none = reshard_cli({"verify", a, "--lineage"});
  EXPECT_NE(none.exit_code, 0);
}

TEST_F(MergeTest, RefusesWhatDoesNotFit) {
  const std::string a = model("a", 1), b = model("b", 2);
  const auto refused = [&](std::vector<std::string> args, int code, const testing::Matcher<std::string>& message) {
    args.insert(args.end(), {"--to", "hf"});
    const CommandResult r = merge(args);
    EXPECT_EQ(r.exit_code, code) << r.out << r.err;
    EXPECT_THAT(r.err, message);
    EXPECT_FALSE(*path_exists(dir_ / "out"));
  };
  const std::string out = dir_ / "out";
  refused({a, b, out}, 2, HasSubstr("expected exactly one of --average, --weights, --ema and --expression"));
  refused({a, b, out, "--weights", "1"}, 2, HasSubstr("expected 2 numbers, one for each source, got 1"));
  refused({a, b, out, "--weights", "1,nan"}, 2, HasSubstr("expected a number, got 'nan'"));
  refused({a, b, out, "--expression", "s1 + 0.5*s3"}, 2, HasSubstr("expected one of the sources s1, s2"));
  refused({"m=" + a, "m=" + b, out, "--average"}, 2, HasSubstr("two sources are named 'm'"));
  refused({a, out, "--average"}, 2, HasSubstr("at least two sources"));
  refused({a, dir_ / "absent", out, "--average"}, 5, HasSubstr("absent: not found"));
  refused({a, b, out, "--average", "--others-from", "x"}, 2, HasSubstr("unknown source 'x'"));
  const std::string less = converted(b, dir_ / "less", {"--to", "dcp", "--exclude", "*norm.weight", "--names", "hf"});
  refused({a, less, out, "--average"}, 3, HasSubstr("9 tensors"));
  refused({a, less, out, "--average", "--allow", "config"}, 4, HasSubstr("lacks 9 tensors"));
}

}  // namespace
}  // namespace reshard::cli_merge_test
