// SPDX-License-Identifier: Apache-2.0
// reshard latest: the checkpoint of a training run to resume from.
#include <cstdio>

#include "formats/open.h"
#include "formats/training_run.h"
#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

Result<int> print_json(const std::string& path, const std::vector<std::string>& found) {
  Json list = Json::array();
  for (const std::string& checkpoint : found) {
    const std::string gap = TRY(gap_of_checkpoint(checkpoint));
    list.push_back(Json::object()
                       .set("path", checkpoint)
                       .set("complete", gap.empty())
                       .set("problem", gap.empty() ? Json() : Json(gap)));
  }
  const auto newest = newest_of_run(found);
  if (!newest && newest.error().code() == ErrorCode::kIo) return newest.error();
  const bool is_one = newest && !newest->path.empty();
  const std::string problem = newest ? newest->choice : newest.error().message();
  show_json(answer_json("latest")
                .set("run", path)
                .set("newest", is_one ? Json(newest->path) : Json())
                .set("problem", is_one ? Json() : Json(problem))
                .set("checkpoints", std::move(list)),
            2);
  return is_one ? 0 : static_cast<int>(newest ? ErrorCode::kUnsupported : ErrorCode::kCorrupt);
}

Result<int> latest(const std::string& path, bool all, bool as_json) {
  const std::vector<std::string> found = TRY(checkpoints_of_run(path));
  if (found.empty()) return io_error(printable(path) + ": contains no checkpoint, nor do its directories");
  if (as_json) return print_json(path, found);
  if (all) {
    for (const std::string& checkpoint : found) {
      const std::string gap = TRY(gap_of_checkpoint(checkpoint));
      std::printf("%s   %s\n", printable(checkpoint).c_str(), gap.empty() ? "complete" : printable(gap).c_str());
    }
    return 0;
  }
  const NewestOfRun newest =
      TRY(newest_of_run(found).context(path + ": of " + count_of(std::ssize(found), "checkpoint")));
  if (newest.path.empty()) return unsupported(printable(path) + ": " + newest.choice);
  std::printf("%s\n", newest.path.c_str());
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
