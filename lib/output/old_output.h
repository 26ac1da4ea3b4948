// SPDX-License-Identifier: Apache-2.0
// An existing destination, and whether a new output may replace it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/checkpoint/format.h"

namespace reshard {

// Where an output goes, and what it may replace.
struct OutputPath {
  std::string path;
  // Returns the files of the checkpoint in a directory, relative to it, or an error if there is none. If set, an
  // existing destination is replaced if it is empty or contains only these files. Null: the destination must not exist.
  std::function<Result<std::vector<std::string>>(const std::string& directory)> files_of_checkpoint = nullptr;
  std::vector<std::string> inputs = {};  // files and directories that the job reads (output_guard.h)
  std::string state = {};  // local directory of the journal of an output in a bucket; empty: it is kept in the bucket
};

// The state of a destination when the decision was made. Markers of work directories are left out.
struct OldOutput {
  Node self;
  std::vector<Node> inside;  // of a directory
  friend bool operator==(const OldOutput&, const OldOutput&) = default;
};
Result<OldOutput> look_at_old(const std::string& path);

// Returns the state of `destination` if a new output may replace it: an empty directory, or one that contains only
// to.files_of_checkpoint. Otherwise a usage error that names the foreign files.
Result<OldOutput> replaceable_directory(const OutputPath& to, const std::string& destination);
// Returns the state of `destination` if the output of `target` may replace it. A target that is a single file replaces
// only a file of its own format; other targets are treated as by replaceable_directory().
Result<OldOutput> replaceable(const OutputPath& to, const std::string& destination, const Target& target);

}  // namespace reshard
