// SPDX-License-Identifier: Apache-2.0
#include "lib/source/watched_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lib/base/storage/url.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"

namespace reshard {

Result<std::optional<WatchedFiles::State>> WatchedFiles::state_of(const std::string& path) {
  using Found = std::optional<State>;
  if (is_url(path)) {
    const auto node = TRY(node_at(path));
    return node ? Found({node->device, node->inode, node->size, node->mtime_ns}) : Found();
  }
  struct stat s {};
  if (sys().fstatat(AT_FDCWD, path.c_str(), &s, 0) == 0)
    return Found({s.st_dev, s.st_ino, s.st_size, Index{s.st_mtim.tv_sec} * 1'000'000'000 + s.st_mtim.tv_nsec});
  if (is_nothing_there()) return Found();
  return io_error(printable(path) + ": cannot stat: " + std::strerror(errno));
}

WatchedFiles::WatchedFiles(std::vector<std::string> paths) : paths_(std::move(paths)) {
  for (const std::string& path : paths_) {
    states_.push_back(state_of(path));
    if (const auto& state = states_.back(); state && *state) newest_ns_ = std::max(newest_ns_, (*state)->mtime_ns);
  }
}

Status WatchedFiles::check(std::size_t file) const {
  if (file >= paths_.size()) return {};  // of computed data, which has no files
  if (!states_[file]) return states_[file].error();
  if (TRY(state_of(paths_[file])) == *states_[file]) return {};
  return io_error(printable(paths_[file]) + ": the file has changed since it was opened");
}

Status WatchedFiles::check_all() const {
  for (std::size_t file = 0; file < paths_.size(); ++file) TRY(check(file));
  return {};
}

std::optional<std::string> WatchedFiles::replaced() const {
  for (std::size_t file = 0; file < paths_.size(); ++file)
    if (const auto now = state_of(paths_[file]); now && *now && states_[file] && *now != *states_[file])
      return paths_[file];
  return std::nullopt;
}

}  // namespace reshard
