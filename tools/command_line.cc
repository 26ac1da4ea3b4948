#include "tools/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "lib/base/file.h"
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

// A shell's variable that is not set leaves an empty word, and no word may stand for "as if it were not asked for".
std::string refuse_empty(const std::string& word) { return word.empty() ? "expected a value, got an empty one" : ""; }

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
  hints_->words.assign(words.begin(), words.end());
  option_->check(CLI::IsMember(hints_->words));
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

const Option& Option::written() const {
  hints_->written = true;
  option_->transform(by_own_name);
  return *this;
}

const Option& Option::read() const {
  hints_->read = true;
  return *this;
}

const Option& Option::of_a_rank() const {
  hints_->of_a_rank = true;
  return *this;
}

const Option& Option::names_tensors() const {
  hints_->tensors = true;
  return *this;
}
const Option& Option::suggests(std::vector<std::string> words) const {
  hints_->words = std::move(words);
  return *this;
}

Option CommandLine::add_option(const std::string& name, std::string& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help)->check(CLI::Validator(refuse_empty, "")));
}

Option CommandLine::add_option(const std::string& name, std::vector<std::string>& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help)->check(CLI::Validator(refuse_empty, "")));
}

Option CommandLine::add_option(const std::string& name, int& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help));
}

Option CommandLine::add_option(const std::string& name, Index& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help));
}

Option CommandLine::add_option(const std::string& name, std::size_t& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help));
}

Option CommandLine::add_option(const std::string& name, double& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help));
}

Option CommandLine::add_flag(const std::string& name, bool& value, const std::string& help) {
  return with_hints(app_.add_flag(name, value, help));
}

Option CommandLine::option(const std::string& name) {
  // get_option() would end the process where there is no memory.
  return with_hints(app_.get_options([&](const CLI::Option* o) { return o->check_name(name); }).at(0));
}

void CommandLine::footer(const std::string& text) { app_.footer(text); }

void CommandLine::action(Action action) {
  app_.callback([action = std::move(action), &chosen = chosen_] { chosen = action; });
}

namespace {

// The parser of a program's lines, and what it fills.
struct Parser {
  explicit Parser(const Program& program) : app(program.summary) {
    CLI::Option* const as_json =
        app.add_flag("--json", json, "With --version: what is built in and what is found, as JSON");
    CLI::Option* const version = app.set_version_flag("--version", [this, &program] { return program.version(json); });
    as_json->needs(version);
    app.failure_message(usage_text);
    app.require_subcommand(1);
    app.fallthrough();
    CommandLine line(app, action, hints);
    program.common(line);
    for (const Command& command : program.commands) {
      CommandLine part(*app.add_subcommand(command.name, command.summary), action, hints);
      command.add(part);
    }
  }

  CLI::App app;
  bool json = false;
  Action action;
  HintTable hints;
};

OptionText text_of(const CLI::Option& option, const HintTable& hints) {
  OptionText out;
  out.is_place = option.get_positional();
  if (out.is_place) out.names = {option.get_name(true)};
  for (const std::string& name : option.get_lnames()) out.names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) out.names.push_back("-" + name);
  const bool is_flag = option.get_items_expected_max() == 0;
  if (!is_flag) {
    out.value = option.get_type_name();
    out.value = out.value.substr(0, out.value.find_first_of(":{ "));
    out.fallback = option.get_default_str();
  }
  out.help = option.get_description();
  out.environment = option.get_envname();
  out.is_required = option.get_required();
  out.repeats = !is_flag && option.get_items_expected_max() > 1;
  if (const auto found = hints.find(&option); found != hints.end()) out.hints = found->second;
  return out;
}

}  // namespace

namespace {

PathsOfLine paths_of(const CLI::App& app, const HintTable& hints) {
  PathsOfLine out;
  for (const CLI::Option* option : app.get_options()) {
    const auto found = hints.find(option);
    std::vector<std::string> values = option->results();
    if (found == hints.end() || values.empty()) continue;
    if (found->second.written) {
      out.written.push_back(values.back());
      values.pop_back();
    }
    if (!found->second.read) continue;
    for (const std::string& value : values) {
      out.read.push_back(value);
      if (const std::size_t equals = value.find('='); equals != std::string::npos)
        out.read.push_back(value.substr(equals + 1));
    }
  }
  return out;
}

}  // namespace

ParsedLine parse_command_line(int argc, char** argv, const Program& program) {
  Parser parser(program);
  ParsedLine parsed;
  try {
    parser.app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {  // the library's way to say so
    parsed.exit_code = parser.app.exit(e) == 0 ? 0 : static_cast<int>(ErrorCode::kUsage);
    return parsed;
  }
  parsed.action = std::move(parser.action);
  const CLI::App& chosen = *parser.app.get_subcommands().front();
  for (const CLI::Option* option : chosen.get_options()) {
    const std::vector<std::string> values = option->results();
    if (!values.empty()) parsed.values[option->get_name()] = values;
    const auto found = parser.hints.find(option);
    const OptionHints hints = found == parser.hints.end() ? OptionHints() : found->second;
    if (!values.empty() && !hints.of_a_rank) {
      if (!option->get_positional()) parsed.of_all_ranks += " " + option->get_name();
      for (const std::string& value : values) parsed.of_all_ranks += " '" + value + "'";
    }
    if (!hints.written) continue;
    if (!values.empty() || option->get_positional()) parsed.written.push_back(values.empty() ? "." : values.back());
  }
  parsed.paths = paths_of(chosen, parser.hints);
  const std::string used = chosen.get_name();
  parsed.of_all_ranks.insert(0, used);
  parsed.command = &*std::find_if(program.commands.begin(), program.commands.end(),
                                  [&](const Command& c) { return c.name == used; });
  return parsed;
}

std::vector<CommandText> describe(const Program& program) {
  Parser parser(program);
  std::vector<CommandText> out;
  const auto add = [&](CLI::App& app, std::string name) {
    CommandText command{std::move(name), app.get_description(), app.get_footer(), {}};
    for (const CLI::Option* option : app.get_options()) command.options.push_back(text_of(*option, parser.hints));
    out.push_back(std::move(command));
  };
  add(parser.app, "");
  for (CLI::App* command : parser.app.get_subcommands({})) add(*command, command->get_name());
  return out;
}

Result<ParsedOptions> parse_options(const std::vector<std::string>& words,
                                    const std::function<void(CommandLine&)>& add) {
  CLI::App app;
  ParsedOptions out;
  HintTable hints;
  CommandLine line(app, out.action, hints);
  add(line);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& e) {  // the library's way to say so
    return usage_error(printable(e.what()));
  }
  out.paths = paths_of(app, hints);
  return out;
}

}  // namespace reshard::tools
