// What a merged checkpoint was made of, as its manifest records it: read for the merge to be reckoned once more, and
// held against what that gives.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/json.h"
#include "lib/base/result.h"
#include "lib/convert/view/request.h"
#include "lib/convert/weights/merge.h"

namespace reshard {

// A merge as a manifest has it.
struct RecordedMerge {
  std::string path;    // of the manifest
  Json manifest;       // all of it
  MergeOptions merge;  // no source is open
  std::string to;      // "hf", as --to
  Selection selection;
  Typing typing;

  // The source of that name is in this directory now. A usage error, with all of them, where there is none.
  Status move(std::string_view name, const std::string& directory);
};
// Of the checkpoint in a directory. A usage error where its manifest records no merge; Corrupt where it cannot be read.
Result<RecordedMerge> recorded_merge(const std::string& directory);

struct Lineage {
  Index tensors = 0;  // that the merge has
  // An error for each source of which a tensor is another than was read, or, where they are all as they were, for the
  // tensors of which the merge gives something else.
  std::vector<Finding> findings;
};
// Makes the merge once more, into that format (its `to`), without writing it. An error where a source is not there.
// `config_path` and `choice`: the model of the first source, as in Request.
Result<Lineage> check_lineage(const RecordedMerge& recorded, const Opener& open, const Format& format,
                              const ModelChoice& choice, const std::string& config_path, const RunOptions& run);

}  // namespace reshard
