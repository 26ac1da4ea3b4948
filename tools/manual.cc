// SPDX-License-Identifier: Apache-2.0
// reshard man: manual pages, made from the texts of --help.
#include <algorithm>
#include <cstdio>

#include "lib/base/choices.h"
#include "lib/base/file.h"
#include "lib/base/text.h"
#include "tools/commands.h"
#include "tools/help.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

// Escapes text for roff, so that no line of it is a request.
std::string roff(std::string_view text) {
  std::string out;
  bool is_line_start = true;
  for (const char c : text) {
    if (is_line_start && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
    is_line_start = c == '\n';
  }
  return out;
}

std::string bold(std::string_view text) { return "\\fB" + roff(text) + "\\fR"; }
std::string italic(std::string_view text) { return "\\fI" + roff(text) + "\\fR"; }

std::string upper_case(std::string text) {
  for (char& c : text)
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  return text;
}

std::string sentence(std::string_view text) { return roff(text) + (text.ends_with('.') ? "" : ".") + "\n"; }

std::string option_of(const OptionText& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.names) names.push_back(bold(name));
  std::string out = ".TP\n" + join(names, ", ");
  if (!option.is_positional && !option.value.empty()) out += " " + italic(option.value);
  out += "\n" + sentence(option_description(option));
  if (option.hints.lists_words)
    for (std::size_t i = 0; i < option.hints.meanings.size(); ++i)
      out += ".br\n" + bold(option.hints.words[i]) + ": " + sentence(option.hints.meanings[i]);
  return out;
}

// Options under a heading for each group, in the order of their declaration.
std::string options_of(const CommandText& command) {
  std::string out;
  for (const OptionText& option : command.options)
    if (option.is_positional) out += option_of(option);
  std::vector<std::string> groups;
  for (const OptionText& option : command.options)
    if (!option.is_positional && std::find(groups.begin(), groups.end(), option.group) == groups.end())
      groups.push_back(option.group);
  for (const std::string& group : groups) {
    out += ".SS " + roff(group) + "\n";
    for (const OptionText& option : command.options)
      if (!option.is_positional && option.group == group) out += option_of(option);
  }
  return out;
}

std::string rows_of(const char* title, const std::vector<TextRow>& rows) {
  std::string out = std::string(".SH ") + title + "\n";
  for (const TextRow& row : rows) out += ".TP\n" + bold(row.name) + "\n" + sentence(row.text);
  return out;
}

std::string examples_of(const std::vector<Example>& examples) {
  std::string out = ".SH EXAMPLES\n";
  for (const Example& e : examples)
    out += ".PP\n" + (e.comment.empty() ? "" : roff(e.comment) + "\n") + ".EX\n  " + roff(e.line) + "\n.EE\n";
  return out;
}

std::string synopsis_of(const CommandText& command) {
  const std::string usage = usage_text(command), name = command.name.empty() ? "reshard" : "reshard " + command.name;
  return ".SH SYNOPSIS\n" + bold(name) + roff(usage.substr(name.size())) + "\n";
}

std::string description_of(const std::vector<CommandText>& all, const CommandText& command) {
  std::string out = ".SH DESCRIPTION\n" + sentence(command.summary);
  for (const std::string& paragraph : split(command.notes.description, '\n'))
    if (!paragraph.empty()) out += ".PP\n" + roff(paragraph) + "\n";
  if (!command.name.empty()) return out;
  out += ".PP\nNo Python is needed, and nothing that a checkpoint contains is executed.\n.SH COMMANDS\n";
  for (const CommandText& other : all)
    if (!other.name.empty()) out += ".TP\n" + bold("reshard-" + other.name) + "(1)\n" + sentence(other.summary);
  return out;
}

std::string page(const std::vector<CommandText>& all, const CommandText& command) {
  const std::string name = command.name.empty() ? "reshard" : "reshard-" + command.name;
  std::string out = ".TH " + upper_case(name) + " 1 \"\" \"reshard " RESHARD_VERSION "\" \"User Commands\"\n";
  out += ".SH NAME\n" + roff(name) + " \\- " + roff(command.summary) + "\n";
  out += synopsis_of(command) + description_of(all, command) + ".SH OPTIONS\n" + options_of(command);
  if (!command.notes.examples.empty()) out += examples_of(command.notes.examples);
  out += rows_of("EXIT STATUS", program().exit_codes) + rows_of("ENVIRONMENT", program().environment);
  out += rows_of("FILES", program().files) + ".SH SEE ALSO\n";
  return out + (command.name.empty() ? bold("reshard-help") : bold("reshard")) + "(1)\n";
}

Result<int> print_page(const std::string& name) {
  const std::vector<CommandText> all = describe(program());
  std::vector<std::string> names;
  for (const CommandText& command : all) {
    if (command.name == name) {
      std::printf("%s", page(all, command).c_str());
      return 0;
    }
    if (!command.name.empty()) names.push_back(command.name);
  }
  return see_help("unknown command '" + printable(name) + "'" + near_name(name, names), "");
}

Result<int> write_pages(const std::string& directory) {
  const std::vector<CommandText> all = describe(program());
  for (const CommandText& command : all)
    TRY(replace_report(path_join(directory, (command.name.empty() ? "reshard" : "reshard-" + command.name) + ".1"),
                       kManualPage, page(all, command)));
  return 0;
}

}  // namespace

void add_manual(CommandLine& line) {
  auto name = std::make_shared<std::string>();
  auto directory = std::make_shared<std::string>();
  line.add_option("COMMAND", *name, "Command to describe (default: the program itself)").completes(command_names());
  line.add_option("--all", *directory, "Write the pages of all commands to this directory").written().takes("DIR");
  line.examples({{"reshard man convert | man -l -", ""}, {"reshard man --all ~/.local/share/man/man1", ""}});
  line.action([name, directory] { return directory->empty() ? print_page(*name) : write_pages(*directory); });
}

}  // namespace reshard::tools
