// Shell completions and manual pages list the same options as --help, and --version lists the built-in parts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <regex>
#include <set>

#include "formats/registry.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::shell_test {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string printed(std::vector<std::string> args) {
  const CommandResult r = reshard_cli(std::move(args));
  EXPECT_EQ(r.exit_code, 0) << r.err;
  return r.out;
}

std::set<std::string> words_of(const std::string& text) {
  std::set<std::string> out;
  for (const std::string& line : split(text, '\n'))
    for (const std::string& word : split(line, ' '))
      if (!word.empty()) out.insert(word);
  return out;
}

std::vector<std::string> all_commands() {
  std::vector<std::string> out;
  for (const std::string& line : split(printed({"-h"}), '\n'))
    if (line.starts_with("  ")) out.push_back(line.substr(2, line.find(' ', 2) - 2));
  EXPECT_GE(out.size(), 9u);
  return out;
}

// Returns the options in --help: lines that begin with "  -q, --quiet" or "  --to FORMAT".
const std::set<std::string>& options_in_help(const std::string& command) {
  static std::map<std::string, std::set<std::string>> known;
  std::set<std::string>& out = known[command];
  if (!out.empty()) return out;
  for (const std::string& line : split(printed({command, "--help"}), '\n')) {
    if (!line.starts_with("  -")) continue;
    const std::string names = line.substr(0, line.find("  ", 2));
    const std::regex name("-[-a-zA-Z0-9]+");
    for (std::sregex_iterator found(names.begin(), names.end(), name), end; found != end; ++found)
      if (found->position() == 2 || names[found->position() - 1] == ' ') out.insert(found->str());
  }
  EXPECT_TRUE(out.contains("--help")) << command;
  return out;
}

// Returns bash's completions for a line whose last word is incomplete.
std::set<std::string> offered(const std::string& script, const std::string& line) {
  const std::string words = "COMP_WORDS=(" + line + "); COMP_CWORD=$((${#COMP_WORDS[@]}-1)); ";
  const CommandResult r = run_command(
      {"/bin/bash", "-c", "source " + script + "; " + words + "_reshard; printf '%s\\n' \"${COMPREPLY[@]}\""});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(r.err, "");
  return words_of(r.out);
}

TEST(Completions, OfBashOfferAllThatHelpShows) {
  const TempDir dir;
  const std::string script = dir / "reshard.bash";
  write_file(script, printed({"completions", "bash"}));
  const std::vector<std::string> commands = all_commands();
  const std::set<std::string> first = offered(script, "reshard ''");
  for (const std::string& command : commands) {
    EXPECT_TRUE(first.contains(command)) << command;
    EXPECT_EQ(offered(script, "reshard " + command + " -"), options_in_help(command)) << command;
  }
  EXPECT_EQ(offered(script, "reshard con"), (std::set<std::string>{"convert"}));
  EXPECT_EQ(offered(script, "reshard convert a b --repair e"), (std::set<std::string>{"experts"}));
  EXPECT_EQ(offered(script, "reshard convert a b --names = torchtitan-"), (std::set<std::string>{"torchtitan-2026"}));
  std::set<std::string> targets;
  for (const Format* f : formats())
    if (f->lay_out || f->write_view) targets.emplace(f->name);
  EXPECT_EQ(offered(script, "reshard convert a b --to ''"), targets);
  targets.erase("hdf5-view");
  EXPECT_EQ(offered(script, "reshard mount a b --as ''"), targets);
  EXPECT_EQ(offered(script, "reshard convert /ch"), std::set<std::string>()) << "bash completes files itself";
  const std::vector<std::pair<std::string, std::set<std::string>>> values = {
      {"synth x --to h", {"hf"}},
      {"synth x --model llama3-4", {"llama3-405b"}},
      {"synth x --names nano", {"nanotron", "nanogpt"}},
      {"synth x --dtype b", {"bfloat16"}},
      {"verify x --fail-on ''", {"error", "warning", "note"}},
      {"check --dtype bf", {"bfloat16"}},
      {"check --grad-dtype bf", {"bfloat16"}},
      {"layout --builtin meg", {"megatron-llama"}},
      {"convert x y --layout tor", {"torchtitan-llama"}},
      {"convert x y --weights ''", {"model", "master"}},
      {"convert x y --device c", {"cpu", "cuda"}},
      {"convert x y --vocab-padding r", {"repeat-last"}},
      {"verify x --family qwen3_n", {"qwen3_next"}},
      {"merge a b c --accumulate ''", {"float32", "float64"}},
      {"completions ''", {"bash", "zsh", "fish"}},
      {"man conv", {"convert"}},
      {"help syn", {"synth"}},
  };
  for (const auto& [line, expected] : values) EXPECT_EQ(offered(script, "reshard " + line), expected) << line;
}

TEST(Completions, OfferTheTensorsOfTheCheckpointOnTheLine) {
  const TempDir dir;
  const std::string script = dir / "reshard.bash", checkpoint = sample("tp8") + "/checkpoint";
  write_file(script, printed({"completions", "bash"}));
  const std::string line = RESHARD_BINARY " convert --to hf " + checkpoint + " b --include ";
  const std::set<std::string> all = offered(script, line + "''");
  EXPECT_EQ(all.size(), 12u);
  EXPECT_TRUE(all.contains("layers.\\{0..3\\}.attention.wq.weight"));
  EXPECT_EQ(offered(script, line + "nor"), (std::set<std::string>{"norm.weight"}));
  EXPECT_EQ(offered(script, line + "\\'layers.\\{0..3\\}.attention.wq"),
            (std::set<std::string>{"layers.{0..3}.attention.wq.weight"}));
  EXPECT_EQ(offered(script, RESHARD_BINARY " inspect " + checkpoint + " --filter tok"),
            (std::set<std::string>{"tok_embeddings.weight"}));
  EXPECT_EQ(offered(script, RESHARD_BINARY " inspect --filter ''"), (std::set<std::string>{}));

  // Completed tensor names are accepted by --include.
  const Json shown =
      *parse_json(printed({"inspect", checkpoint, "--json", "--filter", "layers.{0..3}.attention.wq.weight"}), "");
  EXPECT_EQ(shown.find("tensors")->as_array()->size(), 4u);

  // Names are displayed and never executed.
  const std::string header = R"json({"$(touch ran)":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
    "`touch ran`":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},
    "a;touch":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})json";
  std::string file(8, '\0');
  file[0] = static_cast<char>(header.size());
  write_file(dir / "names.safetensors", file + header + "abc");
  ASSERT_LT(header.size(), 256u);
  const std::string at = "cd " + dir.path() + "; ";
  const CommandResult r = run_command({"/bin/bash", "-c",
                                       at + "source " + script +
                                           "; COMP_WORDS=(" RESHARD_BINARY " inspect names.safetensors --filter ''); "
                                           "COMP_CWORD=4; _reshard; printf '%s\\n' \"${COMPREPLY[@]}\""});
  EXPECT_EQ(r.out, "a\\;touch\n") << r.err;
  EXPECT_FALSE(std::filesystem::exists(dir / "ran"));
}

TEST(Completions, OfOtherShellsOfferTensorsToo) {
  const TempDir dir;
  const std::string checkpoint = sample("tp8") + "/checkpoint";
  const std::string path = "PATH=" + std::filesystem::path(RESHARD_BINARY).parent_path().string() + ":/usr/bin:/bin";
  for (const std::string shell : {"zsh", "fish"}) write_file(dir / shell, printed({"completions", shell}));
  // Replaces two functions of zsh: the one that asks for an option's value, and the one that takes the words.
  const std::string zsh =
      "compadd() { shift; print -l -- $@ }; _arguments() { _reshard_tensors }; CURRENT=5; words=(reshard inspect " +
      checkpoint + " --filter ''); f() { source " + (dir / "zsh") + " }; f";
  const std::string fish =
      "source " + (dir / "fish") + "; complete -C 'reshard inspect " + checkpoint + " --filter nor'";
  if (std::filesystem::exists("/usr/bin/zsh")) {
    const CommandResult r = run_command({"/usr/bin/env", path, "/usr/bin/zsh", "-f", "-c", zsh});
    EXPECT_EQ(words_of(r.out), words_of(printed({"completions", "--tensors", checkpoint}))) << r.err;
  }
  if (std::filesystem::exists("/usr/bin/fish")) {
    const CommandResult r =
        run_command({"/usr/bin/env", path, "HOME=" + dir.path(), "/usr/bin/fish", "-N", "-c", fish});
    EXPECT_TRUE(r.out.starts_with("norm.weight\t")) << r.out << r.err;
    EXPECT_EQ(split(r.out, '\n').size(), 2u) << "a line, and its end";
  }
}

TEST(Completions, OfOtherShellsAreScriptsOfTheirs) {
  const TempDir dir;
  for (const std::string shell : {"zsh", "fish"}) {
    const std::string text = printed({"completions", shell});
    for (const std::string& command : all_commands())
      for (const std::string& option : options_in_help(command))
        if (option.starts_with("--")) {
          EXPECT_THAT(text, HasSubstr(shell == "zsh" ? option : " -l " + option.substr(2))) << command;
        }
    const std::string script = dir / shell;
    write_file(script, text);
    if (std::filesystem::exists("/usr/bin/" + shell)) {
      const CommandResult r = run_command({"/usr/bin/" + shell, "-n", script});
      EXPECT_EQ(r.exit_code, 0) << r.err;
    }
  }
}

// Returns the text of a manual page without font markup.
std::string plain(const std::string& page) {
  return std::regex_replace(std::regex_replace(page, std::regex("\\\\f[BIR]"), ""), std::regex("\\\\-"), "-");
}

TEST(Manual, HasAPageForEachCommandWithAllThatHelpShows) {
  const TempDir dir;
  printed({"man", "--all", dir.path()});
  std::set<std::string> pages = {"reshard.1"};
  for (const std::string& command : all_commands()) {
    const std::string name = "reshard-" + command + ".1", page = read_file(dir / name);
    pages.insert(name);
    if (every_nth(2) == 1 || command == "convert") {
      EXPECT_EQ(page, printed({"man", command}));
    }
    for (const std::string& option : options_in_help(command)) EXPECT_THAT(plain(page), HasSubstr(option)) << command;
    for (const char* title : {"NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "ENVIRONMENT", "FILES"})
      EXPECT_THAT(page, HasSubstr("\n.SH " + std::string(title) + "\n")) << command;
    for (const std::string& line : split(page, '\n'))
      if (line.starts_with('.')) {
        EXPECT_TRUE(std::regex_search(line, std::regex("^\\.(TH|SH|SS|TP|PP|EX|EE|br)( |$)")))
            << command << ": " << line;
      }
  }
  std::set<std::string> there;
  for (const auto& [name, text] : all_files(dir.path())) there.insert(name);
  EXPECT_EQ(there, pages);
  EXPECT_THAT(plain(read_file(dir / "reshard-convert.1")), HasSubstr("(default: 256MiB; or $RESHARD_MEMORY)."));
  const CommandResult none = reshard_cli({"man", "konvert"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_THAT(none.err, HasSubstr("unknown command 'konvert'; did you mean convert? See reshard --help"));
}

TEST(Version, SaysWhatIsBuiltInAndFound) {
  const Json json = *parse_json(printed({"--version", "--json"}), "version");
  EXPECT_EQ("reshard " + std::string(*json.get_string("reshard")) + "\n", printed({"--version"}));
  std::set<std::string> names;
  const Json& rows = *json.find("formats");
  const auto all = *rows.as_array();
  for (const Json& row : all) names.emplace(*row.get_string("name"));
  std::set<std::string> expected;
  for (const Format* f : formats()) expected.emplace(f->name);
  EXPECT_EQ(names, expected);
  EXPECT_THAT(std::string(*json.find("zstd")->get_string("found")), testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
  for (const char* part : {"mpi", "cuda", "nccl", "cufile", "fuse", "buckets"})
    EXPECT_NE(json.find(part)->find("found") != nullptr, json.find(part)->find("missing") != nullptr) << part;
  const CommandResult alone = reshard_cli({"help", "--json"});
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_THAT(alone.err, HasSubstr("unknown option --json"));
}

}  // namespace
}  // namespace reshard::shell_test
