// Files that must stay what they are while they are read from: told by inode, size and time of the last change.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/base/file.h"

namespace reshard {

class WatchedFiles {
 public:
  // Remembers the files as they are now. One that is not there must not come.
  explicit WatchedFiles(std::vector<std::string> paths);

  // An I/O error that names the file where one is not what it was. Thread-safe.
  Status check(std::size_t file) const;
  Status check_all() const;
  // The first that is there and is not what it was; what is gone may well have been read before.
  std::optional<std::string> replaced() const;

  Index newest_ns() const { return newest_ns_; }  // the latest of the times, nanoseconds since 1970; 0: of no file

 private:
  struct State {
    std::uint64_t device = 0, inode = 0;
    Index size = 0, mtime_ns = 0;
    friend bool operator==(const State&, const State&) = default;
  };
  static std::optional<State> state_of(const std::string& path);

  std::vector<std::string> paths_;
  std::vector<std::optional<State>> states_;
  Index newest_ns_ = 0;
};

}  // namespace reshard
