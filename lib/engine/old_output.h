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
  std::vector<std::string> inputs = {};  // files and directories that the job reads: what holds one is not replaced
};

// A destination as it was when that was decided; of a directory without what marks it as a work directory.
struct OldOutput {
  Node self;
  std::vector<Node> inside;  // of a directory
  friend bool operator==(const OldOutput&, const OldOutput&) = default;
};
Result<OldOutput> look_at_old(const std::string& path);

// What stands at `destination` if `target`'s output may replace it; a usage error otherwise.
Result<OldOutput> replaceable(const OutputPath& to, const std::string& destination, const Target& target);

// A usage error where `path` holds one of the inputs.
Status check_holds_no_input(const OutputPath& to, const std::string& path);

}  // namespace reshard
