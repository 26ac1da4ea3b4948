// reshard latest: which checkpoint of a training run to go on with.
#include <cstdio>

#include "formats/open.h"
#include "formats/training_run.h"
#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

Result<int> latest(const std::string& path, bool all) {
  const std::vector<std::string> found = TRY(checkpoints_of_run(path));
  if (found.empty()) return io_error(path + ": no checkpoint lies in it, nor in its directories");
  if (all) {
    for (const std::string& checkpoint : found) {
      const std::string gap = gap_of_checkpoint(checkpoint);
      std::printf("%s   %s\n", printable(checkpoint).c_str(), gap.empty() ? "complete" : printable(gap).c_str());
    }
    return 0;
  }
  std::printf("%s\n",
              TRY(newest_complete(found).context(path + ": of " + count_of(std::ssize(found), "checkpoint"))).c_str());
  return 0;
}

}  // namespace

void add_latest(CommandLine& line) {
  auto path = std::make_shared<std::string>();
  auto all = std::make_shared<bool>(false);
  line.add_option("run", *path, "The run's directory, which holds a directory for each step").read().required();
  line.add_flag("--all", *all, "Every checkpoint, and what is wrong with those that are not complete");
  line.footer(
      "By the numbers in the names, of those whose metadata are whole and whose files are all there.\n"
      "Examples:\n"
      "  reshard latest outputs/checkpoint\n"
      "  reshard convert $(reshard latest outputs/checkpoint) model --to hf\n"
      "Exit codes: 0 found, 3 none is complete, 5 none is there.");
  line.action([path, all] { return latest(*path, *all); });
}

}  // namespace reshard::tools
