// What a merged checkpoint was made of, as its manifest records it: read for the merge to be reckoned once more, and
// held against what that gives.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/json.h"
#include "lib/base/result.h"

namespace reshard {

// A merge as a manifest has it, in the words of the command line.
struct RecordedMerge {
  struct Source {
    std::string name, path;
  };
  std::vector<Source> sources;
  std::string expression, accumulate, others_from;
  std::string to, dtype;  // "hf", "keep"
  std::vector<std::string> include, exclude, keep_dtype;
};
// A usage error where it records none; Corrupt where it cannot be read.
Result<RecordedMerge> recorded_merge(const Json& manifest, const std::string& path);

// An error for each source of which a tensor is another than was read, or, where they are all as they were, for the
// tensors of which the merge gives something else. `again` is the manifest of the same merge made now.
std::vector<Finding> compare_lineage(const RecordedMerge& merge, const Json& recorded, const Json& again);

}  // namespace reshard
