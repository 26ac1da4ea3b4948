// SPDX-License-Identifier: Apache-2.0
#include "lib/source/watched_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "lib/base/storage/url.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"

namespace reshard {

std::optional<WatchedFiles::State> WatchedFiles::state_of(const std::string& path) {
  if (is_url(path)) {
    const auto node = look_at(path);
    if (!node) return std::nullopt;
    return State{node->device, node->inode, node->size, node->mtime_ns};
  }
  struct stat s {};
  if (sys().fstatat(AT_FDCWD, path.c_str(), &s, 0) != 0) return std::nullopt;
  return State{s.st_dev, s.st_ino, s.st_size, Index{s.st_mtim.tv_sec} * 1'000'000'000 + s.st_mtim.tv_nsec};
}

WatchedFiles::WatchedFiles(std::vector<std::string> paths) : paths_(std::move(paths)) {
  for (const std::string& path : paths_) {
    states_.push_back(state_of(path));
    if (states_.back()) newest_ns_ = std::max(newest_ns_, states_.back()->mtime_ns);
  }
}

Status WatchedFiles::check(std::size_t file) const {
  if (file >= paths_.size()) return {};  // of computed data, which has no files
  if (state_of(paths_[file]) == states_[file]) return {};
  return io_error(printable(paths_[file]) + ": the file has changed since it was opened");
}

Status WatchedFiles::check_all() const {
  for (std::size_t file = 0; file < paths_.size(); ++file) TRY(check(file));
  return {};
}

std::optional<std::string> WatchedFiles::replaced() const {
  for (std::size_t file = 0; file < paths_.size(); ++file)
    if (const auto now = state_of(paths_[file]); now && now != states_[file]) return paths_[file];
  return std::nullopt;
}

}  // namespace reshard
