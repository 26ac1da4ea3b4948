#include "tools/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "lib/base/text.h"

namespace reshard::tools {
namespace {

// What the library found wrong with the command line, in our form.
std::string usage_text(const CLI::App* app, const CLI::Error& e) {
  const auto used = app->get_subcommands();
  const std::string command = used.empty() ? "" : " " + used.front()->get_name();
  const auto unknown = app->remaining();
  const std::string what = used.empty() && !unknown.empty() ? "expected a command, got " + unknown.front() : e.what();
  return "reshard: error: " + printable(what) + "; see reshard" + command + " --help\n";
}

}  // namespace

const Option& Option::required(bool is) const {
  option_->required(is);
  return *this;
}

const Option& Option::shows_default() const {
  option_->capture_default_str();
  return *this;
}

const Option& Option::one_of(std::initializer_list<const char*> words) const {
  option_->check(CLI::IsMember(std::vector<std::string>(words.begin(), words.end())));
  return *this;
}

const Option& Option::within(Index least, Index most) const {
  option_->check(CLI::Range(least, most));
  return *this;
}

const Option& Option::within_real(double least, double most) const {
  option_->check(CLI::Range(least, most));
  return *this;
}

const Option& Option::positive() const {
  option_->check(CLI::PositiveNumber);
  return *this;
}

const Option& Option::not_negative() const {
  option_->check(CLI::NonNegativeNumber);
  return *this;
}

const Option& Option::or_environment(const std::string& variable) const {
  option_->envname(variable);
  return *this;
}

const Option& Option::one_value_each() const {
  option_->allow_extra_args(false);
  return *this;
}

const Option& Option::described_as(const std::string& text) const {
  option_->description(text);
  return *this;
}

Option CommandLine::add_option(const std::string& name, std::string& value, const std::string& help) {
  return Option(app_.add_option(name, value, help));
}

Option CommandLine::add_option(const std::string& name, std::vector<std::string>& value, const std::string& help) {
  return Option(app_.add_option(name, value, help));
}

Option CommandLine::add_option(const std::string& name, int& value, const std::string& help) {
  return Option(app_.add_option(name, value, help));
}

Option CommandLine::add_option(const std::string& name, Index& value, const std::string& help) {
  return Option(app_.add_option(name, value, help));
}

Option CommandLine::add_option(const std::string& name, std::size_t& value, const std::string& help) {
  return Option(app_.add_option(name, value, help));
}

Option CommandLine::add_option(const std::string& name, double& value, const std::string& help) {
  return Option(app_.add_option(name, value, help));
}

Option CommandLine::add_flag(const std::string& name, bool& value, const std::string& help) {
  return Option(app_.add_flag(name, value, help));
}

Option CommandLine::option(const std::string& name) { return Option(app_.get_option(name)); }

void CommandLine::footer(const std::string& text) { app_.footer(text); }

void CommandLine::action(Action action) {
  app_.callback([action = std::move(action), &chosen = chosen_] { chosen = action; });
}

ParsedLine parse_command_line(int argc, char** argv, const std::string& summary, std::span<const Command> commands,
                              const std::function<void(CommandLine&)>& common) {
  CLI::App app(summary);
  app.set_version_flag("--version", std::string("reshard ") + RESHARD_VERSION);
  app.failure_message(usage_text);
  app.require_subcommand(1);
  app.fallthrough();
  ParsedLine parsed;
  CommandLine line(app, parsed.action);
  common(line);
  for (const Command& command : commands) {
    CommandLine part(*app.add_subcommand(command.name, command.summary), parsed.action);
    command.add(part);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {  // the library's way to say so
    parsed.exit_code = app.exit(e) == 0 ? 0 : static_cast<int>(ErrorCode::kUsage);
    return parsed;
  }
  const std::string used = app.get_subcommands().front()->get_name();
  parsed.command = &*std::find_if(commands.begin(), commands.end(), [&](const Command& c) { return c.name == used; });
  return parsed;
}

}  // namespace reshard::tools
