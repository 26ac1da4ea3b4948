// A subcommand's part of the command line. CLI11 parses it (command_line.cc): its headers take seconds to compile, so
// no other file sees them.
#pragma once

#include <functional>
#include <initializer_list>
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

// An option that was added, and what holds for it. Its members return itself.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}
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

 private:
  CLI::Option* option_;
};

class CommandLine {
 public:
  CommandLine(CLI::App& app, Action& chosen) : app_(app), chosen_(chosen) {}

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
  CLI::App& app_;
  Action& chosen_;
};

// A row of the table of subcommands.
struct Command {
  const char* name;
  const char* summary;
  void (*add)(CommandLine& line);
  bool on_all_ranks;  // of a job that mpirun started; otherwise rank 0 does it alone
};

// What a command line asked for.
struct ParsedLine {
  const Command* command = nullptr;  // null: it is done with already (--help), or wrong, and that has been said
  Action action;
  int exit_code = 0;  // where there is no command
};
// `common` adds the options that come before a subcommand's name too.
ParsedLine parse_command_line(int argc, char** argv, const std::string& summary, std::span<const Command> commands,
                              const std::function<void(CommandLine&)>& common);

}  // namespace reshard::tools
