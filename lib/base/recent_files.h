// SPDX-License-Identifier: Apache-2.0
// A cache of values derived from open files, such as mappings, that keeps the most recently used.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/base/file.h"

namespace reshard {

// Thread-safe.
template <class Opened>
class RecentFiles {
 public:
  static constexpr std::size_t kMost = 32;  // files in the cache

  // Returns the cached value of the file, or calls `open(file)`, which returns a shared_ptr, and caches the result. A
  // null result is cached too: it means that `open` or refuse() rejected the file.
  template <class Open>
  std::shared_ptr<const Opened> get(const std::shared_ptr<const File>& file, const Open& open) {
    const std::lock_guard lock(mutex_);
    const auto it =
        std::find_if(known_.begin(), known_.end(), [&](const KnownFile& known) { return known.file == file; });
    if (it != known_.end()) {
      std::rotate(it, it + 1, known_.end());
    } else {
      if (known_.size() == kMost) known_.erase(known_.begin());
      known_.push_back({file, open(*file)});
    }
    return known_.back().opened;
  }

  void refuse(const File& file) {
    const std::lock_guard lock(mutex_);
    for (KnownFile& known : known_)
      if (known.file.get() == &file) known.opened = nullptr;
  }

 private:
  struct KnownFile {
    std::shared_ptr<const File> file;
    std::shared_ptr<const Opened> opened;
  };
  std::mutex mutex_;
  std::vector<KnownFile> known_;  // most recently used last
};

}  // namespace reshard
