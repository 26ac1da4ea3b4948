// SPDX-License-Identifier: Apache-2.0
#include "tools/help.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <string_view>

#include "lib/base/choices.h"
#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

// The headings of options, in the order in which --help shows them. Others follow.
constexpr std::array<std::string_view, 9> kGroups = {"Source", "Target", "Model", "Rows and types", "Merge", "Steps",
                                                     "Checks", "Report", "Run"};
constexpr std::size_t kWidthOfFile = 100;  // columns if standard output is not a terminal
constexpr std::size_t kWidestNames = 28;   // of the column of names
constexpr std::size_t kNarrowScreen = 80;  // below it descriptions are on lines of their own
constexpr std::size_t kNarrowIndent = 8;

// A table of names and texts. A text that does not fit next to its name begins on the next line.
class Table {
 public:
  void add(std::string name, std::string text) { rows_.push_back({std::move(name), std::move(text)}); }

  std::string text(std::size_t screen) const {
    std::size_t column = 0;
    for (const TextRow& row : rows_)
      if (row.name.size() <= kWidestNames) column = std::max(column, row.name.size());
    const std::size_t indent = screen < kNarrowScreen ? kNarrowIndent : column + 4;
    std::string out;
    for (const TextRow& row : rows_) {
      std::string name = "  " + row.name;
      if (row.text.empty()) {
        out += name + "\n";
      } else if (name.size() + 2 > indent) {
        out += name + "\n" + std::string(indent, ' ') + wrapped(row.text, indent, indent, screen) + "\n";
      } else {
        name.resize(indent, ' ');
        out += name + wrapped(row.text, indent, indent, screen) + "\n";
      }
    }
    return out;
  }
  bool empty() const { return rows_.empty(); }

 private:
  std::vector<TextRow> rows_;
};

std::string heading(const std::string& text) { return "\n" + colored(text, "1") + "\n"; }

std::string section(const std::string& title, const Table& table, std::size_t screen) {
  return table.empty() ? "" : heading(title) + table.text(screen);
}

std::string section(const std::string& title, const std::vector<TextRow>& rows, std::size_t screen) {
  Table table;
  for (const TextRow& row : rows) table.add(row.name, row.text);
  return section(title, table, screen);
}

// Paragraphs, each wrapped.
std::string paragraphs(const std::string& text, std::size_t screen) {
  std::string out;
  for (const std::string& line : split(text, '\n')) out += wrapped(line, 0, 0, screen) + "\n";
  return out;
}

// Breaks a command line that is wider than the screen, as one types it in a shell: before an option, or else before
// another word that is not in quotes.
std::string continued(std::string_view command, std::size_t screen) {
  std::string out = "  ";
  for (std::size_t indent = 2; indent + command.size() > screen; indent = 6) {
    const std::size_t last = screen - indent - 2;
    std::size_t cut = command.rfind(" --", last);
    if (cut == std::string_view::npos) cut = command.rfind(' ', last);
    if (cut == std::string_view::npos || std::ranges::count(command.substr(0, cut), '\'') % 2 != 0) break;
    out += std::string(command.substr(0, cut)) + " \\\n" + std::string(6, ' ');
    command.remove_prefix(cut + 1);
  }
  return out + std::string(command);
}

std::string examples_text(const std::vector<Example>& examples, std::size_t screen) {
  std::size_t column = 0;
  for (const Example& e : examples)
    if (!e.comment.empty() && e.line.size() + e.comment.size() + 6 <= screen) column = std::max(column, e.line.size());
  std::string out;
  for (const Example& e : examples) {
    std::string line = continued(e.line, screen);
    if (e.comment.empty()) {
      out += line + "\n";
    } else if (e.line.size() + e.comment.size() + 6 > screen) {
      out += line + "\n" + std::string(kNarrowIndent, ' ') + "# " +
             wrapped(e.comment, kNarrowIndent + 2, kNarrowIndent + 2, screen) + "\n";
    } else {
      const std::size_t wanted = column + 2 + 2 + 2 + e.comment.size() <= screen ? column : e.line.size();
      line.resize(2 + wanted, ' ');
      out += line + "  # " + e.comment + "\n";
    }
  }
  return out;
}

// The headings of a command's options, in their order.
std::vector<std::string> groups_of(const CommandText& command) {
  std::vector<std::string> out(kGroups.begin(), kGroups.end());
  for (const OptionText& option : command.options)
    if (std::find(out.begin(), out.end(), option.group) == out.end()) out.push_back(option.group);
  return out;
}

void add_option(Table& table, const OptionText& option, bool is_whole) {
  table.add(option_usage(option), is_whole ? option_description(option) : option.help);
  if (!is_whole || !option.hints.lists_words) return;
  for (std::size_t i = 0; i < option.hints.meanings.size(); ++i)
    table.add("  " + option.hints.words[i], option.hints.meanings[i]);
}

std::string places_text(const CommandText& command, std::size_t screen) {
  Table table;
  for (const OptionText& option : command.options)
    if (option.is_positional) table.add(option.names[0], option_description(option));
  return table.empty() ? "" : "\n" + table.text(screen);
}

std::string all_options(const CommandText& command, std::size_t screen) {
  std::string out;
  for (const std::string& group : groups_of(command)) {
    Table table;
    for (const OptionText& option : command.options)
      if (!option.is_positional && option.group == group) add_option(table, option, true);
    out += section(group, table, screen);
  }
  return out;
}

std::string common_options(const CommandText& command, std::size_t screen) {
  Table table;
  for (const OptionText& option : command.options)
    if (!option.is_positional && option.hints.is_common) add_option(table, option, false);
  return section("Common options", table, screen);
}

std::string commands_text(const std::vector<CommandText>& commands, std::size_t screen) {
  std::vector<std::string> groups;
  std::size_t column = 0;
  for (const CommandText& command : commands) {
    column = std::max(column, command.name.size());
    if (!command.name.empty() && std::find(groups.begin(), groups.end(), command.group) == groups.end())
      groups.push_back(command.group);
  }
  std::string out;
  for (const std::string& group : groups) {
    out += heading(group);
    for (const CommandText& command : commands) {
      if (command.name.empty() || command.group != group) continue;
      std::string line = "  " + command.name;
      line.resize(column + 4, ' ');
      out += line + wrapped(command.summary, line.size(), line.size(), screen) + "\n";
    }
  }
  return out;
}

std::string program_help(const Program& program, const std::vector<CommandText>& commands, bool is_whole,
                         std::size_t screen) {
  const CommandText& self = commands.front();
  std::string out =
      paragraphs(self.summary, screen) + "\nUsage: " + usage_text(self) + "\n" + commands_text(commands, screen);
  if (is_whole) {
    out += all_options(self, screen) + section("Exit codes", program.exit_codes, screen) +
           section("Environment", program.environment, screen);
    out += heading("Examples") + examples_text(self.notes.examples, screen);
  }
  return out + "\n" +
         paragraphs("reshard COMMAND -h shows a command's common options, reshard COMMAND --help all of them.", screen);
}

std::string command_help(const CommandText& command, bool is_whole, std::size_t screen) {
  std::string out = paragraphs(command.summary, screen) + "\nUsage: " + wrapped(usage_text(command), 9, 7, screen) +
                    "\n" + places_text(command, screen);
  out += is_whole ? all_options(command, screen) : common_options(command, screen);
  std::vector<Example> examples = command.notes.examples;
  constexpr std::size_t kMostExamples = 3;
  if (!is_whole && examples.size() > kMostExamples) examples.resize(kMostExamples);
  if (!examples.empty()) out += heading("Examples") + examples_text(examples, screen);
  if (is_whole && !command.notes.description.empty()) out += "\n" + paragraphs(command.notes.description, screen);
  if (!is_whole) {
    const auto n = std::count_if(command.options.begin(), command.options.end(),
                                 [](const OptionText& o) { return !o.is_positional; });
    out +=
        "\n" + paragraphs("reshard " + command.name + " --help shows all " + std::to_string(n) + " options.", screen);
  }
  return out;
}

}  // namespace

std::string option_usage(const OptionText& option) {
  const std::string value = option.value.empty() ? "" : " " + option.value;
  return join(option.names, ", ") + (option.is_positional ? "" : value);
}

std::string option_description(const OptionText& option) {
  std::string out = option.help;
  const OptionHints& hints = option.hints;
  const auto is_said = [&](const std::string& word) { return option.help.find(word) != std::string::npos; };
  if (hints.lists_words && hints.meanings.empty() && !std::all_of(hints.words.begin(), hints.words.end(), is_said))
    out += ": " + join(hints.words, ", ");
  std::vector<std::string> more;
  if (option.repeats && !option.is_positional) more.emplace_back("repeatable");
  if (!option.fallback.empty()) more.push_back("default: " + option.fallback);
  if (!option.environment.empty()) more.push_back("or $" + option.environment);
  return out + (more.empty() ? "" : " (" + join(more, "; ") + ")");
}

std::string usage_text(const CommandText& command) {
  if (command.name.empty()) return "reshard COMMAND [OPTIONS]";
  std::string out = "reshard " + command.name + " [OPTIONS]";
  for (const bool is_positional : {false, true})
    for (const OptionText& option : command.options) {
      if (option.is_positional != is_positional || (!is_positional && !option.is_required)) continue;
      const std::string text = option_usage(option) + (is_positional && option.repeats ? "..." : "");
      out += option.is_required ? " " + text : " [" + text + "]";
    }
  return out;
}

std::string help_text(const Program& program, const std::vector<CommandText>& commands, const std::string& name,
                      bool is_whole) {
  const std::size_t screen = screen_width(kWidthOfFile);
  const auto command =
      std::find_if(commands.begin(), commands.end(), [&](const CommandText& c) { return c.name == name; });
  if (name.empty()) return program_help(program, commands, is_whole, screen);
  return command_help(*command, is_whole, screen);
}

namespace {

Result<int> print_help(const std::string& name) {
  const std::vector<CommandText> commands = describe(program());
  std::vector<std::string> names;
  for (const CommandText& command : commands) names.push_back(command.name);
  if (std::find(names.begin(), names.end(), name) == names.end())
    return see_help("unknown command '" + printable(name) + "'" + near_name(name, names), "");
  std::printf("%s", help_text(program(), commands, name, true).c_str());
  return 0;
}

}  // namespace

void add_help(CommandLine& line) {
  const auto name = std::make_shared<std::string>();
  line.add_option("COMMAND", *name, "Command to explain (default: the program itself)").completes(command_names());
  line.action([name] { return print_help(*name); });
}

}  // namespace reshard::tools
