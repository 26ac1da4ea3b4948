// SPDX-License-Identifier: Apache-2.0
// reshard: the table of commands, and the program's main function.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <functional>
#include <iterator>

#include "lib/base/catch_exceptions.h"
#include "lib/base/file.h"
#include "lib/base/printable.h"
#include "lib/base/text.h"
#include "tools/commands.h"
#include "tools/confine.h"
#include "tools/help.h"
#include "tools/job.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

constexpr Command kCommands[] = {
    {"inspect", "Read", "Show what a checkpoint contains: tensors, mesh, training state", add_inspect, false, true},
    {"latest", "Read", "Print the newest complete checkpoint of a run", add_latest, false, true},
    {"diff", "Read", "Compare two checkpoints tensor by tensor", add_diff, true, true},
    {"layout", "Read", "Show how a checkpoint is sharded", add_layout, false, true},
    {"convert", "Write", "Write a checkpoint in another format, layout, naming or dtype", add_convert, true, true},
    {"merge", "Write", "Merge several checkpoints: an average, a sum, any formula", add_merge, true, true},
    {"delta", "Write", "Write what changed between two checkpoints of a model", add_delta, true, true},
    {"patch", "Write", "Apply deltas to a checkpoint", add_patch, true, true},
    {"watch", "Write", "Convert each new step of a training run", add_watch, false, false},
    {"mount", "Write", "Mount a checkpoint in another format without writing it", add_mount, false, false},
    {"synth", "Write", "Write a synthetic checkpoint with the shapes of a model", add_synth, false, true},
    {"verify", "Check", "Verify a checkpoint: bytes, shapes, mesh, or against another", add_verify, true, true},
    {"check", "Check", "Check whether a model fits a mesh, and estimate its memory", add_check, false, true},
    {"plan", "Check", "Show what convert would do, without doing it", add_plan, false, true},
    {"doctor", "Other", "Report what this build and this machine can do", add_doctor, false, false},
    {"families", "Other", "List the supported model families", add_families, false, true},
    {"family", "Other", "Describe your own model class in a table for --family-file", add_family, false, false},
    {"completions", "Other", "Print the completion script of a shell", add_completions, false, true},
    {"man", "Other", "Print the manual page of a command", add_manual, false, false},
    {"help", "Other", "Show all options of a command", add_help, false, true},
};

const std::vector<TextRow> kExitCodes = {
    {"0", "Success"},
    {"1", "There are findings (verify, check, doctor) or differences (diff)"},
    {"2", "Wrong usage"},
    {"3", "Corrupt: the bytes contradict the format, each other or the config"},
    {"4", "Unsupported"},
    {"5", "Not found, or an I/O error"},
    {"6", "A rank of a distributed run failed"},
    {"70", "A bug in reshard"},
    {"128+N", "Ended by signal N"},
};
const std::vector<TextRow> kEnvironment = {
    {"RESHARD_MEMORY", "Default of --memory"},
    {"TMPDIR", "Directory for temporary files (default: /tmp)"},
    {"NO_COLOR", "If set, disables color"},
    {"COLUMNS", "Width of the output (default: the terminal's)"},
    {"AWS_*", "Keys, profile, region and endpoint of s3://: AWS_PROFILE, AWS_REGION, ..."},
    {"GOOGLE_*, GS_*", "Credentials of gs://: GOOGLE_APPLICATION_CREDENTIALS, ..."},
    {"STORAGE_EMULATOR_HOST", "Emulator of gs://"},
    {"HF_TOKEN, HF_ENDPOINT", "Token and server of hf://"},
    {"AWS_CA_BUNDLE, CURL_CA_BUNDLE, SSL_CERT_FILE", "Certificates for URLs (default: the system's)"},
    {"https_proxy, no_proxy", "Proxies of URLs"},
    {"RESHARD_HTTP_TRIES", "Attempts per request to a URL (default: 6)"},
    {"RESHARD_HTTP_TIMEOUT", "Seconds after which a stalled request is retried (default: 30)"},
};
const std::vector<TextRow> kFiles = {
    {"config.json", "The model's configuration, read from the checkpoint's directory or its parent"},
    {"reshard_manifest.json", "In every output: a digest of each tensor and how the output was made"},
    {"DST.partial", "The output of a run that has not finished, with a journal to resume from"},
};

double patience = JobOptions().patience;
bool no_sandbox = false;

void add_common(CommandLine& line) {
  line.add_option("--rank-timeout", patience, "Seconds to wait for an unresponsive MPI rank")
      .takes("SECONDS")
      .within_real(1.0, 1e6)
      .shows_default()
      .only_for(&Command::on_all_ranks);
  line.add_flag("--no-sandbox", no_sandbox, "Do not confine the process (see docs/security.md)")
      .only_for(&Command::is_confined);
  line.examples({{"reshard inspect step-1000", ""},
                 {"reshard convert step-1000 model --to hf", ""},
                 {"reshard convert step-1000 out --to dcp --mesh tp=2,dp_shard=4", ""},
                 {"reshard verify step-1000 --against model", ""},
                 {"mpirun -n 8 reshard convert step-1000 model --to hf", "on many machines: docs/cluster.md"}});
}

std::vector<std::string> words_of(int argc, char** argv) {
  std::vector<std::string> out = {"reshard"};
  out.insert(out.end(), argv + 1, argv + argc);
  return out;
}

bool uses_gpu(const ParsedLine& line) {
  const auto given = line.values.find("--device");
  return given != line.values.end() && given->second.back() != "cpu";
}

Result<int> run(int argc, char** argv, bool owns_process) {
  if (argc < 2) {
    std::fputs(help_text(program(), describe(program()), "", false).c_str(), stderr);
    return static_cast<int>(ErrorCode::kUsage);
  }
  const ParsedLine parsed = parse_command_line(argc, argv, program());
  set_command_text(words_of(argc, argv));
  if (parsed.error) return *parsed.error;
  if (!parsed.command) return parsed.exit_code;
  // Ranks need sockets and a GPU driver needs its devices, so these are not confined.
  const Action action = checking_paths(parsed.action, parsed.paths);
  const bool is_alone = detect_launch(process_environment) == Launch::kAlone;
  if (owns_process && parsed.command->is_confined && is_alone && !no_sandbox && !uses_gpu(parsed))
    TRY(confine_to(parsed));
  return run_in_job(action, parsed.of_all_ranks, parsed.command->on_all_ranks, patience);
}

// Opens standard descriptors that the caller closed, so that no other file gets their numbers.
void open_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) (void)::open("/dev/null", O_RDWR);
}

// Returns whether --json is among the words, even if others are wrong.
bool asks_for_json(int argc, char** argv) {
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i)
    if (std::string_view(argv[i]) == "--json") return true;
  return false;
}

// Returns whether all output was written, or its reader (`| head`) has closed the pipe.
bool was_printed() {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return true;
  pollfd end = {STDOUT_FILENO, POLLOUT, 0};
  return ::poll(&end, 1, 0) == 1 && (end.revents & POLLERR) != 0;
}

}  // namespace

const Program& program() {
  static const Program it = {"Reshard, convert, inspect and verify training checkpoints",
                             kCommands,
                             add_common,
                             version_text,
                             help_text,
                             kExitCodes,
                             kEnvironment,
                             kFiles};
  return it;
}

std::vector<std::string> command_names() {
  std::vector<std::string> out;
  for (const Command& command : kCommands) out.emplace_back(command.name);
  return out;
}

Result<int> run_for(Host& caller, const std::string& command, const std::vector<std::string>& words) {
  const auto* row =
      std::find_if(std::begin(kCommands), std::end(kCommands), [&](const Command& c) { return c.name == command; });
  if (row == std::end(kCommands)) return usage_error("unknown command '" + printable(command) + "'");
  const HostScope scope(caller);
  std::vector<std::string> all = {"reshard", command};
  all.insert(all.end(), words.begin(), words.end());
  set_command_text(all);
  const ParsedOptions parsed = TRY(parse_options(words, row->add));
  return catch_exceptions(checking_paths(parsed.action, parsed.paths));
}

int run_program(int argc, char** argv, bool owns_process) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is then an error like a full disk
  std::signal(SIGPIPE, SIG_IGN);  // a conversion continues when nobody reads its output
  open_standard_descriptors();
  if (owns_process) raise_descriptor_limit();
  set_json_errors(asks_for_json(argc, argv));
  const auto work = [&]() -> Result<int> { return run(argc, argv, owns_process); };
  const auto code = catch_exceptions(std::cref(work));  // by reference: a copy may need memory
  const int exit_code = code ? *code : report_error(code.error());
  if (was_printed()) return exit_code;
  std::fprintf(stderr, "reshard: error: standard output: cannot write all of it\n");
  return exit_code > 1 ? exit_code : static_cast<int>(ErrorCode::kIo);
}

}  // namespace reshard::tools
