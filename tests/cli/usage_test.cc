// What every command has in common: help, words that no option takes, errors and results for programs, counts, -q.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/must.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

using testing::HasSubstr;
using testing::Not;
using Words = std::vector<std::string>;

// A checkpoint of one tensor of one element, and a model.
class UsageTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string header = R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    one_ = dir_.write("one/model.safetensors", bytes + header + std::string(4, '\1'));
    one_ = dir_ / "one";
    ASSERT_EQ(reshard_cli({"synth", model_, "--model", "llama3-tiny", "--to", "hf"}).exit_code, 0);
    config_ = model_ + "/config.json";
  }

  const TempDir dir_;
  std::string one_, model_ = dir_ / "model", config_;
};

TEST_F(UsageTest, HelpAndVersionAreAskedForInEveryUsualWay) {
  const Words commands = {"inspect", "latest", "convert", "merge",       "plan", "mount", "verify",
                          "diff",    "check",  "layout",  "completions", "man",  "synth"};
  for (const std::string& command : commands) {
    const CommandResult help = reshard_cli({"help", command}), same = reshard_cli({command, "--help"});
    EXPECT_EQ(help.exit_code, 0) << help.err;
    EXPECT_EQ(help.out, same.out);
    EXPECT_THAT(help.out, HasSubstr(command));
  }
  EXPECT_EQ(reshard_cli({"help"}).out, reshard_cli({"--help"}).out);
  EXPECT_EQ(reshard_cli({"-V"}).out, reshard_cli({"--version"}).out);
  EXPECT_THAT(reshard_cli({"help", "conver"}).err, HasSubstr("expected a command, got help"));
}

TEST_F(UsageTest, WordsThatNoOptionTakesAreNamedInTheirOrderWithWhatIsNear) {
  const std::vector<std::pair<Words, std::string>> rows = {
      {{"convert", "a", "b", "--to", "hf", "--max-shard", "3"},
       "unknown arguments --max-shard 3; did you mean --max-shard-size?; see reshard convert --help"},
      {{"convert", "a", "b", "--to", "hf", "--max-shrad-size=3"},
       "unknown argument --max-shrad-size=3; did you mean --max-shard-size?; see reshard convert --help"},
      {{"verify", "a", "--byte", "--xyzzy", "c", "d"}, "unknown arguments --byte --xyzzy c d; did you mean --bytes?"},
      {{"verify", "a", "b", "c"}, "unknown arguments b c; see"},
      {{"inspect", "a", "--qqqqqqqqqqqq"}, "unknown argument --qqqqqqqqqqqq; see"},
      {{"conver", "a", "b"}, "expected a command, got conver; did you mean convert?"},
      {{"verfy", "a"}, "did you mean verify?"},
      {{"nonsense"}, "expected a command, got nonsense; see reshard --help"},
  };
  for (const auto& [words, expected] : rows) {
    const CommandResult result = reshard_cli(words);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, HasSubstr(expected));
  }
}

TEST_F(UsageTest, ADashIsNoNameOfAnOutput) {
  const std::string change = "cd " + dir_.path() + " && " + RESHARD_BINARY + " ";
  for (const std::string line :
       {"inspect one --html -", "verify one --html -", "verify one --junit -", "plan one --to dcp --html -",
        "diff one one --html -", "convert one - --to dcp", "merge one one - --average --to hf",
        "synth - --model llama3-tiny", "check --config model/config.json --mesh tp=1 --html -",
        "check --config model/config.json --mesh tp=1 --junit -"}) {
    const CommandResult result = run_command({"/bin/sh", "-c", change + line});
    EXPECT_EQ(result.exit_code, 2) << line << result.out;
    EXPECT_THAT(result.err, HasSubstr("expected a path, got -")) << line;
    EXPECT_FALSE(std::filesystem::exists(dir_ / "-")) << line;
  }
}

TEST_F(UsageTest, ResultsForProgramsSayWhatTheyAre) {
  const std::vector<std::pair<std::string, Words>> rows = {
      {"inspect", {"inspect", one_}},
      {"verify", {"verify", one_}},
      {"diff", {"diff", one_, one_}},
      {"plan", {"plan", one_, "--to", "dcp", "--family", "none"}},
      {"plan", {"convert", one_, dir_ / "dry", "--to", "dcp", "--family", "none", "--dry-run"}},
      {"convert", {"convert", one_, dir_ / "out", "--to", "dcp", "--family", "none"}},
      {"view", {"convert", one_, dir_ / "look.h5", "--to", "hdf5-view", "--family", "none"}},
      {"view", {"convert", one_, dir_ / "dry.h5", "--to", "hdf5-view", "--family", "none", "--dry-run"}},
      {"check", {"check", "--config", config_, "--mesh", "tp=1"}},
      {"version", {"--version"}},
  };
  for (auto [name, words] : rows) {
    words.emplace_back("--json");
    const CommandResult result = reshard_cli(words);
    const auto json = parse_json(result.out, words[0]);
    ASSERT_TRUE(json) << words[0] << result.out << result.err;
    ASSERT_GT(must(json->as_object()).size(), 0);
    EXPECT_EQ(must(json->as_object())[0].key, "schema");
    EXPECT_EQ(must(json->get_string("schema")), "reshard." + name + "/1");
  }
}

TEST_F(UsageTest, ErrorsForProgramsAreJsonToo) {
  const std::string none = dir_ / "nowhere";
  const std::vector<std::pair<int, Words>> rows = {
      {5, {"inspect", none}},
      {5, {"verify", none}},
      {5, {"diff", one_, none}},
      {5, {"plan", none, "--to", "hf"}},
      {5, {"convert", none, dir_ / "out", "--to", "hf"}},
      {2, {"convert", one_, dir_ / "out", "--to", "nothing"}},
      {2, {"convert", one_, one_, "--to", "dcp"}},
      {5, {"check", "--config", none, "--mesh", "tp=1"}},
      {2, {"verify", one_, "--no-such-option"}},
      {2, {"nonsense"}},
      {3, {"inspect", dir_.write("broken.safetensors", "not one\n\0\0\0\0\0\0")}},
  };
  for (auto [code, words] : rows) {
    words.emplace_back("--json");
    const CommandResult result = reshard_cli(words);
    const auto json = parse_json(result.out, words[0]);
    ASSERT_TRUE(json) << words[0] << ": " << result.out << result.err;
    EXPECT_EQ(must(json->get_string("schema")), "reshard.error/1");
    const Json& error = *json->find("error");
    EXPECT_EQ(must(error.get_index("code")), result.exit_code) << words[0];
    if (code != 3) {
      EXPECT_EQ(result.exit_code, code) << words[0] << result.err;
    }
    EXPECT_FALSE(must(error.get_string("kind")).empty());
    EXPECT_THAT(result.err, HasSubstr("reshard: error: "));
  }
  // What fails after the answer adds none.
  const CommandResult late = reshard_cli({"verify", one_, "--json", "--html", dir_ / "no/such/page.html"});
  EXPECT_NE(late.exit_code, 0);
  EXPECT_TRUE(parse_json(late.out, "verify")) << late.out;
}

TEST_F(UsageTest, OneIsCountedAsOne) {
  const std::string out = dir_ / "out";
  const std::vector<Words> rows = {
      {"inspect", one_},
      {"plan", one_, "--to", "dcp", "--family", "none"},
      {"plan", one_, "--to", "dcp", "--family", "none", "--ranks", "2"},
      {"convert", one_, out, "--to", "hf", "--family", "none", "--dtype", "bfloat16"},
      {"convert", one_, dir_ / "dcp", "--to", "dcp", "--family", "none"},
      {"convert", one_, dir_ / "look.h5", "--to", "hdf5-view", "--family", "none"},
      {"convert", out, dir_ / "again", "--to", "hf", "--family", "none"},
      {"verify", one_},
      {"verify", one_, "--values"},
      {"verify", dir_ / "dcp", "--bytes"},
      {"verify", one_, "--against", out},
      {"diff", one_, out},
      {"merge", one_, one_, dir_ / "merged", "--average", "--to", "hf", "--family", "none"},
      {"check", "--config", config_, "--mesh", "tp=1"},
      {"check", "--config", config_, "--mesh", "pp=4,tp=3"},
      {"layout", dir_ / "dcp"},
  };
  const std::regex wrong(
      R"((^|[^0-9,.])1 (tensors|moves|files|bytes|elements|rows|columns|layers|objects|ranks|pieces|)"
      R"(findings|values|heads|shards|stages|checks|sources|threads|machines|digests|parameters|)"
      R"(dimensions|CRCs|sums|errors|warnings|notes|copies|boxes|differences)\b)");
  for (const Words& words : rows) {
    const CommandResult result = reshard_cli(words);
    const std::string said = result.out + result.err;
    std::smatch match;
    EXPECT_FALSE(std::regex_search(said, match, wrong)) << words[0] << ": " << match.str() << "\n" << said;
  }
}

TEST_F(UsageTest, QuietIsQuietWhateverIsFound) {
  const std::string less = dir_ / "less";
  ASSERT_EQ(reshard_cli({"synth", less, "--model", "llama3-tiny", "--to", "hf", "--without", "*up_proj*"}).exit_code,
            0);
  const CommandResult found = reshard_cli({"verify", less, "--config", config_, "-q"});
  EXPECT_EQ(found.exit_code, 1);
  EXPECT_TRUE(found.out.starts_with("error ")) << found.out;
  for (const char* fact : {"verify  ", "cover  ", "config  ", "tensors checked", "looked at"})
    EXPECT_THAT(found.out, Not(HasSubstr(fact)));
  EXPECT_EQ(reshard_cli({"verify", model_, "-q"}).out, "");
  EXPECT_EQ(reshard_cli({"diff", model_, model_, "-q"}).out, "");
  EXPECT_EQ(reshard_cli({"plan", model_, "--to", "dcp", "-q"}).out, "");
  const CommandResult differs = reshard_cli({"diff", model_, less, "-q"});
  EXPECT_EQ(differs.exit_code, 1);
  EXPECT_THAT(differs.out, Not(HasSubstr("result")));
}

TEST_F(UsageTest, AnOutputsFilesAreThoseOfItsTensors) {
  const Words convert = {"convert", model_, dir_ / "cut", "--to", "hf", "--max-shard-size", "300kB"};
  const CommandResult result = reshard_cli(convert);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  Index shards = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir_ / "cut"))
    shards += entry.path().extension() == ".safetensors" ? 1 : 0;
  EXPECT_GT(shards, 1);
  EXPECT_THAT(result.out, HasSubstr(" out in " + std::to_string(shards) + " files and 1 of metadata "));
  EXPECT_THAT(reshard_cli({"plan", model_, "--to", "hf"}).out, HasSubstr(" out in 1 file  "));
}

// "architectures" was a string: Json::push_back gave the item, and not the list that it was put into.
TEST_F(UsageTest, AMadeConfigListsItsArchitectures) {
  ASSERT_EQ(reshard_cli({"convert", model_, dir_ / "copy", "--to", "hf"}).exit_code, 0);
  for (const std::string& path : {config_, dir_ / "copy/config.json"}) {
    const Json json = must(parse_json(read_file(path), path));
    const auto list = must(json.get_array("architectures"));
    ASSERT_EQ(list.size(), 1U);
    EXPECT_EQ(must(list[0].as_string()), "LlamaForCausalLM");
  }
}

}  // namespace
}  // namespace reshard
