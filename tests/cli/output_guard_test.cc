// No output of a command may change its inputs: tries every option that writes, with every input, by every path that
// leads to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "lib/base/text.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::output_guard_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using Words = std::vector<std::string>;

// All options, by kind. An option in none of these lists fails the test below. A new option that writes belongs to
// kWriters, one that reads to kReaders; their paths are tried.
const std::set<std::string> kReaders = {"--config",  "--family-file", "--layout",    "--source-layout",
                                        "--donor",   "--adapter",     "--against",   "--source",
                                        "--tensors", "--delta",       "--keep-best", "--from-transformers"};
const std::set<std::string> kWriters = {"--html", "--junit", "--log", "--all", "--state"};
const std::set<std::string> kWords = {"--accumulate",
                                      "--allow",
                                      "--as",
                                      "--builtin",
                                      "--codec",
                                      "--device",
                                      "--dtype",
                                      "--ema",
                                      "--every",
                                      "--exclude",
                                      "--expression",
                                      "--fail-on",
                                      "--family",
                                      "--filter",
                                      "--gpu-memory",
                                      "--grad-dtype",
                                      "--hypothesis",
                                      "--include",
                                      "--interval",
                                      "--keep-dtype",
                                      "--keep-every",
                                      "--keep-last",
                                      "--layers",
                                      "--limit",
                                      "--lora-alpha",
                                      "--max-shard-size",
                                      "--memory",
                                      "--mesh",
                                      "--model",
                                      "--names",
                                      "--others-from",
                                      "--part",
                                      "--python",
                                      "--quantize",
                                      "--rank-timeout",
                                      "--ranks",
                                      "--ranks-per-machine",
                                      "--rename",
                                      "--repair",
                                      "--resume",
                                      "--sequence",
                                      "--shape",
                                      "--shard-format",
                                      "--source-mesh",
                                      "--source-names",
                                      "--strategy",
                                      "--strip-prefix",
                                      "--then",
                                      "--threads",
                                      "--to",
                                      "--tolerance",
                                      "--transport",
                                      "--vocab-divisible-by",
                                      "--vocab-padding",
                                      "--weights",
                                      "--without",
                                      "--world",
                                      "--without-optimizer-after"};

Words commands() {
  Words out;
  for (const std::string& line : split(reshard_cli({"-h"}).out, '\n'))
    if (line.starts_with("  ")) out.push_back(line.substr(2, line.find(' ', 2) - 2));
  return out;
}

// Returns the options of a command that take a value: "  --to FORMAT ...".
std::set<std::string> options_with_values(const std::string& command) {
  std::set<std::string> out;
  for (const std::string& line : split(reshard_cli({command, "--help"}).out, '\n')) {
    const std::size_t dashes = line.find("--");
    if (dashes == std::string::npos || line.find_first_not_of(' ') != dashes) continue;
    const std::size_t end = line.find_first_of(" ,", dashes);
    if (end == std::string::npos || line[end] != ' ' || end + 1 >= line.size()) continue;
    if (line[end + 1] >= 'A' && line[end + 1] <= 'Z') out.insert(line.substr(dashes, end - dashes));
  }
  return out;
}

TEST(OutputGuardTable, KnowsEveryOption) {
  std::set<std::string> all;
  for (const std::string& command : commands())
    for (const std::string& option : options_with_values(command)) {
      all.insert(option);
      EXPECT_EQ(kReaders.contains(option) + kWriters.contains(option) + kWords.contains(option), 1)
          << command << " " << option << ": does it read or write? Say so where it is declared, and here";
    }
  EXPECT_GT(all.size(), 40u);
  for (const std::string& option : kWriters) EXPECT_TRUE(all.contains(option)) << option;
}

// Inputs: two checkpoints, one of them a file, their config, a layout, a family and other files.
class OutputGuard : public testing::Test {
 protected:
  OutputGuard() {
    copy_sample("tp8", dir_.path());
    fs::rename(dir_ / "checkpoint", dir_ / "dcp");
    for (const std::string model : {"hf", "donor"}) {
      fs::create_directory(dir_ / model);
      fs::copy(sample("tp8") + "/hf.safetensors", dir_ / (model + "/model.safetensors"));
      fs::copy(dir_ / "config.json", dir_ / (model + "/config.json"));
    }
    dir_.write("hf/tokenizer.json", "{}");
    dir_.write("layout.json", reshard_cli({"layout", dir_ / "dcp", "--json"}).out);
    fs::copy(sample("tp8") + "/../../families/llama.json", dir_ / "family.json");
    fs::create_directory(dir_ / "mnt");
    before_ = all_files(dir_.path());
  }

  // Expects a usage error, and that nothing has changed.
  void expect_refused(Words line, const std::string& output) {
    const CommandResult r = reshard_cli(line);
    EXPECT_EQ(r.exit_code, 2) << join(line, " ") << "\n" << r.out << r.err;
    EXPECT_THAT(r.err, AllOf(HasSubstr(", which this job reads; "),
                             AnyOf(HasSubstr("it will not be replaced"), HasSubstr("choose a place outside it"))))
        << join(line, " ");
    EXPECT_EQ(r.out, "") << join(line, " ");
    ASSERT_EQ(all_files(dir_.path()), before_) << join(line, " ") << ": " << output;
  }

  // Returns other paths to a file, or to a new file in a directory, than the plain one.
  Words names_of(const std::string& path) {
    const fs::path at(path);
    fs::remove(dir_ / "link");
    fs::remove(dir_ / "hard");
    fs::remove(dir_ / "around");
    fs::create_symlink(path, dir_ / "link");
    fs::create_directory_symlink(at.parent_path(), dir_ / "around");
    Words out = {path, dir_ / "link", at.parent_path() / ".." / at.parent_path().filename() / at.filename(),
                 dir_ / "around/" + at.filename().string()};
    if (fs::is_regular_file(at)) {
      fs::create_hard_link(path, dir_ / "hard");
      out.push_back(dir_ / "hard");
    }
    before_ = all_files(dir_.path());
    return out;
  }

  TempDir dir_;
  std::map<std::string, std::string> before_;
};

TEST_F(OutputGuard, NoReportReplacesAnInput) {
  const std::string hf = dir_ / "hf", dcp = dir_ / "dcp", config = dir_ / "config.json";
  const Words in_hf = {hf + "/model.safetensors", hf + "/config.json", hf + "/tokenizer.json", hf + "/new"};
  const Words in_dcp = {dcp + "/.metadata", dcp + "/__3_0.distcp", dcp + "/new", config};
  struct Case {
    Words line, outputs, inputs;
  };
  const auto both = [](Words a, const Words& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  const Words audit = {"--html", "--junit"}, page = {"--html"};
  const std::vector<Case> cases = {
      {{"inspect", hf}, page, in_hf},
      {{"inspect", dcp}, page, in_dcp},
      {{"inspect", hf + "/model.safetensors"}, page, {hf + "/model.safetensors", hf + "/config.json"}},
      {{"inspect", dcp, "--source-layout", dir_ / "layout.json"}, page, {dir_ / "layout.json"}},
      {{"verify", dcp}, audit, in_dcp},
      {{"verify", dcp, "--against", hf}, audit, in_hf},
      {{"verify", dcp, "--layout", dir_ / "layout.json"}, audit, {dir_ / "layout.json"}},
      {{"verify", hf, "--family-file", dir_ / "family.json", "--config", config},
       audit,
       {dir_ / "family.json", config}},
      {{"verify", hf, "--lineage", "--source", "a=" + (dir_ / "donor")}, audit, {dir_ / "donor/model.safetensors"}},
      {{"diff", dcp, hf}, page, both(in_hf, in_dcp)},
      {{"plan", hf, "--to", "dcp", "--donor", dir_ / "donor", "--repair", "vocab"},
       page,
       both(in_hf, {dir_ / "donor/model.safetensors"})},
      {{"plan", dcp, "--to", "hf", "--merge-adapter", "--adapter", dir_ / "donor"}, page, {dir_ / "donor/config.json"}},
      {{"check", "--config", config, "--mesh", "tp=2", "--family-file", dir_ / "family.json"},
       audit,
       {config, dir_ / "family.json"}},
      {{"mount", hf, dir_ / "mnt", "--as", "dcp", "--background"}, {"--log"}, in_hf},
      {{"mount", dcp, dir_ / "mnt", "--as", "hf", "--background", "--config", config}, {"--log"}, in_dcp},
  };
  const int step = every_nth(8);
  int n = 0;
  for (const Case& c : cases)
    for (const std::string& input : c.inputs)
      for (const std::string& name : names_of(input))
        for (const std::string& option : c.outputs) {
          if (n++ % step != 0) continue;
          Words line = c.line;
          line.insert(line.end(), {option, name});
          ASSERT_NO_FATAL_FAILURE(expect_refused(line, name));
        }
}

TEST_F(OutputGuard, NoDestinationIsAnInputNorInOneNorHoldsOne) {
  const std::string hf = dir_ / "hf", dcp = dir_ / "dcp", donor = dir_ / "donor", config = dir_ / "config.json";
  struct Case {
    Words line, to, places;
  };
  const Words around_hf = {hf, hf + "/new", dir_.path()};
  const std::vector<Case> cases = {
      {{"convert", hf}, {"--to", "dcp"}, around_hf},
      {{"convert", hf}, {"--to", "hdf5"}, {hf, hf + "/new", hf + "/model.safetensors"}},
      {{"convert", hf}, {"--to", "hdf5-view", "--names", "hf"}, {hf, hf + "/new", hf + "/model.safetensors"}},
      {{"convert", dcp}, {"--to", "hf", "--config", config}, {dcp + "/new", config}},
      {{"convert", hf}, {"--to", "dcp", "--donor", donor, "--repair", "vocab"}, {donor, donor + "/new"}},
      {{"convert", hf}, {"--to", "hf", "--merge-adapter", "--adapter", donor}, {donor, donor + "/new"}},
      {{"convert", hf}, {"--to", "dcp", "--layout", dir_ / "layout.json"}, {dir_ / "layout.json"}},
      {{"plan", hf}, {"--to", "dcp"}, {hf, hf + "/new"}},
      {{"merge", hf, "b=" + donor}, {"--average", "--to", "hf"}, {hf, donor, hf + "/new", donor + "/new", dir_.path()}},
      {{"synth"}, {"--config", config}, {config, dir_.path()}},
      {{"mount", hf}, {"--as", "dcp"}, {hf, hf + "/new", dir_.path()}},
  };
  const int step = every_nth(8);
  int n = 0;
  for (const Case& c : cases)
    for (const std::string& place : c.places)
      for (const std::string& name : names_of(place))
        for (const bool force : {false, true}) {
          if (n++ % step != 0) continue;
          const std::string& command = c.line.front();
          if (force && (command == "plan" || command == "mount")) continue;
          Words line = c.line;
          line.push_back(name);
          line.insert(line.end(), c.to.begin(), c.to.end());
          if (force) line.emplace_back("--force");
          ASSERT_NO_FATAL_FAILURE(expect_refused(line, name));
        }
}

// Inputs that are not on the command line: targets of links, and files that other files refer to.
TEST_F(OutputGuard, FollowsInputsToWhereTheyAre) {
  fs::create_directory(dir_ / "farm");
  fs::create_symlink(dir_ / "hf/model.safetensors", dir_ / "farm/model.safetensors");
  fs::create_directory_symlink(dir_ / "donor", dir_ / "farm/more");
  ASSERT_EQ(reshard_cli({"convert", dir_ / "hf", dir_ / "view.h5", "--to", "hdf5-view", "-q"}).exit_code, 0);
  before_ = all_files(dir_.path());
  expect_refused({"inspect", dir_ / "farm", "--html", dir_ / "hf/model.safetensors"}, "");
  expect_refused({"verify", dir_ / "farm", "--junit", dir_ / "donor/model.safetensors"}, "");
  expect_refused({"convert", dir_ / "farm", dir_ / "hf", "--to", "hf", "--force"}, "");
  const CommandResult r = reshard_cli({"verify", dir_ / "view.h5", "--html", dir_ / "hf/model.safetensors"});
  EXPECT_NE(r.exit_code, 0);
  EXPECT_EQ(all_files(dir_.path()), before_);
}

// Commands that write a report, each with a report option at its end, and files of others that are not inputs.
TEST_F(OutputGuard, NoReportReplacesAFileOfAnotherKind) {
  const std::string hf = dir_ / "hf", config = dir_ / "config.json", other = dir_ / "other";
  fs::create_directory(dir_ / "run");
  fs::rename(dir_ / "donor", other);
  dir_.write("other/notes.html", "<!doctype html>\n<title>notes</title>\n");
  dir_.write("other/junit.xml", "<testsuites><testsuite name=\"pytest\"></testsuite></testsuites>\n");
  dir_.write("other/job.log", "epoch 1\n");
  dir_.write("other/one", "\n");
  dir_.write("other/sparse", std::string(1 << 16, '\0'));
  fs::create_symlink(other + "/config.json", dir_ / "to-config");
  const std::vector<Words> lines = {
      {"inspect", hf, "--html"},
      {"diff", hf, dir_ / "dcp", "--html"},
      {"verify", hf, "--html"},
      {"verify", hf, "--junit"},
      {"check", "--config", config, "--mesh", "tp=2", "--html"},
      {"check", "--config", config, "--mesh", "tp=2", "--junit"},
      {"plan", hf, "--to", "dcp", "--html"},
      {"watch", dir_ / "run", dir_ / "made", "--to", "hf", "--once", "--html"},
      {"mount", hf, dir_ / "mnt", "--as", "dcp", "--background", "--log"},
      {"family", "--from-transformers", hf, "--python", "/bin/false"},
  };
  before_ = all_files(dir_.path());
  const Words theirs = {
      other + "/model.safetensors", other + "/config.json", other + "/notes.html", other + "/one",
      other + "/junit.xml",         other + "/job.log",     other + "/sparse",     dir_ / "to-config"};
  for (const Words& line : lines) {
    std::vector<std::pair<std::string, std::string>> refused = {{other, "is a directory; expected a file"}};
    for (const std::string& path : theirs) refused.emplace_back(path, "so it will not be overwritten; choose another");
    for (const auto& [path, why] : sampled(refused, 3)) {
      Words with = line;
      with.push_back(path);
      const CommandResult r = reshard_cli(with);
      EXPECT_EQ(r.exit_code, 2) << join(with, " ") << r.out << r.err;
      EXPECT_THAT(r.err, AllOf(HasSubstr(path + ": "), HasSubstr(why))) << join(with, " ");
      EXPECT_EQ(r.out, "") << join(with, " ");
      ASSERT_EQ(all_files(dir_.path()), before_) << join(with, " ");
    }
    Words with = line;
    with.push_back(dir_ / "nowhere/report");
    const CommandResult r = reshard_cli(with);
    EXPECT_EQ(r.exit_code, 5) << join(with, " ");
    EXPECT_THAT(r.err, HasSubstr("/nowhere: no such directory")) << join(with, " ");
    EXPECT_EQ(r.out, "") << join(with, " ");
  }
  // A page in the directory that the command makes, also when it is there.
  fs::copy(hf, dir_ / "run/step-1", fs::copy_options::recursive);
  for (int n = 0; n < 2; ++n)
    EXPECT_EQ(reshard_cli({"watch", dir_ / "run", dir_ / "made", "--to", "hf", "--once", "--html", dir_ / "made/page"})
                  .exit_code,
              0);
  // A report of the other kind, and one file for two reports.
  ASSERT_EQ(reshard_cli({"verify", hf, "--html", dir_ / "page", "--junit", dir_ / "junit"}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"verify", hf, "--html", dir_ / "junit"}).exit_code, 2);
  EXPECT_EQ(reshard_cli({"verify", hf, "--junit", dir_ / "page"}).exit_code, 2);
  EXPECT_EQ(reshard_cli({"verify", hf, "--junit", dir_ / "new", "--html", dir_ / "new"}).exit_code, 2);
  EXPECT_FALSE(fs::exists(dir_ / "new"));
  // Manual pages have names of their own in the directory that is given.
  fs::create_directory(dir_ / "man1");
  dir_.write("man1/reshard-convert.1", ".TH OTHER 1\n");
  EXPECT_EQ(reshard_cli({"man", "--all", dir_ / "man1"}).exit_code, 2);
  EXPECT_EQ(read_file(dir_ / "man1/reshard-convert.1"), ".TH OTHER 1\n");
  fs::remove(dir_ / "man1/reshard-convert.1");
  for (int n = 0; n < 2; ++n) EXPECT_EQ(reshard_cli({"man", "--all", dir_ / "man1"}).exit_code, 0);
}

// The output may be anywhere in an input that cannot be searched.
TEST_F(OutputGuard, RefusesWhatCannotBeSearched) {
  std::string deep = dir_ / "hf";
  for (int i = 0; i < 40; ++i) deep += "/d";
  fs::create_directories(deep);
  const CommandResult r = reshard_cli({"convert", dir_ / "hf", dir_ / "out", "--to", "dcp"});
  EXPECT_EQ(r.exit_code, 4) << r.out;
  EXPECT_THAT(r.err, HasSubstr("/d/d: is nested too deeply to check that the output replaces no input"));
  EXPECT_FALSE(fs::exists(dir_ / "out"));
}

// Files next to an input, or written earlier, are not inputs.
TEST_F(OutputGuard, LetsEverythingElseBeWritten) {
  const std::string hf = dir_ / "hf";
  const auto expect_fine = [&](const Words& line) {
    for (int n = 0; n < 2; ++n) {
      const CommandResult r = reshard_cli(line);
      EXPECT_EQ(r.exit_code, 0) << join(line, " ") << r.out << r.err;
    }
    for (const auto& [name, bytes] : before_) EXPECT_EQ(read_file(dir_ / name), bytes) << name;
  };
  dir_.write("empty", "");
  expect_fine({"inspect", hf, "--html", dir_ / "empty"});
  expect_fine({"inspect", hf, "--html", "/dev/null"});
  fs::create_symlink("page.html", dir_ / "link.html");
  expect_fine({"inspect", hf, "--html", dir_ / "page.html"});
  expect_fine({"inspect", hf, "--html", dir_ / "link.html"});
  expect_fine({"inspect", hf + "/model.safetensors", "--html", hf + "/page.html"});
  fs::remove(hf + "/page.html");
  expect_fine({"verify", hf, "--html", dir_ / "hf.html", "--junit", dir_ / "hf.xml"});
  expect_fine({"convert", hf, dir_ / "hf.dcp", "--to", "dcp", "--force"});
  expect_fine({"convert", hf, dir_ / "hf2", "--to", "hf", "--force"});
  // A word on the command line that happens to name a directory is not an input.
  const CommandResult r = run_command(
      {"/bin/sh", "-c",
       "cd '" + dir_.path() + "' && mkdir tp=2 && " RESHARD_BINARY " convert hf tp=2/out --to dcp --mesh tp=2 -q"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
}

}  // namespace
}  // namespace reshard::output_guard_test
