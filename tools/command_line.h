// A subcommand's part of the command line. CLI11 parses it (command_line.cc): its headers take seconds to compile, so
// no other file sees them.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace reshard::tools {

// What a subcommand does once its options are parsed; the value is the exit code.
using Action = std::function<Result<int>()>;

// What completions and manual pages say of an option beside its help.
struct OptionHints {
  std::vector<std::string> words;  // that it may be given, not always all of them
  bool written = false;            // the path of an output
  bool read = false;               // the path of an input, or NAME=PATH
  bool tensors = false;            // a glob over names of the tensors of the checkpoint on the line
  bool of_a_rank = false;          // what one of several ranks has may be another's not
};
using HintTable = std::map<const CLI::Option*, OptionHints>;

// An option that was added, and what holds for it. Its members return itself.
class Option {
 public:
  Option(CLI::Option* option, OptionHints& hints) : option_(option), hints_(&hints) {}
  const Option& required(bool is = true) const;
  const Option& shows_default() const;  // in --help
  const Option& one_of(std::initializer_list<const char*> words) const;
  const Option& within(Index least, Index most) const;
  const Option& within_real(double least, double most) const;
  const Option& positive() const;
  const Option& not_negative() const;
  const Option& or_environment(const std::string& variable) const;
  const Option& one_value_each() const;  // of a list: the next word is not its value too
  const Option& described_as(const std::string& text) const;
  const Option& suggests(std::vector<std::string> words) const;  // and takes others, too
  const Option& names_tensors() const;                           // globs over them, of the checkpoint on the line
  const Option& of_a_rank() const;                               // of several ranks each may have its own
  const Option& written() const;  // the path of an output; of a list its last. Absent: in the current directory
  const Option& read() const;     // the path of an input, or NAME=PATH; of a list that has an output all but the last

 private:
  CLI::Option* option_;
  OptionHints* hints_;
};

class CommandLine {
 public:
  CommandLine(CLI::App& app, Action& chosen, HintTable& hints) : app_(app), chosen_(chosen), hints_(hints) {}

  // `name`: "--memory"; a word without dashes is a place on the line. `value` is set when the line is parsed, and is
  // what it was where the option is absent.
  Option add_option(const std::string& name, std::string& value, const std::string& help);
  Option add_option(const std::string& name, std::vector<std::string>& value, const std::string& help);
  Option add_option(const std::string& name, int& value, const std::string& help);
  Option add_option(const std::string& name, Index& value, const std::string& help);
  Option add_option(const std::string& name, std::size_t& value, const std::string& help);
  Option add_option(const std::string& name, double& value, const std::string& help);
  Option add_flag(const std::string& name, bool& value, const std::string& help);
  Option option(const std::string& name);  // one that was added
  void footer(const std::string& text);
  // What is to be done when this subcommand is the one that was asked for.
  void action(Action action);

 private:
  Option with_hints(CLI::Option* option) { return {option, hints_[option]}; }

  CLI::App& app_;
  Action& chosen_;
  HintTable& hints_;
};

// A row of the table of subcommands.
struct Command {
  const char* name;
  const char* summary;
  void (*add)(CommandLine& line);
  bool on_all_ranks;  // of a job that mpirun started; otherwise rank 0 does it alone
  bool is_confined;   // to the paths of its command line (confine.h)
};

// What a command line names to be read and to be written.
struct PathsOfLine {
  std::vector<std::string> read, written;
};

// What a command line asked for.
struct ParsedLine {
  const Command* command = nullptr;  // null: it is done with already (--help), or wrong
  Action action;
  std::map<std::string, std::vector<std::string>> values;  // of the options and places that were given, by their names
  std::vector<std::string> written;                        // values of outputs
  PathsOfLine paths;
  std::string of_all_ranks;    // the command and what has to be the same on all ranks
  int exit_code = 0;           // where there is no command
  std::optional<Error> error;  // what is wrong with the line
};

// The whole of a program's command line.
struct Program {
  std::string summary;
  std::span<const Command> commands;
  std::function<void(CommandLine&)> common;  // adds the options that come before a subcommand's name too
  std::function<std::string(bool json)> version;
};
ParsedLine parse_command_line(int argc, char** argv, const Program& program);

// What --help is made of, for other forms of it.
struct OptionText {
  std::vector<std::string> names;  // "--quiet", "-q"; of a place on the line, "SRC"
  bool is_place = false;
  std::string value;  // "TEXT"; empty: a flag
  std::string help, fallback, environment;
  bool is_required = false, repeats = false;
  OptionHints hints;
};
struct CommandText {
  std::string name, summary, footer;
  std::vector<OptionText> options;
};
// The program itself first, without a name; then its commands.
std::vector<CommandText> describe(const Program& program);

// A subcommand's words alone, within another program: what is wrong with them is a usage error, and nothing is printed.
struct ParsedOptions {
  Action action;  // null where `add` names none
  PathsOfLine paths;
};
Result<ParsedOptions> parse_options(const std::vector<std::string>& words,
                                    const std::function<void(CommandLine&)>& add);

}  // namespace reshard::tools
