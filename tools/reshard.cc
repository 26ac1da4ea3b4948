// reshard: the command table and the exit codes.
#include <csignal>
#include <cstdio>

#include "tools/commands.h"

namespace reshard::tools {
namespace {

struct Command {
  const char* name;
  const char* summary;
  void (*add)(CLI::App& app, Action& action);
};

constexpr Command kCommands[] = {
    {"inspect", "Show what a checkpoint holds: tensors, shapes, placements, mesh, state", add_inspect},
    {"convert", "Write a checkpoint in another format, layout, naming or dtype", add_convert},
    {"plan", "Show what convert would do, without doing it", add_plan},
    {"verify", "Prove a checkpoint: bytes, checksums, exact cover, digests; equal to another", add_verify},
    {"diff", "Compare two checkpoints tensor by tensor", add_diff},
    {"check", "Tell whether a model can be trained on a mesh, and what each rank holds, from its config", add_check},
    {"layout", "Show the layout a checkpoint implies, as a file that convert and verify take", add_layout},
    {"synth", "Write a checkpoint of a real model's shapes with made-up values", add_synth},
};

int run(int argc, char** argv) {
  CLI::App app("Reshard, convert, inspect and verify training checkpoints. No Python, nothing is ever executed.");
  app.set_version_flag("--version", std::string("reshard ") + RESHARD_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  reshard inspect step-1000\n"
      "  reshard convert step-1000 model --to hf\n"
      "  reshard convert step-1000 step-1000-tp2 --to dcp --mesh tp=2,dp_shard=4\n"
      "  reshard verify step-1000 --against model\n"
      "Exit codes: 0 fine, 1 a difference or a finding, 2 usage, 3 corrupt, 4 unsupported, 5 not found or I/O.");
  Action action;
  for (const Command& command : kCommands) command.add(*app.add_subcommand(command.name, command.summary), action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {  // the library's way to say so
    const int code = app.exit(e);
    return code == 0 ? 0 : static_cast<int>(ErrorCode::kUsage);
  }
  const Result<int> result = action();
  if (result) return *result;
  std::fflush(stdout);
  std::fprintf(stderr, "reshard: error: %s\n", result.error().message().c_str());
  return static_cast<int>(result.error().code());
}

}  // namespace
}  // namespace reshard::tools

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on the size of files is then an error like a full disk, not a sudden end
  try {
    return reshard::tools::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "reshard: error: out of memory\n");
    return static_cast<int>(reshard::ErrorCode::kIo);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "reshard: internal error: %s\n", e.what());
    return static_cast<int>(reshard::ErrorCode::kInternal);
  }
}
