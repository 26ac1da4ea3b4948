#include "tools/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

// How many letters have to be changed, added or left out to make one word of another.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({changed, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

// "; did you mean --max-shard-size?" of a word that begins one of those that are known, or is like one; else nothing.
std::string near_name(std::string_view word, const std::vector<std::string>& known) {
  constexpr std::size_t kShortest = 3;  // letters of a beginning
  constexpr std::size_t kLetters = 3;   // of which one may be wrong
  word = word.substr(0, word.find('='));
  std::pair best(word.size() / kLetters + 1, std::string_view());
  for (const std::string& name : known) {
    const std::size_t letters = word.size() >= kShortest && name.starts_with(word) ? 0 : distance(word, name);
    if (letters < best.first) best = {letters, name};
  }
  return best.second.empty() ? "" : "; did you mean " + std::string(best.second) + "?";
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> out;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) out.push_back("--" + name);
  return out;
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> out;
  for (const CLI::App* command : app.get_subcommands({})) out.push_back(command->get_name());
  return out;
}

// What is wrong with words that no option takes, in the order in which they were given.
std::string unknown_text(const CLI::App& app, const std::vector<std::string>& words) {
  std::vector<std::string> shown;
  for (const std::string& word : words) shown.push_back(printable(word));
  const auto option = std::find_if(words.begin(), words.end(), [](const auto& w) { return w.starts_with("-"); });
  return std::string(words.size() == 1 ? "unknown argument " : "unknown arguments ") + join(shown, " ") +
         (option == words.end() ? "" : near_name(*option, option_names(app)));
}

// What the library found wrong with the command line, in our form.
Error error_of_line(const CLI::App& app, const CLI::Error& e) {
  const auto used = app.get_subcommands();
  const std::string help = "; see reshard" + (used.empty() ? "" : " " + used.front()->get_name()) + " --help";
  const std::vector<std::string> unknown = app.remaining(true);
  if (used.empty() && !unknown.empty())
    return usage_error("expected a command, got " + printable(unknown.front()) +
                       near_name(unknown.front(), command_names(app)) + help);
  if (unknown.empty()) return usage_error(printable(e.what()) + help);
  return usage_error(unknown_text(used.empty() ? app : *used.front(), unknown) + help);
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
  if (!host())
    option_->envname(variable);
  else if (const std::string value = environment_variable(variable); !value.empty())
    option_->default_val(value);
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
  option_->transform([](const std::string& path) {
    if (path == "-") throw CLI::ValidationError("expected a path, got -, which is not standard output here");
    return by_own_name(path);
  });
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
    CLI::Option* const version =
        app.set_version_flag("-V,--version", [this, &program] { return program.version(json); });
    as_json->needs(version);
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

// The words after the program's name, the last one first as the library takes them; `help convert` as `convert --help`.
std::vector<std::string> help_of(int argc, char** argv, const Program& program) {
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  const auto is_command = [&](const Command& c) { return words.size() < 2 || c.name == words[1]; };
  if (!words.empty() && words[0] == "help" && words.size() <= 2 &&
      std::any_of(program.commands.begin(), program.commands.end(), is_command)) {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  return {words.rbegin(), words.rend()};
}

}  // namespace

ParsedLine parse_command_line(int argc, char** argv, const Program& program) {
  Parser parser(program);
  ParsedLine parsed;
  try {
    if (argc > 0) parser.app.name(argv[0]);
    parser.app.parse(help_of(argc, argv, program));
  } catch (const CLI::Success& e) {  // --help, --version
    parsed.exit_code = parser.app.exit(e);
    return parsed;
  } catch (const CLI::ParseError& e) {  // the library's way to say so
    parsed.error = error_of_line(parser.app, e);
    parsed.exit_code = static_cast<int>(ErrorCode::kUsage);
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
    const std::vector<std::string> unknown = app.remaining();
    return usage_error(unknown.empty() ? printable(e.what()) : unknown_text(app, unknown));
  }
  out.paths = paths_of(app, hints);
  return out;
}

}  // namespace reshard::tools
