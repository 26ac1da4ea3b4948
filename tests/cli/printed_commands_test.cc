// Commands and options in messages work as printed: the tests run them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lib/base/shell.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::printed_commands_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;
using Words = std::vector<std::string>;

TEST(ShellWord, IsReadBackAsItWas) {
  for (const std::string& word :
       {std::string("plain"), std::string(""), std::string("a b"), std::string("it's"), std::string("$HOME `id` $(id)"),
        std::string("\"quoted\""), std::string("~"), std::string("a\\b"), std::string("*?[a]{b,c}!#&|;<>()^"),
        std::string("\x1b[31m\n\t'\\x"), std::string("\xff\xfe raw"), std::string("\u202e\u009b'"),
        std::string("caf\u00e9"), std::string("=ls"),
        std::string("\x7f"
                    "a")}) {
    const CommandResult r = run_command({"/bin/bash", "-c", "printf %s " + shell_word(word)});
    EXPECT_EQ(r.out, word) << shell_word(word);
    EXPECT_EQ(shell_word(word).find('\x1b'), std::string::npos);
  }
  EXPECT_EQ(shell_word("run/step-1000"), "run/step-1000");
  EXPECT_EQ(shell_path("-n"), "./-n");
  EXPECT_EQ(shell_path("- n"), "'./- n'");
}

// Runs a line in a shell, as a user who pastes it would.
CommandResult in_shell(const std::string& directory, const std::string& line) {
  return run_command(
      {"/bin/bash", "-c", "cd " + shell_word(directory) + " && reshard() { " RESHARD_BINARY " \"$@\"; } && " + line});
}

std::string command_in(const std::string& text) {
  const std::string before = "check it any time: ";
  const std::size_t at = text.find(before);
  if (at == std::string::npos) return "";
  const std::size_t begin = at + before.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

class PrintedCommands : public testing::Test {
 protected:
  void make(const std::string& name) {
    fs::create_directories(dir_ / name);
    fs::copy(sample("tp8") + "/hf.safetensors", dir_ / (name + "/model.safetensors"));
    fs::copy(sample("tp8") + "/config.json", dir_ / (name + "/config.json"));
  }
  // Converts, then runs the commands that it prints.
  void expect_passes(const std::string& source, const std::string& out, const std::string& options) {
    const std::string line = "reshard convert " + shell_path(source) + " " + shell_path(out) + " " + options;
    SCOPED_TRACE(line);
    fs::remove_all(dir_ / out);
    const CommandResult converted = in_shell(dir_.path(), line);
    ASSERT_EQ(converted.exit_code, 0) << converted.err;
    const std::string command = command_in(converted.out);
    if (command.empty()) {
      EXPECT_NE(in_shell(dir_.path(), "reshard inspect " + shell_path(out)).exit_code, 0);
      return;
    }
    ASSERT_THAT(command, testing::StartsWith("reshard verify "));
    const CommandResult checked = in_shell(dir_.path(), command);
    EXPECT_EQ(checked.exit_code, 0) << command << "\n" << checked.out << checked.err;
  }
  TempDir dir_;
};

TEST_F(PrintedCommands, PassWhateverWasConverted) {
  make("hf");
  fs::copy(dir_ / "hf/config.json", dir_ / "other.json");
  const Words targets = {"--to hf", "--to dcp", "--to bin", "--to hdf5", "--to vllm", "--to ranks --mesh tp=2"};
  const Words changes = {"",
                         "--dtype bfloat16",
                         "--dtype float16 --keep-dtype '*norm*'",
                         "--include '*layers.0*'",
                         "--include '*layers.0*' --allow config",
                         "--exclude '*norm*'",
                         "--exclude lm_head.weight --allow cover",
                         "--config other.json",
                         "--family llama",
                         "--family none",
                         "--part model",
                         "--weights model"};
  int n = 0;
  for (const std::string& to : targets)
    for (const std::string& change : changes)
      if (n++ % every_nth(5) == 0 &&
          (to != "--to vllm" || change != "--family none"))  // refused, because nothing could read the output
        expect_passes("hf", "out", to + " " + change);
  for (const std::string to : {"--to dcp --names torchtitan", "--to dcp --names keep --mesh dp_shard=3"})
    expect_passes("hf", "out", to);
  const std::string state = sample("fsdp2_tp2_optim") + "/checkpoint";
  for (const std::string change : {"--to hf", "--to dcp", "--to dcp --part optimizer", "--to dcp --part model",
                                   "--to hf --dtype float16", "--to dcp --exclude 'optim*'"})
    expect_passes(state, "out", change);
}

// A table of the user's own is known only from its file.
TEST_F(PrintedCommands, NameTheFamilyOfAConversion) {
  make("hf");
  std::string table = read_file(RESHARD_SOURCE_DIR "/samples/families/llama.json");
  table.replace(table.find("\"llama\""), 7, "\"mine\"");
  write_file(dir_ / "my table.json", table);
  for (const std::string to : {"--to hf", "--to dcp --names torchtitan", "--to dcp --dtype float16"})
    for (const std::string family : {"--family-file 'my table.json'", "--family llama"}) {
      expect_passes("hf", "out", to + " " + family);
      const CommandResult again = in_shell(dir_.path(), "reshard convert hf again --force " + to + " " + family);
      EXPECT_EQ(again.exit_code, 0) << again.err;
      EXPECT_THAT(command_in(again.out), testing::EndsWith(family));
    }
}

TEST_F(PrintedCommands, PassWithAnyPath) {
  for (const std::string name : sampled({"with space", "it's", "$HOME", "-n", "--to", "a\"b", "a\\b", "*", "~", "#1",
                                         "x;id", "tab\there", "caf\u00e9", "bad\xff"},
                                        4)) {
    make(name);
    expect_passes(name, name + " out", "--to dcp");
    expect_passes(name, "-" + name, "--to hf --dtype bfloat16");
  }
}

TEST_F(PrintedCommands, PassAfterAMergeAndARepair) {
  make("a");
  make("b");
  const CommandResult merged = in_shell(dir_.path(), "reshard merge a b 'm 1' --average --to hf");
  ASSERT_EQ(merged.exit_code, 0) << merged.err;
  EXPECT_EQ(command_in(merged.out), "reshard verify 'm 1'");
  EXPECT_EQ(in_shell(dir_.path(), command_in(merged.out)).exit_code, 0);
}

// Returns the options "--allow X" in a message.
Words allowed_by(const std::string& text) {
  Words out;
  for (std::size_t at = text.find("--allow "); at != std::string::npos; at = text.find("--allow ", at + 1)) {
    const std::size_t word = at + 8, end = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz", word);
    out.insert(out.end(), {"--allow", text.substr(word, end - word)});
  }
  return out;
}

// Converts a faulty source, and follows the advice of each error until it succeeds.
void expect_to_lead_somewhere(const Words& line, const std::string& out) {
  SCOPED_TRACE(testing::PrintToString(line));
  Words more;
  std::string said;
  for (int step = 0; step < 3; ++step) {
    fs::remove_all(out);
    const CommandResult r = reshard_cli(line, more);
    if (r.exit_code == 0) return;
    const Words next = allowed_by(r.err);
    if (next.empty()) {
      EXPECT_EQ(step, 0) << said << "leads to\n" << r.err;
      return;
    }
    said = r.err;
    more.insert(more.end(), next.begin(), next.end());
  }
  ADD_FAILURE() << said << " is said over and over";
}

TEST_F(PrintedCommands, WhatIsAllowedLeadsToAnOutput) {
  const std::string state = sample("fsdp2_tp2_optim") + "/checkpoint", tp8 = sample("tp8") + "/checkpoint";
  const Words targets = {"hf", "dcp", "bin", "hdf5", "megatron", "ranks"};
  for (const std::string& source : {state, tp8})
    for (const auto& file : fs::directory_iterator(source)) {
      if (file.path().extension() != ".distcp") continue;
      fs::remove_all(dir_ / "ck");
      fs::copy(source, dir_ / "ck");
      fs::remove(dir_ / ("ck/" + file.path().filename().string()));
      for (const std::string& to : sampled(targets, 3))
        for (const Words& more : {Words{}, Words{"--part", "optimizer"}, Words{"--include", "*norm*"}}) {
          Words line = {"convert", dir_ / "ck", dir_ / "out", "--to", to};
          line.insert(line.end(), more.begin(), more.end());
          expect_to_lead_somewhere(line, dir_ / "out");
        }
      if (source == tp8) break;
    }
  // If only the optimizer is left, there is no model to write.
  const CommandResult r = reshard_cli({"convert", dir_ / "ck", dir_ / "out", "--to", "hf", "--part", "optimizer"});
  EXPECT_THAT(r.err, Not(HasSubstr("--allow")));
}

TEST_F(PrintedCommands, AWrongConfigIsLetThroughAsItSays) {
  make("hf");
  for (const auto& [right, wrong] : {std::pair("\"vocab_size\": 257", "\"vocab_size\": 300"),
                                     std::pair("\"intermediate_size\": ", "\"intermediate_size\": 1"),
                                     std::pair("\"num_hidden_layers\": ", "\"num_hidden_layers\": 1")}) {
    std::string config = read_file(sample("tp8") + "/config.json");
    const std::size_t at = config.find(right);
    ASSERT_NE(at, std::string::npos) << right;
    config.replace(at, std::string(right).size(), wrong);
    write_file(dir_ / "hf/config.json", config);
    for (const std::string to : {"hf", "dcp", "hdf5", "bin"})
      expect_to_lead_somewhere({"convert", dir_ / "hf", dir_ / "out", "--to", to}, dir_ / "out");
  }
}

}  // namespace
}  // namespace reshard::printed_commands_test
