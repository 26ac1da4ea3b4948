// SPDX-License-Identifier: Apache-2.0
// Files that must not change while they are read, identified by device, inode, size and modification time. Every read
// of a URL is of the version that was opened (storage/storage.h), which takes the inode's place.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/base/file.h"

namespace reshard {

class WatchedFiles {
 public:
  // Records the current state of the files. A missing file must stay missing.
  explicit WatchedFiles(std::vector<std::string> paths);

  // Returns an I/O error that names the file if it has changed. Thread-safe.
  Status check(std::size_t file) const;
  Status check_all() const;
  // Returns the first existing file that has changed. Files that disappeared are ignored, as they may have been read
  // before.
  std::optional<std::string> replaced() const;

  Index newest_ns() const { return newest_ns_; }  // latest modification time, in nanoseconds since 1970; 0: no files

 private:
  struct State {
    std::uint64_t device = 0, inode = 0;
    Index size = 0, mtime_ns = 0;
    friend bool operator==(const State&, const State&) = default;
  };
  static Result<std::optional<State>> state_of(const std::string& path);

  std::vector<std::string> paths_;
  std::vector<Result<std::optional<State>>> states_;  // at the beginning; errors of files that could not be looked at
  Index newest_ns_ = 0;
};

}  // namespace reshard
