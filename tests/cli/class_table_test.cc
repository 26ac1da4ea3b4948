// Tables of the user's own model classes: `reshard family` runs a Python that makes one, and --family-file takes it
// (lib/model/architecture.h). tests/interop/class_table.py makes one with real transformers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::class_table_test {
namespace {

using testing::HasSubstr;
using testing::Not;

// The table of a class of two names in each layer, an embedding, and a head if it is not tied.
constexpr const char* kTable =
    R"({"type":"tinynet","prefix":"net.","transformers":"5.24.0","classes":["TinyNetForCausalLM","TinyNetModel"],)"
    R"("bare":[1],"defaults":{"tie_word_embeddings":true},"computed":{"inner":"3*width"},"fixed":{},)"
    R"("texts":["inner,width","depth","width","vocab_size,width","!tie_word_embeddings"],)"
    R"("base":[{"in":[0,1],"rows":"0blocks.{}.up.weight|0|1 2norm.weight|2|1 0words.weight|3"}],)"
    R"("own":[{"in":[0],"rows":"0head.weight|3||4"}]})";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

class ClassTable : public testing::Test {
 protected:
  std::string config(const std::string& more = "") const {
    return R"({"model_type":"tinynet","architectures":["TinyNetForCausalLM"],"vocab_size":500,"width":16,"depth":2)" +
           more + "}";
  }
  // Writes a model of the config, as the table says it is.
  void make(const std::string& config, const std::string& table = kTable) {
    config_ = dir_.write("config.json", config);
    table_ = dir_.write("table.json", table);
    const CommandResult made = reshard_cli(
        {"synth", dir_ / "model", "--config", config_, "--family-file", table_, "--to", "hf", "--headers-only"});
    EXPECT_EQ(made.exit_code, 0) << made.err;
  }
  CommandResult verify(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {"verify", dir_ / "model", "--config", config_, "--family-file", table_};
    words.insert(words.end(), more.begin(), more.end());
    return reshard_cli(words);
  }

  const TempDir dir_;
  std::string config_, table_;
};

TEST_F(ClassTable, ModelsOfItAreMadeVerifiedAndChecked) {
  make(config(R"(,"tie_word_embeddings":false)"));
  const CommandResult healthy = verify();
  EXPECT_EQ(healthy.exit_code, 0) << healthy.out;
  EXPECT_THAT(healthy.out, HasSubstr("TinyNetForCausalLM of transformers 5.24.0, 6 tensors"));
  EXPECT_EQ(reshard_cli({"check", "--config", config_, "--family-file", table_, "--mesh", "dp_shard=2"}).exit_code, 0);

  dir_.write("config.json", config(R"(,"tie_word_embeddings":false,"inner":64)"));
  const CommandResult other = verify();
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.out, HasSubstr("[48, 16]; "));
  EXPECT_THAT(other.out, HasSubstr("expects [64, 16]"));

  dir_.write("config.json", replaced(config(R"(,"tie_word_embeddings":false)"), R"("depth":2)", R"("depth":3)"));
  EXPECT_EQ(verify().exit_code, 1);
}

// Without the table nothing is known of the class, and a table of another type says nothing of it.
TEST_F(ClassTable, ItIsUsedByTheCallThatNamesIt) {
  make(config());
  EXPECT_THAT(reshard_cli({"verify", dir_ / "model", "--config", config_}).out,
              Not(HasSubstr("TinyNetForCausalLM of")));
  dir_.write("table.json", replaced(kTable, R"("type":"tinynet")", R"("type":"othernet")"));
  EXPECT_THAT(verify().out, Not(HasSubstr("TinyNetForCausalLM of")));
  const CommandResult both = verify({"--family", "llama"});
  EXPECT_EQ(both.exit_code, 2);
}

// A table is input: what it says is checked, and nothing in it makes the program recurse or count without end.
TEST_F(ClassTable, AMalformedTableIsCorrupt) {
  make(config());
  const std::vector<std::pair<std::string, std::string>> changes = {
      {R"("classes":["TinyNetForCausalLM","TinyNetModel"])", R"("classes":[])"},
      {R"("classes":["TinyNetForCausalLM","TinyNetModel"])", R"("classes":[1])"},
      {R"("classes":["TinyNetForCausalLM","TinyNetModel"])", R"("classes":{})"},
      {R"({"type")", R"( {"type")"},
      {R"({"type")", R"({"x":1,"type")"},
      {R"("computed":{"inner":"3*width"})", R"("computed":{"inner":3})"},
      {R"("computed":{"inner":"3*width"})", R"("computed":[])"},
      {R"("texts":["inner,width")", R"("texts":[7)"},
      {R"("texts":["inner,width")", R"("texts":[")" + std::string(2000, '!') + '"'},
      {"up.weight|0|1", "up.weight|0|9"},
      {"up.weight|0|1", "up.weight|-1|1"},
      {"up.weight|0|1", "up.weight|0"},
      {"up.weight|0|1", "up.weight|0|1|4|4"},
      {"0blocks", "3blocks"},
      {"0blocks", "xblocks"},
      {R"("in":[0,1])", R"("in":["0"])"},
      {R"("own":[)", R"("mine":[)"},
  };
  for (const auto& [from, to] : changes) {
    dir_.write("table.json", replaced(kTable, from, to));
    const CommandResult result = verify();
    EXPECT_EQ(result.exit_code, 3) << to << result.out << result.err;
    EXPECT_THAT(result.err, HasSubstr("table.json")) << to;
  }
}

TEST_F(ClassTable, NumbersThatAreComputedFromThemselvesAreUnknown) {
  make(config());
  std::string chain, doubled;
  for (int i = 0; i < 5000; ++i) chain += ",\"a" + std::to_string(i) + "\":\"a" + std::to_string(i + 1) + '"';
  for (int i = 0; i < 60; ++i)
    doubled += ",\"a" + std::to_string(i) + "\":\"a" + std::to_string(i + 1) + "*a" + std::to_string(i + 1) + '"';
  for (const std::string& computed :
       {std::string(R"("inner":"inner")"), std::string(R"("inner":"other+1","other":"2*inner;inner")"),
        R"("inner":"a0")" + chain, R"("inner":"a0")" + doubled}) {
    dir_.write("table.json", replaced(kTable, R"("inner":"3*width")", computed));
    EXPECT_EQ(verify().exit_code, 0) << computed.substr(0, 60);
  }
}

// A config that describes more tensors than any model has is refused at once, even if no formula gives their shapes.
TEST_F(ClassTable, AConfigOfTooManyLayersIsRefused) {
  make(config());
  for (const char* const more : {R"(,"depth":1000000000000000)", R"(,"depth":1000000000000000,"inner":-1)"}) {
    dir_.write("config.json", replaced(config(), R"(,"depth":2)", more));
    const CommandResult result = verify();
    EXPECT_THAT(result.out + result.err, HasSubstr("more than 500,000 tensors")) << more;
  }
}

// ---- reshard family

// Runs `reshard family` with a program in the place of Python that writes a given table or ends with a given exit code.
class FamilyCommand : public ClassTable {
 protected:
  std::string python(const std::string& body) {
    const std::string path = dir_.write("python", "#!/bin/sh\n" + body + "\n");
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }
  CommandResult family(const std::string& python) {
    dir_.write("code/config.json", config());
    return reshard_cli({"family", "--from-transformers", dir_ / "code", "--python", python, dir_ / "made.json"});
  }
  bool is_made() const { return std::filesystem::exists(dir_ / "made.json"); }
};

TEST_F(FamilyCommand, TheTableOfAPythonIsWritten) {
  dir_.write("given.json", kTable);
  const CommandResult result =
      family(python("cp '" + (dir_ / "given.json") + "' \"$3\"; grep -q derive_directory \"$1\""));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("made.json: table of model_type 'tinynet'; use it with --family-file"));
  EXPECT_EQ(read_file(dir_ / "made.json"), kTable);
}

// A shell keeps the last of two variables with one name.
TEST_F(FamilyCommand, ItsVariablesReplaceThoseOfTheUser) {
  const std::string program = python("env > '" + (dir_ / "env") + "'; exit 1");
  dir_.write("code/config.json", config());
  run_command({RESHARD_BINARY, "family", "--from-transformers", dir_ / "code", "--python", program, dir_ / "made.json"},
              60, {"HF_MODULES_CACHE=/of/the/user", "HF_HUB_OFFLINE=0"});
  const std::string seen = read_file(dir_ / "env");
  EXPECT_THAT(seen, HasSubstr("HF_MODULES_CACHE="));
  EXPECT_THAT(seen, Not(HasSubstr("/of/the/user")));
  EXPECT_THAT(seen, HasSubstr("HF_HUB_OFFLINE=0\n"));
}

TEST_F(FamilyCommand, NoTableIsLeftByAFailure) {
  const CommandResult absent = family(dir_ / "no-such-python");
  EXPECT_EQ(absent.exit_code, 5);
  EXPECT_THAT(absent.err, HasSubstr("give a Python that has transformers with --python"));
  const CommandResult fails = family(python("echo no torch >&2; exit 1"));
  EXPECT_EQ(fails.exit_code, 4);
  EXPECT_THAT(fails.err, HasSubstr("no torch"));
  EXPECT_THAT(fails.err, HasSubstr("no table was made of it"));
  EXPECT_EQ(family(python("exit 0")).exit_code, 4);
  EXPECT_EQ(family(python("echo '{\"type\":\"x\"}' > \"$3\"")).exit_code, 3);
  EXPECT_EQ(family(python("kill -KILL $$")).exit_code, 4);
  EXPECT_FALSE(is_made());
  EXPECT_EQ(reshard_cli({"family", "--from-transformers", dir_ / "nothing", dir_ / "made.json"}).exit_code, 5);
}

// Code is executed by this command alone, and its help says so.
TEST_F(FamilyCommand, OnlyItExecutesCode) {
  EXPECT_THAT(reshard_cli({"family", "-h"}).out, HasSubstr("EXECUTES the Python code in it"));
  make(config(R"(,"auto_map":{"AutoConfig":"evil.C","AutoModelForCausalLM":"evil.M"})"));
  dir_.write("model/evil.py", "open('" + (dir_ / "executed") + "', 'w')\n");
  for (const std::vector<std::string>& words : {std::vector<std::string>{"verify", dir_ / "model"},
                                                {"inspect", dir_ / "model"},
                                                {"convert", dir_ / "model", dir_ / "out", "--to", "dcp"},
                                                {"check", "--config", config_, "--mesh", "tp=1"}})
    (void)reshard_cli(words);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "executed"));
}

}  // namespace
}  // namespace reshard::class_table_test
