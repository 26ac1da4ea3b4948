// Converts between every pair of formats, the toy included: A -> B -> A with equal digests at each step and no finding
// of verify. New rows of the table are included automatically.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <tuple>

#include "formats/registry.h"
#include "tests/formats/toy/toy.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

// A way to write a format.
struct Way {
  std::string name;
  std::vector<std::string> options;
  bool plain = false;  // no options besides the format
};

std::vector<Way> ways() {
  std::vector<const Format*> rows(formats().begin(), formats().end());
  rows.push_back(&kToyFormat);
  std::vector<Way> out;
  for (const Format* f : rows) {
    if (!f->lay_out || !f->open) continue;
    const std::string to(f->name), names(f->own_names.empty() ? "hf" : f->own_names);
    const std::size_t first = out.size();
    out.push_back({to, {"--to", to}, true});
    const bool is_of_tp = f->sharding == Sharding::kOwnLocal;
    if (f->takes_mesh() && !is_of_tp) out.push_back({to + "-pp2", {"--to", to, "--mesh", "pp=2"}});
    if (is_of_tp) out.push_back({to + "-tp4", {"--to", to, "--mesh", "tp=4"}});
    if (f->takes_mesh() && !f->holds_whole_tensors() && !is_of_tp)
      out.push_back({to + "-tp3", {"--to", to, "--mesh", "tp=3"}});
    if (f->takes_container) out.push_back({to + "-bin", {"--to", to, "--shard-format", "bin"}});
    if (f->takes_compression) out.push_back({to + "-zstd", {"--to", to, "--codec", "zstd:1"}});
    for (std::size_t i = first; i < out.size(); ++i) out[i].options.insert(out[i].options.end(), {"--names", names});
  }
  return out;
}

std::vector<Way> plain_ways() {
  std::vector<Way> out = ways();
  std::erase_if(out, [](const Way& way) { return !way.plain; });
  return out;
}

class Pairs : public testing::TestWithParam<Way> {
 protected:
  static CommandResult run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), RESHARD_TOY_BINARY);
    return run_command(arguments);
  }
  void convert(const std::string& from, const std::string& to, const Way& way) {
    std::vector<std::string> arguments = {"convert", from, to, "--quiet", "--memory", "1GiB"};
    arguments.insert(arguments.end(), way.options.begin(), way.options.end());
    const CommandResult done = run(arguments);
    ASSERT_EQ(done.exit_code, 0) << way.name << ": " << done.err;
    const CommandResult verified = run({"verify", to, "--memory", "1GiB"});
    EXPECT_EQ(verified.exit_code, 0) << to << ": " << verified.out << verified.err;
  }
  void expect_equal(const std::string& a, const std::string& b) {
    const CommandResult done = run({"diff", a, b, "--memory", "1GiB"});
    EXPECT_EQ(done.exit_code, 0) << done.out << done.err;
  }
  TempDir dir_;
};

TEST_P(Pairs, ThereAndBackIsTheSame) {
  const Way& a = GetParam();
  const std::string source = sample("tp8") + "/hf.safetensors", first = dir_ / a.name;
  const auto all = ways();
  ASSERT_GE(all.size(), 8U);
  convert(source, first, a);
  expect_equal(source, first);
  const auto step = static_cast<std::size_t>(every_nth(8));
  for (std::size_t i = a.name.size() % step; i < all.size(); i += step) {
    const Way& b = all[i];
    const std::string middle = dir_ / (a.name + "-to-" + b.name), back = middle + "-back";
    convert(first, middle, b);
    convert(middle, back, a);
    expect_equal(first, back);
    std::filesystem::remove_all(middle);
    std::filesystem::remove_all(back);
  }
}
INSTANTIATE_TEST_SUITE_P(Formats, Pairs, testing::ValuesIn(plain_ways()), [](const auto& way) {
  std::string name = way.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(Targets, RefuseOptionsThatMeanNothingForThem) {
  const TempDir dir;
  Index refused = 0;
  for (const Format* f : formats()) {
    if (!f->lay_out) continue;
    for (const auto& [option, value, means] : {std::tuple("--shard-format", "bin", f->takes_container),
                                               {"--max-shard-size", "1MB", f->max_file_bytes > 0},
                                               {"--codec", "zstd:1", f->takes_compression},
                                               {"--mesh", "dp_shard=1", f->takes_mesh()}}) {
      const std::string to(f->name);
      const CommandResult r = reshard_cli(
          {"plan", sample("tp8") + "/checkpoint", "--to", to, "--memory", "1GiB", std::string(option), value});
      EXPECT_EQ(r.exit_code, means ? 0 : 2) << to << " " << option << ": " << r.err;
      if (!means) {
        EXPECT_THAT(r.err, testing::HasSubstr(std::string(option) + " does not apply to --to "));
      }
      refused += !means;
    }
  }
  EXPECT_GT(refused, 10);
}

}  // namespace
}  // namespace reshard
