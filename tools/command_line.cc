// SPDX-License-Identifier: Apache-2.0
#include "tools/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <type_traits>

#include "lib/base/choices.h"
#include "lib/base/file.h"
#include "lib/base/storage/secret_query.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"
#include "lib/layout/dtype.h"
#include "tools/host.h"

namespace reshard::tools {
namespace {

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

// Returns "; repeat --include for each value" if an option of several values was given, otherwise "".
std::string repeat_hint(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options())
    if (!option->get_positional() && option->get_items_expected_max() > 1 && option->count() > 0)
      return "; repeat " + option->get_name() + " for each value";
  return "";
}

// Returns "unknown option --byte; did you mean --bytes?" for the words that no option takes, in the order given.
std::string unknown_text(const CLI::App& app, const std::vector<std::string>& words) {
  const auto is_option = [](const std::string& word) { return word.starts_with("-"); };
  std::vector<std::string> shown;
  for (const std::string& word : words) shown.push_back(printable(word));
  const auto option = std::find_if(words.begin(), words.end(), is_option);
  const bool all_options = std::all_of(words.begin(), words.end(), is_option);
  return std::string("unknown ") + (all_options ? "option" : "argument") + (words.size() == 1 ? " " : "s ") +
         join(shown, " ") +
         (option == words.end() ? repeat_hint(app)
                                : near_name(option->substr(0, option->find('=')), option_names(app)));
}

// Returns "expected SRC, DST and --to": the required options and positional arguments that are missing; empty if none
// is.
std::string missing_text(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    if (option->get_required() && option->count() == 0) names.push_back(option->get_name());
  if (names.empty()) return "";
  const std::string last = names.back();
  names.pop_back();
  return "expected " + join(names, ", ") + (names.empty() ? "" : " and ") + last;
}

// Turns the library's "--to: 1 required TEXT missing" into "--to: expected a value".
std::string mismatch_text(const std::string& what) {
  const std::string option = what.substr(0, what.find(':'));
  if (what.find("missing") != std::string::npos) return printable(option) + ": expected a value";
  return what.find("At Most") == std::string::npos ? printable(what)
                                                   : printable(option) + ": expected one value, given several times";
}

std::string text_of(const CLI::App& used, const CLI::Error& e) {
  const std::string missing = missing_text(used);
  if (dynamic_cast<const CLI::RequiredError*>(&e) != nullptr && !missing.empty()) return missing;
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&e) != nullptr) return mismatch_text(e.what());
  // Only --json needs another option, --version. A command without --json inherits it.
  if (dynamic_cast<const CLI::RequiresError*>(&e) != nullptr && used.get_parent() != nullptr)
    return "unknown option --json";
  return printable(e.what());
}

// Returns the words that nothing takes. The library counts the mark "--" among them, whatever is wrong.
std::vector<std::string> unknown_words(const CLI::App& app) {
  std::vector<std::string> out = app.remaining(true);
  std::erase(out, "--");
  return out;
}

// Translates an error of the command-line library.
Error error_of_line(const CLI::App& app, const CLI::Error& e) {
  const auto chosen = app.get_subcommands();
  const CLI::App& used = chosen.empty() ? app : *chosen.front();
  const std::string command = chosen.empty() ? "" : used.get_name();
  const std::vector<std::string> unknown = unknown_words(app);
  if (unknown.empty()) return see_help(text_of(used, e), command);
  if (chosen.empty() && !unknown.front().starts_with("-"))
    return see_help(
        "unknown command '" + printable(unknown.front()) + "'" + near_name(unknown.front(), command_names(app)),
        command);
  return see_help(unknown_text(used, unknown), command);
}

// Refuses an empty value: an unset shell variable must not act as if the option were not given.
std::string refuse_empty(const std::string& word) { return word.empty() ? "expected a value, got an empty one" : ""; }

// Checks that a value is a number of this type.
template <class T>
CLI::Validator number_check() {
  const char* const kind = std::is_integral_v<T> ? "a whole number" : "a number";
  return CLI::Validator(
      [kind](std::string& text) {
        T value{};
        if (CLI::detail::lexical_cast(text, value)) return std::string();
        return "expected " + std::string(kind) + ", got '" + printable(text) + "'";
      },
      "");
}

// Checks a number. `expected` describes those that pass: "1 to 1024".
template <class T>
CLI::Validator value_check(std::string expected, std::function<bool(T)> passes) {
  return CLI::Validator(
      [expected = std::move(expected), passes = std::move(passes)](std::string& text) {
        T value{};
        if (CLI::detail::lexical_cast(text, value) && passes(value)) return std::string();
        return "expected " + expected + ", got '" + printable(text) + "'";
      },
      "");
}

template <class T>
CLI::Validator range_check(T least, T most) {
  std::ostringstream bounds;
  bounds << least << " to " << most;
  return value_check<T>(bounds.str(), [=](T value) { return value >= least && value <= most; });
}

}  // namespace

Error see_help(const std::string& message, const std::string& command) {
  const std::string help = "reshard " + (command.empty() ? "" : command + " ") + "--help";
  return usage_error(message + (message.ends_with('?') ? " See " : "; see ") + help);
}

Error unknown_word(std::string_view what, std::string_view word, const std::vector<std::string>& choices) {
  return usage_error("unknown " + std::string(what) + " '" + printable(word) + "'" + choices_text(word, choices));
}

Error unknown_dtype(std::string_view word, const std::vector<std::string>& choices) {
  std::vector<std::string> others;  // "f16", "fp16"
  for (const std::string& choice : choices)
    if (const auto dtype = dtype_from_torch(choice)) {
      others.emplace_back(info(*dtype).short_name);
      if (others.back().starts_with('f')) others.push_back("fp" + others.back().substr(1));
    }
  return usage_error("unknown dtype '" + printable(word) + "'" + choices_text(word, choices, others));
}

const Option& Option::takes(const std::string& value) const {
  option_->type_name(value);
  return *this;
}

const Option& Option::common() const {
  hints_->is_common = true;
  return *this;
}

const Option& Option::required(bool is) const {
  option_->required(is);
  return *this;
}

const Option& Option::shows_default() const {
  option_->capture_default_str();
  return *this;
}

const Option& Option::one_of(std::vector<std::string> words) const {
  const auto check = [words](std::string& word) {
    if (std::find(words.begin(), words.end(), word) != words.end()) return std::string();
    return "unknown value '" + printable(word) + "'" + choices_text(word, words);
  };
  option_->check(CLI::Validator(check, ""));
  return suggests(std::move(words));
}

const Option& Option::within(Index least, Index most) const {
  option_->check(range_check(least, most));
  return *this;
}

const Option& Option::within_real(double least, double most) const {
  option_->check(range_check(least, most));
  return *this;
}

const Option& Option::positive() const {
  option_->check(value_check<double>("a number above 0", [](double value) { return value > 0; }));
  return *this;
}

const Option& Option::not_negative() const {
  option_->check(value_check<double>("a finite number of at least 0",
                                     [](double value) { return value >= 0 && std::isfinite(value); }));
  return *this;
}

const Option& Option::or_environment(const std::string& variable) const {
  if (!host())
    option_->envname(variable);
  else if (const std::string value = environment_variable(variable); !value.empty())
    option_->default_val(value);
  return *this;
}

const Option& Option::described_as(const std::string& text) const {
  option_->description(text);
  return *this;
}

const Option& Option::under(const std::string& group) const {
  option_->group(group);
  return *this;
}

const Option& Option::written(Outputs outputs) const {
  hints_->written = true;
  hints_->report = nullptr;
  takes(option_->get_positional() ? "PATH" : "FILE");
  option_->transform([outputs](const std::string& path) {
    if (path == "-") throw CLI::ValidationError("expected a path, got -, which is not standard output here");
    if (is_url(path) && outputs == Outputs::kLocal)
      throw CLI::ValidationError("expected a local path, got a URL: convert, merge, patch and synth write to buckets");
    const auto own = is_url(path) ? Result<std::string>(path) : by_own_name(path);
    return own ? *own : path;  // the job reports the error
  });
  return *this;
}

const Option& Option::written(const ReportKind& kind) const {
  const Option& out = written();
  hints_->report = &kind;
  return out;
}

namespace {

// Returns a path, or NAME=PATH, as the program passes it on and shows it: without a presigned URL's secret.
std::string without_secret(const std::string& value) {
  const std::size_t equals = value.starts_with("http") ? std::string::npos : value.find("=http");
  if (equals == std::string::npos) return without_secret_query(value);
  return value.substr(0, equals + 1) + without_secret_query(value.substr(equals + 1));
}

}  // namespace

const Option& Option::read() const {
  hints_->read = true;
  takes(option_->get_positional() ? "PATH" : "FILE");
  option_->transform(without_secret);
  return *this;
}

const Option& Option::only_for(bool Command::*property) const {
  hints_->only_for = property;
  return *this;
}

const Option& Option::hidden() const {
  hints_->is_hidden = true;
  return *this;
}

const Option& Option::of_a_rank() const {
  hints_->of_a_rank = true;
  return *this;
}

const Option& Option::names_tensors() const {
  hints_->tensors = true;
  takes("GLOB");
  return *this;
}

const Option& Option::suggests(std::vector<std::string> words) const {
  hints_->lists_words = true;
  return completes(std::move(words));
}

const Option& Option::completes(std::vector<std::string> words) const {
  hints_->words = std::move(words);
  return *this;
}

const Option& Option::means(std::vector<std::string> meanings) const {
  hints_->meanings = std::move(meanings);
  return *this;
}

Option CommandLine::add_option(const std::string& name, std::string& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help)->check(CLI::Validator(refuse_empty, "")));
}

Option CommandLine::add_option(const std::string& name, std::vector<std::string>& value, const std::string& help) {
  CLI::Option* const option = app_.add_option(name, value, help)->check(CLI::Validator(refuse_empty, ""));
  // Otherwise `--include a SRC DST` would take SRC and DST for names.
  if (!option->get_positional()) option->allow_extra_args(false);
  return with_hints(option);
}

Option CommandLine::add_option(const std::string& name, int& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help)->type_name("N")->check(number_check<int>()));
}

Option CommandLine::add_option(const std::string& name, Index& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help)->type_name("N")->check(number_check<Index>()));
}

Option CommandLine::add_option(const std::string& name, std::size_t& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help)->type_name("N")->check(number_check<std::size_t>()));
}

Option CommandLine::add_option(const std::string& name, double& value, const std::string& help) {
  return with_hints(app_.add_option(name, value, help)->type_name("X")->check(number_check<double>()));
}

Option CommandLine::add_flag(const std::string& name, bool& value, const std::string& help) {
  return with_hints(app_.add_flag(name, value, help));
}

Option CommandLine::add_words(const std::string& name, const WordTexts& rows, bool repeats, const std::string& fallback,
                              const std::string& help, std::function<void(std::size_t)> take) {
  std::vector<std::string> words, meanings;
  for (const TextRow& row : rows) {
    words.push_back(row.name);
    if (!row.text.empty()) meanings.push_back(row.text);
  }
  const auto take_word = [words, take = std::move(take)](const std::string& word) {
    take(std::find(words.begin(), words.end(), word) - words.begin());
  };
  const auto take_all = [take_word](const std::vector<std::string>& given) {
    std::for_each(given.begin(), given.end(), take_word);
  };
  CLI::Option* const option = repeats ? app_.add_option_function<std::vector<std::string>>(name, take_all, help)
                                      : app_.add_option_function<std::string>(name, take_word, help);
  option->check(CLI::Validator(refuse_empty, ""))->default_function([fallback] { return fallback; });
  Option out = with_hints(option);
  out.one_of(std::move(words)).means(std::move(meanings));
  return out;
}

Option CommandLine::option(const std::string& name) {
  // get_option() would end the process if memory runs out.
  return with_hints(app_.get_options([&](const CLI::Option* o) { return o->check_name(name); }).at(0));
}

Option CommandLine::with_hints(CLI::Option* option) {
  option->group(group_);
  return {option, hints_[option]};
}

void CommandLine::group(const std::string& name) { group_ = name; }
void CommandLine::description(const std::string& text) { notes_.description = text; }
void CommandLine::examples(std::vector<Example> examples) { notes_.examples = std::move(examples); }

void CommandLine::action(Action action) {
  app_.callback([action = std::move(action), &chosen = chosen_] { chosen = action; });
}

namespace {

// The parser of a program's command lines, and what it fills.
struct Parser {
  // Adds the options of the commands that `words` name, or of all commands if there are no words. Most of the time that
  // the program needs to start goes into options.
  explicit Parser(const Program& it, const std::vector<std::string>& words = {}) : program(it), app(it.summary) {
    app.name("reshard");
    app.formatter_fn([this](const CLI::App* of, const std::string&, CLI::AppFormatMode mode) {
      return program.help(program, describe(program), of == &app ? "" : of->get_name(),
                          mode == CLI::AppFormatMode::All);
    });
    app.set_help_flag("-h", "Show a summary")->group("Help");
    app.set_help_all_flag("--help", "Show all options")->group("Help");
    CLI::Option* const as_json =
        app.add_flag("--json", json, "With --version: report the build as JSON")->group("Help");
    CLI::Option* const version = app.set_version_flag(
                                        "-V,--version", [this] { return program.version(json); }, "Show the version")
                                     ->group("Help");
    as_json->needs(version);
    app.require_subcommand(1);
    app.fallthrough();
    CommandLine line(app, action, hints, notes[""]);
    line.group("Run");
    program.common(line);
    for (const Command& command : program.commands) {
      CommandLine part(*app.add_subcommand(command.name, command.summary), action, hints, notes[command.name]);
      if (words.empty() || std::find(words.begin(), words.end(), command.name) != words.end()) command.add(part);
    }
  }

  std::vector<CommandText> texts() const;

  const Program& program;
  CLI::App app;
  bool json = false;
  Action action;
  HintTable hints;
  std::map<std::string, CommandNotes> notes;
};

OptionText option_text(const CLI::Option& option, const HintTable& hints) {
  OptionText out;
  out.is_positional = option.get_positional();
  if (out.is_positional) out.names = {option.get_name(true)};
  for (const std::string& name : option.get_snames()) out.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) out.names.push_back("--" + name);
  out.group = option.get_group();
  const bool is_flag = option.get_items_expected_max() == 0;
  if (!is_flag) {
    out.value = option.get_type_name();
    out.value = out.value.substr(0, out.value.find_first_of(":{"));
    out.fallback = option.get_default_str();
  }
  out.help = option.get_description();
  out.environment = option.get_envname();
  out.is_required = option.get_required();
  out.repeats = !is_flag && option.get_items_expected_max() > 1;
  if (const auto found = hints.find(&option); found != hints.end()) out.hints = found->second;
  return out;
}

std::vector<CommandText> Parser::texts() const {
  std::vector<CommandText> out;
  const auto add_options = [&](const CLI::App& of, std::vector<OptionText>& options) {
    for (const CLI::Option* option : of.get_options())
      if (OptionText text = option_text(*option, hints); !text.hints.is_hidden) options.push_back(std::move(text));
  };
  std::vector<OptionText> common;
  add_options(app, common);
  out.push_back({"", "", app.get_description(), notes.at(""), common});
  std::erase_if(common, [](const OptionText& o) { return o.group != "Run"; });
  const std::vector<const CLI::App*> parts = app.get_subcommands({});  // in the order of the table
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Command& row = program.commands[i];
    CommandText command{row.name, row.group, row.summary, notes.at(row.name), {}};
    add_options(*parts[i], command.options);
    for (const OptionText& option : common)
      if (!option.hints.only_for || row.*option.hints.only_for) command.options.push_back(option);
    out.push_back(std::move(command));
  }
  return out;
}

PathsOfLine paths_of(const CLI::App& app, const HintTable& hints) {
  PathsOfLine out;
  for (const CLI::Option* option : app.get_options()) {
    const auto found = hints.find(option);
    std::vector<std::string> values = option->results();
    if (found == hints.end() || values.empty()) continue;
    if (found->second.written) {
      out.written.push_back(values.back());
      if (found->second.report) out.reports.push_back({values.back(), found->second.report});
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
  const std::vector<std::string> words(argv, argv + argc);  // the program's name, which is no command's, among them
  Parser parser(program, words);
  ParsedLine parsed;
  try {
    // The library takes the words after the program's name last one first.
    parser.app.parse(std::vector<std::string>(words.rbegin(), words.rend() - std::min(argc, 1)));
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

std::vector<CommandText> describe(const Program& program) { return Parser(program).texts(); }

Result<ParsedOptions> parse_options(const std::vector<std::string>& words,
                                    const std::function<void(CommandLine&)>& add) {
  CLI::App app;
  ParsedOptions out;
  HintTable hints;
  CommandNotes notes;
  CommandLine line(app, out.action, hints, notes);
  add(line);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& e) {  // the library's way to say so
    const std::vector<std::string> unknown = unknown_words(app);
    return usage_error(unknown.empty() ? text_of(app, e) : unknown_text(app, unknown));
  }
  out.paths = paths_of(app, hints);
  return out;
}

}  // namespace reshard::tools
