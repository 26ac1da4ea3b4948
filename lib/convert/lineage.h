// SPDX-License-Identifier: Apache-2.0
// The lineage of a merged checkpoint: its manifest records the sources and the expression, so that the merge can be
// computed again and compared.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/json.h"
#include "lib/base/result.h"
#include "lib/convert/view/request.h"
#include "lib/convert/weights/merge.h"

namespace reshard {

inline constexpr std::string_view kDeltaBase = "base";  // the name of the source that `reshard patch` applies deltas to

// A merge as a manifest records it.
struct RecordedMerge {
  std::string path;    // of the manifest
  Json manifest;       // all of it
  MergeOptions merge;  // no source is open
  std::string to;      // "hf", as --to
  Selection selection;
  DtypeOptions typing;

  // Sets the directory that the source `name` is in now. Fails (usage) with all names if there is no such source.
  Status move(std::string_view name, const std::string& directory);
};
// Return what a manifest records of a tensor, which may be null: the digest of the output, "none" if there is none, and
// the digests of each source of a merge, empty if there are none.
std::string recorded_digest(const Json* tensor);
std::vector<std::string> merged_digests(const Json* tensor);
// Reads the merge that the manifest of a checkpoint records. Fails (usage) if it records none, (corrupt) if it cannot
// be read.
Result<RecordedMerge> recorded_merge(Reader& checkpoint);

struct Lineage {
  Index tensors = 0;  // number of the merge's tensors
  // One error for each source that has changed since the merge. If all are unchanged: an error for the tensors that the
  // merge now computes differently.
  std::vector<Finding> findings;
};
// Computes the merge again for `format` (that of `recorded.to`) without writing it. Fails if a source is missing.
// `config_path` and `choice` describe the model of the first source, and `spool` is a directory for decoded copies, as
// in Request.
Result<Lineage> check_lineage(const RecordedMerge& recorded, const Opener& open, const Format& format,
                              const ModelChoice& choice, const std::string& config_path, const std::string& spool,
                              const RunOptions& run);

}  // namespace reshard
