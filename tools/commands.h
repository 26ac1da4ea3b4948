// The subcommands. Each lives in a file of its own that turns options into one call of the library and its result into
// text; reshard.cc holds the table.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/json_list.h"
#include "lib/base/result.h"
#include "lib/layout/box.h"
#include "tools/command_line.h"

namespace reshard {
class Device;
}

namespace reshard::tools {

// The whole program: parses its command line, and gives its exit code. Where the process is its own, it gives up first
// what a command does not need (confine.h).
int run_program(int argc, char** argv, bool owns_process = false);

// The environment variables that commands look at, with their values.
using Environment = std::map<std::string, std::string>;
// Those of the process. No other thread may change the environment meanwhile: within Python, the caller has the GIL.
Environment process_environment_of_commands();
// One of the host's, or of the process in the program; empty if it is not set.
std::string environment_variable(const std::string& name);

// Who calls the commands from within another program (tools/python) and takes what they would print.
struct Host {
  Index resident = 0;       // bytes that the process holds without the command: --memory is beside them
  Environment environment;  // as it was when the call began: other threads may change the process's
  const std::atomic<bool>* interrupt = nullptr;                      // ends a command when set
  std::function<void(Index done, Index total)> progress;             // bytes; called from any thread
  std::function<Result<Device*>(const std::string&, Index)> device;  // by name and cap (open_device); the host's
  std::string answer;                                                // the JSON of --json
};
// Runs a command with these options ("step-1000", "--json") in this thread, and gives its exit code. Prints nothing
// where --json or --quiet is among them.
Result<int> run_for(Host& caller, const std::string& command, const std::vector<std::string>& words);
// The host of what runs in this thread; null in the program.
Host* host();
// Makes one that of this thread, until the scope ends.
class HostScope {
 public:
  explicit HostScope(Host& caller);
  ~HostScope();
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;

 private:
  Host* before_;
};

// Each adds a subcommand's options and what it does.
void add_inspect(CommandLine& line);
void add_latest(CommandLine& line);
void add_convert(CommandLine& line);
void add_plan(CommandLine& line);
void add_merge(CommandLine& line);
void add_mount(CommandLine& line);
void add_verify(CommandLine& line);
void add_diff(CommandLine& line);
void add_check(CommandLine& line);
void add_layout(CommandLine& line);
void add_synth(CommandLine& line);
void add_families(CommandLine& line);
void add_doctor(CommandLine& line);
void add_completions(CommandLine& line);
void add_manual(CommandLine& line);

// The program's command line (reshard.cc), which help texts, completions and manual pages describe.
const Program& program();
std::vector<std::string> command_names();
std::string version_text(bool json);

// ---- what they share (terminal.cc)

// Whether standard output shows colour and redraws lines: a terminal, and NO_COLOR is not set.
bool fancy_stdout();
bool stderr_is_terminal();

// "conclusion first" lines: a left column of fixed width, then text.  plan      DCP tp=8 -> ...
void print_row(std::string_view label, std::string_view text);

Json dims_json(const Dims& dims);  // a list of its numbers

// The beginning of what --json of a command prints: {"schema": "reshard.verify/1"}. The number grows when a member
// changes its meaning or is taken away.
Json answer_json(std::string_view command);
// What --json prints, one value a line up to this depth.
void show_json(const Json& json, int depth);
// The object with the list as one more member, which is made item by item.
void show_json(const Json& object, const JsonList& list, int depth);

// Returns the columns of the terminal that standard output is, from 60 to 200, or $COLUMNS; `otherwise` for a file.
std::size_t screen_width(std::size_t otherwise = 120);
// The text in a colour (of an SGR sequence, "32") where standard output shows any.
std::string colored(std::string_view text, const char* code);
// Reports an error of the program: on standard error, and for --json, unless an answer was printed already, as an
// object on standard output too. `rank`: "[3]" of several ranks, or empty. Returns the exit code.
int report_error(const Error& error, const std::string& rank = {});
// Says that the command line asks for JSON.
void set_json_errors(bool are_wanted);
// Columns that UTF-8 text takes, and text filled up with spaces to so many.
std::size_t width_of(std::string_view text);
std::string padded(std::string_view raw, std::size_t width);
// Breaks text between words into lines of at most `screen` columns. The first line begins in column `start`, the
// others are indented.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t start, std::size_t screen);
// The same as wide as the screen; the first line begins at the indent, or later.
std::string in_column(std::string_view text, std::size_t indent, std::size_t start = 0);

// A progress bar with bytes/s and time left on a terminal; a plain line every ten seconds elsewhere; nothing if quiet.
// Counts bytes from 0 to `total`, of all ranks together. Thread-safe.
class Progress {
 public:
  Progress(std::string label, Index total, bool quiet);
  ~Progress();              // leaves the line
  void update(Index done);  // by this rank

 private:
  void show(Index done);
  struct State;
  std::unique_ptr<State> state_;
};

// The peak resident memory of this process so far, bytes.
Index peak_memory();

// Set when the user interrupts the program (Ctrl-C, SIGTERM), or the terminal is gone (SIGHUP).
const std::atomic<bool>& interrupted();
// The signal that did; 0: none yet.
int ending_signal();
// From now on the process ends within five seconds of it, whatever it is doing.
void end_soon_after_signal();

}  // namespace reshard::tools
