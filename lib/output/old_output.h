// What stands where an output is to go, and may make room for it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/checkpoint/format.h"

namespace reshard {

// Where an output goes, and what may make room for it.
struct OutputPath {
  std::string path;
  // The files of the checkpoint that a directory is, relative to it; an error where it is none. Given, an existing
  // destination is replaced if it is empty, or holds these files and nothing else. Null: there must be none.
  std::function<Result<std::vector<std::string>>(const std::string& directory)> files_of_checkpoint = nullptr;
  std::vector<std::string> inputs = {};  // files and directories that the job reads (output_guard.h)
};

// A destination as it was when that was decided; of a directory without what marks it as a work directory.
struct OldOutput {
  Node self;
  std::vector<Node> inside;  // of a directory
  friend bool operator==(const OldOutput&, const OldOutput&) = default;
};
Result<OldOutput> look_at_old(const std::string& path);

// Returns what is at `destination` if a new output may replace it: an empty directory, or one that holds
// to.files_of_checkpoint and nothing else. A usage error otherwise, which names what is not of the checkpoint.
Result<OldOutput> replaceable_directory(const OutputPath& to, const std::string& destination);
// The same for the output of `target`, which may be a file of its kind.
Result<OldOutput> replaceable(const OutputPath& to, const std::string& destination, const Target& target);

}  // namespace reshard
