// SPDX-License-Identifier: Apache-2.0
// reshard completions: scripts that complete a command line, made from the texts of --help.
#include <algorithm>
#include <cstdio>

#include "formats/open.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

// Shortens a help text to what fits next to a word in a list of completions.
std::string in_short(const std::string& help) {
  constexpr std::size_t kMost = 72;
  std::string out = help.substr(0, std::min({help.find(" ("), help.find(": "), help.find("; ")}));
  if (out.size() <= kMost) return out;
  return out.substr(0, out.rfind(' ', kMost)) + " ...";
}

std::string with_escapes(const std::string& text, std::string_view special) {
  std::string out;
  for (const char c : text) {
    if (special.find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

// Quotes text as one word of a shell.
std::string in_quotes(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::string names_of(const CommandText& command) {
  std::vector<std::string> names;
  for (const OptionText& option : command.options)
    if (!option.is_positional) names.insert(names.end(), option.names.begin(), option.names.end());
  return join(names, " ");
}

// Returns the values of a command's first positional argument, if they are known: "bash zsh fish".
std::string words_of_positional(const CommandText& command) {
  for (const OptionText& option : command.options)
    if (option.is_positional) return join(option.hints.words, " ");
  return "";
}

std::string bash(const std::vector<CommandText>& program) {
  std::vector<std::string> commands;
  std::string cases;
  for (const CommandText& command : program) {
    if (!command.name.empty()) commands.push_back(command.name);
    std::string values;
    for (const OptionText& option : command.options) {
      if (option.is_positional) continue;
      const std::string words = option.hints.tensors         ? "is_tensor=1"
                                : option.hints.words.empty() ? ""
                                                             : "words=" + in_quotes(join(option.hints.words, " "));
      if (!words.empty()) values += "      " + join(option.names, "|") + ") " + words + " ;;\n";
    }
    cases += "  " + in_quotes(command.name) + ")\n    options=" + in_quotes(names_of(command)) + "\n";
    if (!values.empty()) cases += "    case $before in\n" + values + "    esac\n";
    if (const std::string words = words_of_positional(command); !words.empty())
      cases += "    [[ -z $words && $current != -* && $before == " + command.name + " ]] && words=" + in_quotes(words) +
               "\n";
    cases += "    ;;\n";
  }
  return R"(# Completes command lines of reshard in bash. Installed as
# ~/.local/share/bash-completion/completions/reshard
_reshard() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= options= words= word is_tensor= checkpoint=
  [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}
  [[ $current == = ]] && current=
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case $word in )" +
         join(commands, "|") + R"() command=$word; break ;; esac
  done
  case $command in
)" + cases +
         R"(  esac
  [[ -z $command && -z $words ]] && options+=" )" +
         join(commands, " ") + R"("
  COMPREPLY=()
  if [[ -n $is_tensor ]]; then
    # Tensor names are untrusted: no part of them may be run or expanded.
    for word in "${COMP_WORDS[@]:2:COMP_CWORD-2}"; do
      [[ -e $word ]] && { checkpoint=$word; break; }
    done
    [[ -n $checkpoint ]] && while IFS= read -r word; do
      [[ $current == [\'\"]* ]] || printf -v word %q "$word"
      [[ $word == "${current#[\'\"]}"* ]] && COMPREPLY+=("$word")
    done < <("${COMP_WORDS[0]}" completions --tensors "$checkpoint" 2> /dev/null)
  elif [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  elif [[ $current == -* || -z $command ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  fi
}
complete -o bashdefault -o default -F _reshard reshard
)";
}

std::string zsh(const std::vector<CommandText>& program) {
  std::string commands, cases;
  for (std::size_t i = 1; i < program.size(); ++i) {
    const CommandText& command = program[i];
    commands += "    " + in_quotes(command.name + ":" + command.summary) + "\n";
    cases += "  " + command.name + ")\n    _arguments -S";
    for (const OptionText& option : command.options) {
      if (option.is_positional) continue;
      for (const std::string& name : option.names) {
        std::string spec = (option.repeats ? "*" : "") + name;
        if (!option.value.empty() && name.starts_with("--")) spec += "=";
        spec += "[" + with_escapes(in_short(option.help), "[]:\\") + "]";
        if (!option.value.empty()) {
          const std::string words = join(option.hints.words, " ");
          spec += ":" + option.value + ":" +
                  (option.hints.tensors ? "_reshard_tensors"
                   : words.empty()      ? "_files"
                                        : "(" + words + ")");
        }
        cases += " \\\n      " + in_quotes(spec);
      }
    }
    const std::string words = words_of_positional(command);
    cases += " \\\n      " + in_quotes(words.empty() ? "*:checkpoint:_files" : "*:word:(" + words + ")") + " ;;\n";
  }
  return R"zsh(#compdef reshard
# Completes command lines of reshard in zsh. Installed as _reshard in a directory of $fpath.
_reshard_tensors() {
  local word
  for word in $words[2,-1]; do
    [[ -e $word ]] || continue
    compadd -- ${(f)"$(reshard completions --tensors $word 2> /dev/null)"}
    return
  done
}
local -a commands
if (( CURRENT == 2 )); then
  commands=(
)zsh" + commands +
         R"(  )
  _describe command commands
  return
fi
shift words
(( CURRENT-- ))
case $words[1] in
)" + cases +
         "esac\n";
}

std::string fish(const std::vector<CommandText>& program) {
  std::string out =
      "# Completes command lines of reshard in fish. Installed as\n"
      "# ~/.config/fish/completions/reshard.fish\n"
      "function __reshard_tensors\n"
      "    for word in (commandline -opc)[3..-1]\n"
      "        if test -e $word\n"
      "            reshard completions --tensors $word 2>/dev/null\n"
      "            return\n"
      "        end\n"
      "    end\n"
      "end\n";
  for (const CommandText& command : program) {
    const std::string where =
        command.name.empty() ? "__fish_use_subcommand" : "__fish_seen_subcommand_from " + command.name;
    if (!command.name.empty())
      out += "complete -c reshard -n __fish_use_subcommand -x -a " + in_quotes(command.name) + " -d " +
             in_quotes(command.summary) + "\n";
    if (const std::string words = words_of_positional(command); !words.empty())
      out += "complete -c reshard -n " + in_quotes(where) + " -x -a " + in_quotes(words) + "\n";
    for (const OptionText& option : command.options) {
      if (option.is_positional) continue;
      out += "complete -c reshard -n " + in_quotes(where);
      for (const std::string& name : option.names)
        out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (!option.value.empty())
        out += option.hints.tensors         ? " -x -a '(__reshard_tensors)'"
               : option.hints.words.empty() ? " -r"
                                            : " -x -a " + in_quotes(join(option.hints.words, " "));
      out += " -d " + in_quotes(in_short(option.help)) + "\n";
    }
  }
  return out;
}

// Whether a shell accepts the name as it is, between quotes or with its special characters escaped.
bool is_plain(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return c > ' ' && c < 127 && std::string_view("'\"\\$`!").find(c) == std::string_view::npos;
  });
}

Result<int> print_tensors(const std::string& path) {
  const OpenCheckpoint open = TRY(open_checkpoint(path, {.files_too = false}));
  std::vector<std::string> names;
  for (const Tensor& t : open.reader->catalog().tensors()) names.push_back(t.name);
  for (const Blob& b : open.reader->catalog().blobs) names.push_back(b.name);
  for (const std::string& name : fold_names(names))
    if (is_plain(name)) std::printf("%s\n", name.c_str());
  return 0;
}

}  // namespace

void add_completions(CommandLine& line) {
  auto shell = std::make_shared<std::string>();
  auto checkpoint = std::make_shared<std::string>();
  line.add_option("SHELL", *shell, "Shell to complete for").one_of({"bash", "zsh", "fish"});
  line.add_option("--tensors", *checkpoint, "Print the tensor names of a checkpoint as globs for --include").read();
  line.examples({{"source <(reshard completions bash)", "in this shell"},
                 {"reshard completions zsh > ~/.zfunc/_reshard", "with ~/.zfunc in $fpath"},
                 {"reshard completions fish > ~/.config/fish/completions/reshard.fish", ""}});
  line.action([shell, checkpoint]() -> Result<int> {
    if (!checkpoint->empty()) return print_tensors(*checkpoint);
    if (shell->empty()) return usage_error("expected SHELL: bash, zsh or fish");
    const std::vector<CommandText> all = describe(program());
    std::printf("%s", (*shell == "bash" ? bash(all) : *shell == "zsh" ? zsh(all) : fish(all)).c_str());
    return 0;
  });
}

}  // namespace reshard::tools
