// SPDX-License-Identifier: Apache-2.0
#include "lib/base/memory_limit.h"

#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>

#include "lib/base/text.h"

namespace reshard {
namespace {

std::atomic<Index> most{0};  // limit in bytes; 0: none
std::atomic<Index> of_drivers{0};

Status check_left(Index bytes, const std::function<std::string()>& what) {
  const auto fits = [&] {
    const auto left = memory_left();
    return !left || (*left > 0 && bytes <= *left);
  };
  if (fits()) return {};
  release_freed_memory();
  if (fits()) return {};
  return too_little_memory(what(), bytes);
}

}  // namespace

Index resident_bytes() {
  long pages = 0, resident = 0;
  if (std::FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%ld %ld", &pages, &resident) != 2) resident = 0;
    std::fclose(f);
  }
  return static_cast<Index>(resident) * ::sysconf(_SC_PAGESIZE);
}

Index held_bytes() { return std::max<Index>(0, resident_bytes() - of_drivers); }

void DriverMemory::note(Index growth) {
  Index known = most_;
  while (growth > known)
    if (most_.compare_exchange_weak(known, growth)) {
      of_drivers += growth - known;
      break;
    }
}

void release_freed_memory() {
#ifdef __GLIBC__
  // One thread at a time: where another allocator replaces glibc's (jemalloc, a sanitizer's), the first call
  // initialises glibc's without a lock.
  static std::mutex trims;
  const std::lock_guard lock(trims);
  ::malloc_trim(0);
#endif
}

void limit_memory(Index bytes) { most = bytes; }

std::optional<Index> memory_left() {
  if (most == 0) return std::nullopt;
  return std::max<Index>(0, most - held_bytes());
}

Status may_take(Index bytes, const std::function<std::string()>& what) {
  return bytes < kMuchMemory ? Status() : check_left(bytes, what);
}

Status may_hold(const std::function<std::string()>& what) { return check_left(0, what); }

Error too_little_memory(const std::string& what, Index more) {
  const Index held = held_bytes();
  return usage_error(what + ": --memory " + human_bytes(most) + " is too small; expected at least " +
                     human_bytes(held + more) + " (" + human_bytes(held) + " in use already)");
}

}  // namespace reshard
