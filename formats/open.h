// SPDX-License-Identifier: Apache-2.0
// Opening a checkpoint at a path, whichever format wrote it: one checkpoint, or the parts of a training run's step.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "formats/registry.h"
#include "lib/checkpoint/format.h"

namespace reshard {

// Opens the checkpoint at `path`. Returns nothing if no format recognises the path and it does not contain the parts of
// a checkpoint either (training_run.h).
Result<std::optional<OpenCheckpoint>> open_if_known(const std::string& path, const OpenOptions& options = {});

// Opens the checkpoint at `path`. Fails if no format recognises it; for the directory of a training run the error says
// which checkpoint to open.
Result<OpenCheckpoint> open_checkpoint(const std::string& path, const OpenOptions& options = {});

// Returns the paths of the files that the checkpoint at `path` reads. Fails with its gap if it is incomplete.
Result<std::vector<std::string>> files_if_complete(const std::string& path);
// Returns why the checkpoint at `path` is incomplete; empty if it opens and all its files are there. Fails (I/O) if
// that cannot be found out, because a device or a server does not answer, or access to a file is denied.
Result<std::string> gap_of_checkpoint(const std::string& path);
// The newest complete checkpoint of a run.
struct NewestOfRun {
  std::string path;    // empty: there are several models, between which the names do not decide
  std::string choice;  // then, a clause that lists them
};

// Returns the last complete one of a training run's checkpoints (checkpoints_of_run), or a choice if that is one of
// several models next to each other (sibling_models). Fails with the gap of the last one if none is complete, and (I/O)
// if that of a newer one cannot be found out. `gap_of` may remember gaps.
using GapOf = std::function<Result<std::string>(const std::string& path)>;
Result<NewestOfRun> newest_of_run(const std::vector<std::string>& checkpoints, const GapOf& gap_of = gap_of_checkpoint);

// Returns the files, relative to `directory`, that may be removed together with the checkpoint there: those that
// reshard's own manifest records (files_of_manifest). If reshard did not write the checkpoint: the files that its
// reader uses and that an index names or that have a name of the format (Format::is_own_file), and the config,
// tokenizer and manifest next to them, which need not exist. Fails if it is not a checkpoint.
Result<std::vector<std::string>> files_of_checkpoint(const std::string& directory);

}  // namespace reshard
