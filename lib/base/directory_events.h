// SPDX-License-Identifier: Apache-2.0
// Waits for changes in local directories (Linux's inotify). Network file systems report only what this machine changes
// and buckets report nothing, so callers must also look for themselves from time to time.
#pragma once

#include <chrono>
#include <set>
#include <string>

namespace reshard {

class DirectoryEvents {
 public:
  DirectoryEvents();
  ~DirectoryEvents();
  DirectoryEvents(const DirectoryEvents&) = delete;
  DirectoryEvents& operator=(const DirectoryEvents&) = delete;

  // Watches `directory` and those below it, `levels` levels deep, from now on, except the paths in `without`. Watches
  // what the kernel allows, and at most kMostDirectories at a time; ignores URLs. Call it again to find new ones.
  void watch(const std::string& directory, int levels, const std::set<std::string>& without);

  // Waits at most this long. Returns whether files were created, closed after writing, moved or removed.
  bool wait(std::chrono::milliseconds longest);

 private:
  static constexpr int kMostDirectories = 4096;
  int descriptor_;  // -1: the kernel gives none
  std::set<int> watches_;
};

}  // namespace reshard
