// reshard: the command table and the exit codes.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <functional>
#include <iterator>

#include "lib/base/file.h"
#include "lib/base/printable.h"
#include "lib/base/text.h"
#include "tools/commands.h"
#include "tools/confine.h"
#include "tools/job.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

constexpr Command kCommands[] = {
    {"inspect", "Show what a checkpoint holds: tensors, shapes, placements, mesh, state", add_inspect, false, true},
    {"latest", "Name the newest complete checkpoint of a training run", add_latest, false, true},
    {"convert", "Write a checkpoint in another format, layout, naming or dtype", add_convert, true, true},
    {"merge", "Make one checkpoint of several: a mean, a weighted sum, any expression of them", add_merge, true, true},
    {"plan", "Show what convert would do, without doing it", add_plan, false, true},
    {"mount", "Show a checkpoint as a directory of another format, without writing it", add_mount, false, false},
    {"verify", "Prove a checkpoint: bytes, checksums, exact cover, digests; equal to another", add_verify, true, true},
    {"diff", "Compare two checkpoints tensor by tensor", add_diff, true, true},
    {"check", "Tell whether a model can be trained on a mesh, and what each rank holds, from its config", add_check,
     false, true},
    {"layout", "Show the layout a checkpoint implies, as a file that convert and verify take", add_layout, false, true},
    {"synth", "Write a checkpoint of a real model's shapes with made-up values", add_synth, false, true},
    {"completions", "Print what a shell needs to complete the words of a line", add_completions, false, true},
    {"man", "Print the manual page of a command", add_manual, false, false},
};

double patience = JobOptions().patience;
bool no_sandbox = false;

void add_common(CommandLine& line) {
  line.add_option("--rank-timeout", patience,
                  "Of ranks started by mpirun: seconds without a sign of life of one of them")
      .within_real(1.0, 1e6)
      .shows_default();
  line.add_flag("--no-sandbox", no_sandbox, "Do not give up what the command does not need (docs/security.md)");
  line.footer(
      "Examples:\n"
      "  reshard inspect step-1000\n"
      "  reshard convert step-1000 model --to hf\n"
      "  reshard convert step-1000 step-1000-tp2 --to dcp --mesh tp=2,dp_shard=4\n"
      "  reshard verify step-1000 --against model\n"
      "  mpirun -n 8 reshard convert step-1000 model --to hf      on many nodes: docs/cluster.md\n"
      "Exit codes: 0 fine, 1 a difference or a finding, 2 usage, 3 corrupt, 4 unsupported, 5 not found or I/O,\n"
      "6 a rank of several failed.");
}

thread_local Host* current_host = nullptr;

bool uses_gpu(const ParsedLine& line) {
  const auto given = line.values.find("--device");
  return given != line.values.end() && given->second.back() != "cpu";
}

Result<int> run(int argc, char** argv, bool owns_process) {
  const ParsedLine parsed = parse_command_line(argc, argv, program());
  if (parsed.error) return *parsed.error;
  if (!parsed.command) return parsed.exit_code;
  // Ranks need sockets, and a GPU's driver its devices.
  const bool is_alone = how_launched(process_environment) == Launch::kAlone;
  if (owns_process && parsed.command->is_confined && is_alone && !no_sandbox && !uses_gpu(parsed))
    TRY(confine_to(parsed));
  return run_in_job(sparing_inputs(parsed.action, parsed.paths), parsed.of_all_ranks, parsed.command->on_all_ranks,
                    patience);
}

// A descriptor that the caller closed would be that of the next file to be opened.
void open_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) (void)::open("/dev/null", O_RDWR);
}

// Whether --json is among the options, right or wrong as the rest of them may be.
bool asks_for_json(int argc, char** argv) {
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i)
    if (std::string_view(argv[i]) == "--json") return true;
  return false;
}

// Whether all that was printed arrived, or its reader (`| head`) wanted no more of it.
bool was_printed() {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return true;
  pollfd end = {STDOUT_FILENO, POLLOUT, 0};
  return ::poll(&end, 1, 0) == 1 && (end.revents & POLLERR) != 0;
}

}  // namespace

const Program& program() {
  static const Program it = {
      "Reshard, convert, inspect and verify training checkpoints. No Python, nothing is ever executed.", kCommands,
      add_common, version_text};
  return it;
}

Environment process_environment_of_commands() {
  Environment out;
  for (const char* name : {"RESHARD_MEMORY", "TMPDIR"})
    if (const char* value = process_environment(name)) out.emplace(name, value);
  return out;
}

std::string environment_variable(const std::string& name) {
  const Environment all = host() ? host()->environment : process_environment_of_commands();
  const auto found = all.find(name);
  return found == all.end() ? "" : found->second;
}

Host* host() { return current_host; }
HostScope::HostScope(Host& caller) : before_(current_host) { current_host = &caller; }
HostScope::~HostScope() { current_host = before_; }

Result<int> run_for(Host& caller, const std::string& command, const std::vector<std::string>& words) {
  const auto* row =
      std::find_if(std::begin(kCommands), std::end(kCommands), [&](const Command& c) { return c.name == command; });
  if (row == std::end(kCommands)) return usage_error("'" + printable(command) + "' is no command");
  const HostScope scope(caller);
  const ParsedOptions parsed = TRY(parse_options(words, row->add));
  return without_exceptions(sparing_inputs(parsed.action, parsed.paths));
}

int run_program(int argc, char** argv, bool owns_process) {
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on the size of files is then an error like a full disk, not a sudden end
  std::signal(SIGPIPE, SIG_IGN);  // a conversion goes on when nobody reads what it says
  open_standard_descriptors();
  if (owns_process) raise_descriptor_limit();
  set_json_errors(asks_for_json(argc, argv));
  const auto work = [&]() -> Result<int> { return run(argc, argv, owns_process); };
  const auto code = without_exceptions(std::cref(work));  // by reference: a copy would need memory
  const int exit_code = code ? *code : report_error(code.error());
  if (was_printed()) return exit_code;
  std::fprintf(stderr, "reshard: error: standard output: cannot write all of it\n");
  return exit_code > 1 ? exit_code : static_cast<int>(ErrorCode::kIo);
}

}  // namespace reshard::tools
