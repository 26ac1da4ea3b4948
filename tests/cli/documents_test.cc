// What the documents show is true: links lead somewhere, named files and tests exist, commands have the options that
// they are shown with and run, and print what is shown.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "lib/base/shell.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::documents_test {
namespace {

namespace fs = std::filesystem;
const fs::path kRoot = RESHARD_SOURCE_DIR;

struct Document {
  std::string path;  // from the root of the checkout
  std::string text;
};

// Returns the documents of the checkout.
std::vector<Document> documents() {
  std::vector<Document> all;
  for (const char* name : {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"})
    all.push_back({name, read_file(kRoot / name)});
  for (const char* room : {"docs", "samples"})
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / room))
      if (entry.path().extension() == ".md")
        all.push_back({entry.path().lexically_relative(kRoot).string(), read_file(entry.path())});
  return all;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Returns the text of a document outside of its code blocks (`fenced` false), or inside of those that name no language,
// with an empty line after each.
std::string part_of(const Document& document, bool fenced) {
  std::string out;
  bool inside = false, of_no_language = false;
  for (const std::string& line : lines_of(document.text)) {
    if (line.starts_with("```")) {
      of_no_language = !inside && line == "```";
      inside = !inside;
      if (fenced && !inside) out += "\n";
    } else if (fenced ? inside && of_no_language : !inside) {
      out += line + "\n";
    }
  }
  return out;
}

// Returns what matches the first group of a pattern.
std::vector<std::string> matches(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::string> out;
  for (std::sregex_iterator at(text.begin(), text.end(), regex), end; at != end; ++at) out.push_back((*at)[1]);
  return out;
}

// Returns the `code` of a document, each with single spaces.
std::vector<std::string> code_in(const Document& document) {
  std::vector<std::string> out;
  for (const std::string& code : matches(part_of(document, false), "`([^`]+)`"))
    out.push_back(std::regex_replace(code, std::regex("\\s+"), " "));
  return out;
}

// Returns the anchors that readers of Markdown make of the headings.
std::set<std::string> anchors_of(const Document& document) {
  std::set<std::string> anchors;
  for (const std::string& title : matches("\n" + part_of(document, false), "\n#+ ([^\n]*)")) {
    std::string anchor;
    for (const char c : title)
      if (c == ' ')
        anchor += '-';
      else if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_')
        anchor += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    anchors.insert(anchor);
  }
  return anchors;
}

TEST(Documents, LinksLeadSomewhere) {
  const std::vector<Document> all = documents();
  std::map<std::string, std::set<std::string>> anchors;
  for (const Document& document : all) anchors[document.path] = anchors_of(document);
  const std::regex link(R"re(\]\(([^)#: ]*)(#[^)]*)?\))re");  // addresses have a colon
  int seen = 0;
  for (const Document& document : all) {
    const std::string text = part_of(document, false);
    for (std::sregex_iterator at(text.begin(), text.end(), link), end; at != end; ++at, ++seen) {
      const std::string name = (*at)[1], anchor = (*at)[2];
      const fs::path target =
          name.empty() ? fs::path(document.path) : (fs::path(document.path).parent_path() / name).lexically_normal();
      EXPECT_TRUE(fs::exists(kRoot / target)) << document.path << ": nothing is at " << name;
      if (!anchor.empty()) {
        EXPECT_EQ(anchors[target.string()].count(anchor.substr(1)), 1u)
            << document.path << ": no heading for " << name << anchor;
      }
    }
  }
  EXPECT_GT(seen, 100);
}

// Paths in `code` that begin with a directory of the checkout.
TEST(Documents, NamedFilesExist) {
  const std::regex path(R"re((lib|formats|tools|tests|samples|docs)/[\w./+-]*\w/?)re");
  int seen = 0;
  for (const Document& document : documents())
    for (const std::string& code : code_in(document)) {
      const std::string word = code.substr(0, code.find(' '));
      if (!std::regex_match(word, path)) continue;  // with a pattern or a place to fill in
      ++seen;
      EXPECT_TRUE(fs::exists(kRoot / word)) << document.path << ": there is no " << word;
    }
  EXPECT_GT(seen, 100);
}

// Returns the --options in a text.
std::vector<std::string> options_in(const std::string& text) {
  return matches(" " + text, R"re([\s\[](--[a-z][a-z0-9-]*))re");
}

// Returns the help of each command.
const std::map<std::string, std::string>& help_texts() {
  static const std::map<std::string, std::string> texts = [] {
    std::map<std::string, std::string> out;
    const std::string overview = reshard_cli({"--help"}).out;
    for (const std::string& name : matches(overview, "\n  ([a-z]+)  ")) out[name] = reshard_cli({name, "--help"}).out;
    out[""] = overview;
    return out;
  }();
  return texts;
}

TEST(Documents, CommandsHaveTheOptionsThatTheyAreShownWith) {
  int seen = 0;
  for (const Document& document : documents()) {
    std::vector<std::string> commands = code_in(document);
    for (std::string line : lines_of(part_of(document, true))) {
      line = line.substr(0, line.find("   "));  // a comment follows
      for (std::size_t at = 0; (at = line.find("reshard ", at)) != std::string::npos; at += 8)
        commands.push_back(line.substr(at, line.find(';', at) - at));
    }
    for (const std::string& command : commands) {
      std::smatch name;
      if (!std::regex_search(command, name, std::regex("^reshard ([a-z]+)( |$)"))) continue;
      const auto help = help_texts().find(name[1]);
      if (help == help_texts().end()) {
        ADD_FAILURE() << document.path << ": no command: " << command;
        continue;
      }
      ++seen;
      for (const std::string& option : options_in(command))
        EXPECT_THAT(help->second + " --help", testing::ContainsRegex(option + "([ ,\n]|$)"))
            << document.path << ": " << command;
    }
  }
  EXPECT_GT(seen, 70);
}

// A directory with what the documents' commands read, under the names that they use.
class DocumentedCommands : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    inputs_ = new TempDir;
    const std::string mesh = "dp_shard=2,tp=2";
    make("step-1000", "--mesh " + mesh);
    for (const char* name : {"step-100", "step-101", "step-102", "step-900", "step-950", "step-1010", "step-2000",
                             "step-3000", "other", "a", "b", "c", "base", "llama", "outputs/step-1", "runs/a/step-1"})
      link("step-1000", name);
    make("model", "--to hf");
    make("dumps", "--to ranks --mesh tp=2 --names hf");
    make("rm", "--to hf --shape model.embed_tokens.weight=32x128");
    run("reshard layout step-1000 --json > l.json; cp model/config.json .; touch best.txt");
    run("reshard delta step-100 step-101 d101.h5; reshard delta step-101 step-102 d102.h5");
    run("reshard delta step-1000 step-1010 d.h5");
    fs::create_symlink(kRoot / "tests/data/quantized/gptq_4bit", *inputs_ / "model-gptq");
    fs::create_symlink(kRoot / "samples", *inputs_ / "samples");
  }
  static void TearDownTestSuite() {
    delete inputs_;
    inputs_ = nullptr;
  }

  static void make(const std::string& name, const std::string& options) {
    run("reshard synth " + name + " --model llama3-tiny " + options);
  }
  static void link(const std::string& from, const std::string& to) {
    fs::create_directories((fs::path(*inputs_ / to)).parent_path());
    fs::create_symlink(*inputs_ / from, *inputs_ / to);
  }
  static CommandResult in(const std::string& directory, const std::string& line) {
    return run_command(
        {"/bin/bash", "-c", "cd " + shell_word(directory) + " && reshard() { " RESHARD_BINARY " \"$@\"; } && " + line});
  }
  static void run(const std::string& line) {
    const CommandResult r = in(*inputs_ / ".", line);
    ASSERT_EQ(r.exit_code, 0) << line << "\n" << r.out << r.err;
  }
  // Runs a line in a directory of its own, in which the inputs are but for what it writes.
  static CommandResult try_line(const std::string& line) {
    const TempDir dir;
    const std::string positional = line.substr(0, line.find(" --"));
    const std::string written = positional.substr(positional.rfind(' ') + 1);
    const bool writes = std::regex_search(line, std::regex("reshard (convert|merge|patch|delta|watch)"));
    for (const auto& entry : fs::directory_iterator(*inputs_ / "."))
      if (const std::string name = entry.path().filename(); !writes || name != written)
        fs::create_symlink(entry.path(), dir / name);
    if (writes) fs::create_directories(fs::path(dir / written).parent_path());
    return in(dir / ".", line);
  }

  static TempDir* inputs_;
};
TempDir* DocumentedCommands::inputs_ = nullptr;

// Returns the commands of local files that a document shows in its code blocks, without prompts and comments.
std::vector<std::string> commands_in(const Document& document) {
  std::vector<std::string> out;
  for (std::string line : lines_of(part_of(document, true))) {
    if (line.find("://") != std::string::npos) continue;  // a server, which is not there
    line = std::regex_replace(line, std::regex(R"re(^\$ (build/release/)?)re"), "");
    line = std::regex_replace(line, std::regex("   .*"), "");
    if (line.starts_with("reshard ")) out.push_back(line);
  }
  return out;
}

TEST_F(DocumentedCommands, Run) {
  // Their inputs cannot be made here: other programs' files, a mount (mount_test.cc), an endless command.
  const std::regex elsewhere("reshard mount|\\.\\.\\.| &$|model\\.gguf|weight_v|dumps.* --source-layout");
  std::vector<std::pair<std::string, std::string>> lines;
  for (const Document& document : documents())
    for (const std::string& line : commands_in(document))
      if (!std::regex_search(line, elsewhere)) lines.emplace_back(document.path, line);
  EXPECT_GT(lines.size(), 30u);
  for (auto& [path, line] : sampled(lines, 5)) {
    if (line.find("reshard watch") != std::string::npos && line.find("--once") == std::string::npos) line += " --once";
    const CommandResult r = try_line(line);
    EXPECT_LE(r.exit_code, 1) << path << ": " << line << "\n" << r.out << r.err;  // 1: there are findings
  }
}

// Returns a text with durations, rates, memory and free space replaced.
std::string without_measurements(std::string text) {
  for (const char* pattern : {R"re(disk free [\d.]+ [kMGT]?B)re", R"re(\d[\d.,]* m?s\b)re", R"re([\d.]+ [kMGT]?B/s)re",
                              R"re(peak memory [\d.]+ [kMG]B)re"})
    text = std::regex_replace(text, std::regex(pattern), "~");
  return text;
}

// "$ COMMAND" is followed by what it prints; "..." stands for what is left out.
TEST_F(DocumentedCommands, PrintWhatIsShown) {
  int seen = 0;
  for (const Document& document : documents()) {
    const std::string text = part_of(document, true);
    for (std::size_t at = text.find("$ "); at != std::string::npos; at = text.find("\n$ ", at)) {
      if (at != 0 && text[at] == '\n') ++at;
      const std::size_t end = text.find('\n', at);
      const std::vector<std::string> command = commands_in({"", "```\n" + text.substr(at, end - at) + "\n```\n"});
      at = end;
      if (command.size() != 1) continue;
      ++seen;
      const CommandResult r = try_line(command[0]);
      const std::string printed = without_measurements(r.out);
      for (const std::string& line : lines_of(text.substr(end + 1))) {
        if (line.empty() || line.starts_with("$ ")) break;
        EXPECT_THAT(printed, testing::HasSubstr(line == "..." ? "" : without_measurements(line) + "\n"))
            << document.path << ": " << command[0];
      }
    }
  }
  EXPECT_GE(seen, 3);
}

}  // namespace
}  // namespace reshard::documents_test
