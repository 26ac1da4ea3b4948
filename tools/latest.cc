// SPDX-License-Identifier: Apache-2.0
// reshard latest: the checkpoint of a training run to resume from.
#include <cstdio>
#include <map>

#include "formats/open.h"
#include "formats/training_run.h"
#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

// A checkpoint of the run, and why it is incomplete; empty if it is complete.
struct CheckpointState {
  std::string path, gap;
};

// The checkpoints of a run, and the one to resume from.
struct RunState {
  std::vector<CheckpointState> checkpoints;  // if they are to be listed
  Index count = 0;
  Result<std::string> newest;  // or why there is none
};

Result<RunState> state_of(const std::string& run, bool lists_all) {
  const std::vector<std::string> found = TRY(checkpoints_of_run(run));
  if (found.empty()) return io_error(printable(run) + ": contains no checkpoint, nor do its directories");
  RunState out{{}, std::ssize(found), std::string()};
  std::map<std::string, std::string> gaps;  // found out so far, each by reading all metadata of a checkpoint
  const auto gap_of = [&](const std::string& path) -> Result<std::string> {
    if (const auto known = gaps.find(path); known != gaps.end()) return known->second;
    return gaps[path] = TRY(gap_of_checkpoint(path));
  };
  for (const std::string& path : found) {
    if (!lists_all) break;
    std::string gap = TRY(gap_of(path));
    out.checkpoints.push_back({path, std::move(gap)});
  }
  auto newest = newest_of_run(found, gap_of);
  if (!newest && newest.error().code() == ErrorCode::kIo) return newest.error();
  if (!newest)
    out.newest = newest.error();
  else if (newest->path.empty())
    out.newest = unsupported(newest->choice);
  else
    out.newest = std::move(newest->path);
  return out;
}

Json json_of(const std::string& run, const RunState& state) {
  const auto problem_json = [](const std::string& problem) { return problem.empty() ? Json() : Json(problem); };
  Json list = Json::array();
  for (const CheckpointState& checkpoint : state.checkpoints)
    list.push_back(Json::object()
                       .set("path", checkpoint.path)
                       .set("complete", checkpoint.gap.empty())
                       .set("problem", problem_json(checkpoint.gap)));
  return answer_json("latest")
      .set("run", run)
      .set("newest", state.newest ? Json(*state.newest) : Json())
      .set("problem", problem_json(state.newest ? std::string() : state.newest.error().message()))
      .set("checkpoints", std::move(list));
}

Result<int> latest(const std::string& run, bool all, bool as_json) {
  const RunState state = TRY(state_of(run, all || as_json));
  if (as_json) {
    show_json(json_of(run, state), 2);
    return state.newest ? 0 : static_cast<int>(state.newest.error().code());
  }
  for (const auto& [path, gap] : state.checkpoints)
    std::printf("%s   %s\n", printable(path).c_str(), gap.empty() ? "complete" : printable(gap).c_str());
  if (!state.newest) {
    const bool all_fail = state.newest.error().code() == ErrorCode::kCorrupt;
    return Error(state.newest.error())
        .context(printable(run) + (all_fail ? ": of " + count_of(state.count, "checkpoint") : ""));
  }
  // A program that reads the path needs its bytes; a terminal must not get control characters.
  if (!all) std::printf("%s\n", (stdout_is_terminal() ? printable(*state.newest) : *state.newest).c_str());
  return 0;
}

}  // namespace

void add_latest(CommandLine& line) {
  auto path = std::make_shared<std::string>();
  auto all = std::make_shared<bool>(false), as_json = std::make_shared<bool>(false);
  line.group("Report");
  line.add_option("RUN", *path, "Directory of the run, with a checkpoint per step").read().required();
  line.add_flag("--all", *all, "List all checkpoints, and why some are incomplete").common();
  line.add_flag("--json", *as_json, "Print every checkpoint and the newest as JSON").common();
  line.examples({{"reshard latest outputs/checkpoint", ""},
                 {"reshard convert $(reshard latest outputs/checkpoint) model --to hf", ""}});
  line.description(
      "The newest checkpoint is the one with the highest step in its name (or in the file, for Lightning's last.ckpt) "
      "whose metadata is valid and whose files all exist. Exits with 3 if no checkpoint is complete, with 4 if several "
      "models are next to each other ('unet', 'vae'), and with 5 if there is none.");
  line.action([path, all, as_json] { return latest(*path, *all, *as_json); });
}

}  // namespace reshard::tools
