// SPDX-License-Identifier: Apache-2.0
// The command line of a subcommand. CLI11 parses it; only command_line.cc includes its headers, which take seconds to
// compile.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace reshard::tools {

// Runs a subcommand after its options are parsed. Returns the exit code.
using Action = std::function<Result<int>()>;

// A kind of file that a command writes besides its result: a page, a log. An existing file is replaced only if it is
// empty or of the same kind, so that a mistyped path cannot destroy a file of someone else.
struct ReportKind {
  std::string_view name;  // "an HTML report of reshard"
  std::string_view mark;  // occurs in the first kMarkBytes of every such file
  bool is_appended_to = false;
};
inline constexpr Index kMarkBytes = 4096;
inline constexpr ReportKind kHtmlReport = {"an HTML report of reshard", "<title>reshard</title>"};
inline constexpr ReportKind kJunitReport = {"a JUnit report of reshard", "<testsuite name=\"reshard "};
inline constexpr ReportKind kLog = {"a log of reshard", "reshard: ", true};
inline constexpr ReportKind kClassTable = {"a table of reshard family", "\"transformers\":\""};
inline constexpr ReportKind kManualPage = {"a manual page of reshard", ".TH RESHARD"};

struct Command;

// What help texts, completions and manual pages need to know about an option besides its description.
struct OptionHints {
  std::vector<std::string> words;      // values it accepts; not always all of them
  std::vector<std::string> meanings;   // of `words`, in the same order; empty: the words speak for themselves
  bool lists_words = false;            // help lists `words`; otherwise they are for completion only
  bool is_common = false;              // -h lists the option, not only --help
  bool written = false;                // the path of an output
  const ReportKind* report = nullptr;  // what the output is if it is a report
  bool read = false;                   // the path of an input, or NAME=PATH
  bool tensors = false;                // a glob over the tensor names of the checkpoint on the command line
  bool of_a_rank = false;              // each rank of a job may have a value of its own
  bool is_hidden = false;              // help texts do not list the option
  bool Command::*only_for = nullptr;   // help texts list the option only for commands with this property
};
using HintTable = std::map<const CLI::Option*, OptionHints>;

// An option that was added to a command line, and its properties. Each member returns the option itself.
class Option {
 public:
  Option(CLI::Option* option, OptionHints& hints) : option_(option), hints_(&hints) {}
  const Option& takes(const std::string& value) const;  // names the value in help texts: "FORMAT"
  const Option& common() const;                         // is listed by -h, not only by --help
  const Option& required(bool is = true) const;
  const Option& shows_default() const;  // in --help
  const Option& one_of(std::vector<std::string> words) const;
  const Option& within(Index least, Index most) const;
  const Option& within_real(double least, double most) const;
  const Option& positive() const;
  const Option& not_negative() const;
  const Option& or_environment(const std::string& variable) const;
  const Option& described_as(const std::string& text) const;
  const Option& under(const std::string& group) const;            // is listed under this heading of --help
  const Option& suggests(std::vector<std::string> words) const;   // lists values; others are accepted, too
  const Option& completes(std::vector<std::string> words) const;  // the same, for the shell only
  const Option& means(std::vector<std::string> meanings) const;   // explains the listed values, in their order
  const Option& names_tensors() const;  // takes globs over the tensor names of the checkpoint on the command line
  const Option& of_a_rank() const;      // may differ between the ranks of a job
  const Option& only_for(bool Command::*property) const;  // is listed only for commands with this property
  const Option& hidden() const;                           // is accepted, but not listed
  // Marks the option as the path of an output, by default the current directory; if it takes a list, the last element.
  // URLs are refused unless the command writes to buckets, which then checks them itself.
  enum class Outputs { kLocal, kBucketsToo };
  const Option& written(Outputs outputs = Outputs::kLocal) const;
  // Marks the option as the path of a report of this kind.
  const Option& written(const ReportKind& kind) const;
  // Marks the option as the path of an input, or NAME=PATH; if it takes a list that ends with an output, all but the
  // last element.
  const Option& read() const;

 private:
  CLI::Option* option_;
  OptionHints* hints_;
};

// A row of a table in help texts and manual pages: {"NO_COLOR", "Do not color the output"}.
struct TextRow {
  std::string name, text;
};

// A word that an option accepts, the value it stands for, and, for help texts, what it means.
template <class T>
struct Choice {
  std::string word;
  T value;
  std::string meaning = {};
};

// A command to paste, and what it does: {"reshard inspect step-1000", "show what it contains"}.
struct Example {
  std::string line, comment;  // the comment may be empty
};

// What help texts and manual pages say about a command besides its options.
struct CommandNotes {
  std::string description;  // paragraphs, separated by empty lines
  std::vector<Example> examples;
};

class CommandLine {
 public:
  CommandLine(CLI::App& app, Action& chosen, HintTable& hints, CommandNotes& notes)
      : app_(app), chosen_(chosen), hints_(hints), notes_(notes) {}

  // Puts the options that are added from now on under this heading of --help.
  void group(const std::string& name);

  // `name` is "--memory", or a word without dashes for a positional argument. `value` is set when the command line is
  // parsed and keeps its initial value if the option is absent.
  Option add_option(const std::string& name, std::string& value, const std::string& help);
  // An option of several values takes one each time it is given.
  Option add_option(const std::string& name, std::vector<std::string>& value, const std::string& help);
  Option add_option(const std::string& name, int& value, const std::string& help);
  Option add_option(const std::string& name, Index& value, const std::string& help);
  Option add_option(const std::string& name, std::size_t& value, const std::string& help);
  Option add_option(const std::string& name, double& value, const std::string& help);
  Option add_flag(const std::string& name, bool& value, const std::string& help);
  // An option that takes one of a few words, and sets `value` to what the word stands for.
  template <class T>
  Option add_choice(const std::string& name, T& value, std::vector<Choice<T>> choices, const std::string& help) {
    std::string fallback;
    for (const Choice<T>& choice : choices)
      if (choice.value == value) fallback = choice.word;
    return add_words(name, texts_of(choices), false, fallback, help,
                     [&value, choices](std::size_t i) { value = choices[i].value; });
  }
  // An option that takes several of these words, and adds what they stand for to `values`.
  template <class T>
  Option add_choices(const std::string& name, std::set<T>& values, std::vector<Choice<T>> choices,
                     const std::string& help) {
    return add_words(name, texts_of(choices), true, "", help,
                     [&values, choices](std::size_t i) { values.insert(choices[i].value); });
  }
  Option option(const std::string& name);  // one that was added
  void description(const std::string& text);
  void examples(std::vector<Example> examples);
  // Sets what this subcommand does.
  void action(Action action);

 private:
  using WordTexts = std::vector<TextRow>;  // words and their meanings
  template <class T>
  static WordTexts texts_of(const std::vector<Choice<T>>& choices) {
    WordTexts out;
    for (const Choice<T>& choice : choices) out.push_back({choice.word, choice.meaning});
    return out;
  }
  // `take` receives the index of the row of each word that is given.
  Option add_words(const std::string& name, const WordTexts& rows, bool repeats, const std::string& fallback,
                   const std::string& help, std::function<void(std::size_t)> take);
  Option with_hints(CLI::Option* option);

  CLI::App& app_;
  Action& chosen_;
  HintTable& hints_;
  CommandNotes& notes_;
  std::string group_ = "Report";
};

// A row of the table of subcommands.
struct Command {
  const char* name;
  const char* group;  // the heading it is listed under
  const char* summary;
  void (*add)(CommandLine& line);
  bool on_all_ranks;  // runs on all ranks of an MPI job; otherwise on rank 0 alone
  bool is_confined;   // may access only the paths of its command line (confine.h)
};

// The paths on a command line that are read and written.
struct PathsOfLine {
  struct Report {
    std::string path;
    const ReportKind* kind = nullptr;
  };
  std::vector<std::string> read, written;
  std::vector<Report> reports;  // also in `written`
};

// A parsed command line.
struct ParsedLine {
  const Command* command = nullptr;  // null: nothing is left to do (--help), or the line is wrong
  Action action;
  std::map<std::string, std::vector<std::string>> values;  // of the given options and positional arguments, by name
  std::vector<std::string> written;                        // values of outputs
  PathsOfLine paths;
  std::string of_all_ranks;    // the command and the values that must be the same on all ranks
  int exit_code = 0;           // if there is no command
  std::optional<Error> error;  // what is wrong with the line
};

// What help texts, completions and manual pages are made of.
struct OptionText {
  std::vector<std::string> names;  // "-q", "--quiet"; "SRC" of a positional argument
  bool is_positional = false;
  std::string group;  // "Source"
  std::string value;  // "FORMAT"; empty: a flag
  std::string help, fallback, environment;
  bool is_required = false, repeats = false;
  OptionHints hints;
};
struct CommandText {
  std::string name, group, summary;  // no name: the program itself
  CommandNotes notes;
  std::vector<OptionText> options;
};
// The whole of a program's command line.
struct Program {
  std::string summary;
  std::span<const Command> commands;
  std::function<void(CommandLine&)> common;  // adds the options of all commands
  std::function<std::string(bool json)> version;
  // Returns the help of one of `commands` (describe()), or of the program if the name is empty (help.h).
  std::function<std::string(const Program& program, const std::vector<CommandText>& commands, const std::string& name,
                            bool is_whole)>
      help;
  std::vector<TextRow> exit_codes, environment, files;
};
ParsedLine parse_command_line(int argc, char** argv, const Program& program);

// Returns the program itself, then its commands, each with the options of all commands at the end.
std::vector<CommandText> describe(const Program& program);

// Joins an error of the command line and the page that explains it: "expected SRC; see reshard inspect --help".
// `command` may be empty.
Error see_help(const std::string& message, const std::string& command);
// Returns the usage error "unknown naming convention 'hg'; did you mean hf? Choose one of: hf, torchtitan".
Error unknown_word(std::string_view what, std::string_view word, const std::vector<std::string>& choices);
// Returns this error for a dtype, whose short names are suggested too: "unknown dtype 'bf61'; did you mean bf16? ...".
Error unknown_dtype(std::string_view word, const std::vector<std::string>& choices);

// Parses the words of a subcommand within another program. Prints nothing; wrong words are a usage error.
struct ParsedOptions {
  Action action;  // null if `add` sets none
  PathsOfLine paths;
};
Result<ParsedOptions> parse_options(const std::vector<std::string>& words,
                                    const std::function<void(CommandLine&)>& add);

}  // namespace reshard::tools
