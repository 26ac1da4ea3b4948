// SPDX-License-Identifier: Apache-2.0
#include "lib/base/directory_events.h"

#include <poll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <thread>

#include "lib/base/file.h"
#include "lib/base/storage/url.h"

namespace reshard {

DirectoryEvents::DirectoryEvents() : descriptor_(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {}

DirectoryEvents::~DirectoryEvents() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void DirectoryEvents::watch(const std::string& directory, int levels, const std::set<std::string>& without) {
  if (descriptor_ < 0 || is_url(directory) || without.contains(directory)) return;
  if (std::ssize(watches_) >= kMostDirectories) return;
  const int number = ::inotify_add_watch(
      descriptor_, directory.c_str(),
      IN_CREATE | IN_CLOSE_WRITE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE | IN_MOVE_SELF | IN_ONLYDIR);
  if (number < 0) return;
  watches_.insert(number);
  if (levels == 0) return;
  const auto entries = list_directory(directory);
  if (!entries) return;
  for (const DirectoryEntry& entry : *entries)
    if (entry.is_directory) watch(path_join(directory, entry.name), levels - 1, without);
}

bool DirectoryEvents::wait(std::chrono::milliseconds longest) {
  if (descriptor_ < 0) {
    std::this_thread::sleep_for(longest);
    return false;
  }
  pollfd events{descriptor_, POLLIN, 0};
  if (::poll(&events, 1, static_cast<int>(longest.count())) <= 0) return false;
  alignas(inotify_event) std::array<char, 16384> buffer;
  bool has_changed = false;
  for (ssize_t n; (n = ::read(descriptor_, buffer.data(), buffer.size())) > 0;) {
    for (ssize_t at = 0; at + static_cast<ssize_t>(sizeof(inotify_event)) <= n;) {
      inotify_event event;
      std::memcpy(&event, buffer.data() + at, sizeof event);
      at += static_cast<ssize_t>(sizeof event) + static_cast<ssize_t>(event.len);
      if ((event.mask & IN_IGNORED) != 0)
        watches_.erase(event.wd);  // the directory is gone
      else
        has_changed = true;
    }
  }
  return has_changed;
}

}  // namespace reshard
