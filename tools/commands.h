// SPDX-License-Identifier: Apache-2.0
// The subcommands. Each has a file that turns options into one call of the library and the result into text. reshard.cc
// has the table.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/json_list.h"
#include "lib/base/result.h"
#include "lib/layout/box.h"
#include "tools/command_line.h"
#include "tools/host.h"

namespace reshard::tools {

// Runs the program and returns its exit code. `owns_process`: confines the process to what the command needs
// (confine.h).
int run_program(int argc, char** argv, bool owns_process = false);

// Runs a command with these words ("step-1000", "--json") in this thread and returns its exit code. Prints nothing if
// --json or --quiet is among them.
Result<int> run_for(Host& caller, const std::string& command, const std::vector<std::string>& words);

// Each adds the options and the action of a subcommand.
void add_inspect(CommandLine& line);
void add_latest(CommandLine& line);
void add_convert(CommandLine& line);
void add_plan(CommandLine& line);
void add_merge(CommandLine& line);
void add_delta(CommandLine& line);
void add_patch(CommandLine& line);
void add_watch(CommandLine& line);
void add_mount(CommandLine& line);
void add_verify(CommandLine& line);
void add_diff(CommandLine& line);
void add_check(CommandLine& line);
void add_layout(CommandLine& line);
void add_synth(CommandLine& line);
void add_families(CommandLine& line);
void add_family(CommandLine& line);
void add_doctor(CommandLine& line);
void add_completions(CommandLine& line);
void add_manual(CommandLine& line);

// The program's command line (reshard.cc), which help texts, completions and manual pages describe.
const Program& program();
std::vector<std::string> command_names();
std::string version_text(bool json);

// ---- shared by subcommands (terminal.cc)

// Returns whether standard output is a terminal that shows color: NO_COLOR is not set and TERM is not dumb.
bool stdout_has_color();
bool stdout_is_terminal();
bool stderr_is_terminal();

// Prints a label in a column of fixed width, then text: "plan      DCP tp=8 -> ...".
void print_row(std::string_view label, std::string_view text);

Json dims_json(const Dims& dims);
template <class Texts>
Json texts_json(const Texts& texts) {
  Json out = Json::array();
  for (const auto& text : texts) out.push_back(std::string(text));
  return out;
}

// The beginning of what --json of a command prints: {"schema": "reshard.verify/1"}. The number grows when a member
// changes its meaning or is taken away.
Json answer_json(std::string_view command);
// Prints the result of --json, one value per line up to this depth.
void show_json(const Json& json, int depth);
// Prints an object with one more member: a list that is generated item by item.
void show_json(const Json& object, const JsonList& list, int depth);

// Returns the columns of the terminal that standard output is, from 60 to 200, or $COLUMNS; `otherwise` for a file.
std::size_t screen_width(std::size_t otherwise = 120);
// Returns the text in a color (an SGR parameter, "32") if standard output shows color.
std::string colored(std::string_view text, const char* code);
// Reports an error of the program: on standard error, and for --json, unless an answer was printed already, as an
// object on standard output too. `rank`: "[3]" of several ranks, or empty. Returns the exit code.
int report_error(const Error& error, const std::string& rank = {});
// Says that the command line asks for JSON.
void set_json_errors(bool are_wanted);
// Returns the columns of UTF-8 text, and printable text padded with spaces to a width.
std::size_t width_of(std::string_view text);
std::string padded(std::string_view raw, std::size_t width);
// Breaks text between words into lines of at most `screen` columns. The first line begins in column `start`, the
// others are indented.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t start, std::size_t screen);
// Does the same for the width of the screen. The first line begins in the larger of the two columns.
std::string in_column(std::string_view text, std::size_t indent, std::size_t start = 0);

// Shows progress: a bar with bytes/s and the remaining time on a terminal, otherwise a line every ten seconds; nothing
// if quiet. Counts bytes from 0 to `total` over all ranks. Thread-safe.
class Progress {
 public:
  Progress(std::string label, Index total, bool quiet);
  ~Progress();              // clears the line
  void update(Index done);  // by this rank

 private:
  void show(Index done);
  struct State;
  std::unique_ptr<State> state_;
};

// Returns the peak resident memory of this process so far, bytes.
Index peak_memory();

// Set when the program is interrupted (Ctrl-C, SIGTERM) or the terminal is closed (SIGHUP).
const std::atomic<bool>& interrupted();
// Returns the signal that interrupted the program; 0: none.
int ending_signal();
// From now on the process ends within five seconds after a signal, whatever it is doing. `can_resume`: the same command
// then resumes.
void end_soon_after_signal(bool can_resume);

}  // namespace reshard::tools
