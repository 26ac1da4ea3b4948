// reshard man: manual pages, made from the table that --help is made from.
#include <algorithm>
#include <cstdio>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

// Text as roff takes it: no line of it is a request.
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

// The value that an option takes: its words, where those are all there are to say.
std::string value_of(const OptionText& option) { return option.value.empty() ? "" : " " + italic(option.value); }

std::string option_of(const OptionText& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.names) names.push_back(bold(name));
  std::string out = ".TP\n" + join(names, ", ") + (option.is_place ? "" : value_of(option)) + "\n" + roff(option.help);
  if (!option.help.ends_with('.')) out += '.';
  const auto is_said = [&](const std::string& word) { return option.help.find(word) != std::string::npos; };
  if (!std::all_of(option.hints.words.begin(), option.hints.words.end(), is_said))
    out += "\nOne of " + roff(join(option.hints.words, ", ")) + ".";
  if (!option.fallback.empty()) out += "\nDefault: " + roff(option.fallback) + ".";
  if (!option.environment.empty()) out += "\nOr in the environment: " + bold(option.environment) + ".";
  if (option.repeats) out += "\nMay be given several times.";
  return out + "\n";
}

// Lines that are indented are shown as they are.
std::string footer_of(const std::string& footer) {
  std::string out;
  bool is_example = false;
  for (const std::string& line : split(footer, '\n')) {
    const bool indented = line.starts_with("  ");
    if (indented != is_example) out += indented ? ".EX\n" : ".EE\n";
    if (!indented) out += ".PP\n";
    out += roff(line) + "\n";
    is_example = indented;
  }
  return out + (is_example ? ".EE\n" : "");
}

std::string page(const std::vector<CommandText>& program, const CommandText& command) {
  const std::string name = command.name.empty() ? "reshard" : "reshard-" + command.name;
  std::string out = ".TH " + upper_case(name) + " 1 \"\" \"reshard " RESHARD_VERSION "\" \"User Commands\"\n";
  out += ".SH NAME\n" + roff(name) + " \\- " + roff(command.summary) + "\n";
  out += ".SH SYNOPSIS\n" + bold(command.name.empty() ? "reshard" : "reshard " + command.name);
  out += command.name.empty() ? " " + italic("COMMAND") + " ..." : " [" + italic("OPTIONS") + "]";
  for (const OptionText& option : command.options)
    if (option.is_place)
      out += " " + (option.is_required ? "" : std::string("[")) + italic(option.names[0]) +
             (option.repeats ? " ..." : "") + (option.is_required ? "" : "]");
  out += "\n";
  if (command.name.empty()) {
    out += ".SH COMMANDS\n";
    for (const CommandText& other : program)
      if (!other.name.empty()) out += ".TP\n" + bold("reshard-" + other.name) + "(1)\n" + roff(other.summary) + ".\n";
  }
  out += ".SH OPTIONS\n";
  for (const bool places : {true, false})
    for (const OptionText& option : command.options)
      if (option.is_place == places) out += option_of(option);
  if (!command.footer.empty()) out += ".SH NOTES\n" + footer_of(command.footer);
  if (!command.name.empty()) out += ".SH SEE ALSO\n" + bold("reshard") + "(1)\n";
  return out;
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
  return usage_error("'" + printable(name) + "' is no command; there are " + join(names, ", "));
}

Result<int> write_pages(const std::string& directory) {
  const std::vector<CommandText> all = describe(program());
  for (const CommandText& command : all)
    TRY(replace_file(path_join(directory, (command.name.empty() ? "reshard" : "reshard-" + command.name) + ".1"),
                     page(all, command), true));
  return 0;
}

}  // namespace

void add_manual(CommandLine& line) {
  auto name = std::make_shared<std::string>();
  auto directory = std::make_shared<std::string>();
  line.add_option("command", *name, "Of which command (default: of reshard itself)");
  line.add_option("--all", *directory, "Write the pages of all commands into this directory").written();
  line.footer(
      "Examples:\n"
      "  reshard man convert | man -l -\n"
      "  reshard man --all ~/.local/share/man/man1");
  line.action([name, directory] { return directory->empty() ? print_page(*name) : write_pages(*directory); });
}

}  // namespace reshard::tools
