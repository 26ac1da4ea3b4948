// SPDX-License-Identifier: Apache-2.0
#include "lib/source/direct_reader.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "lib/base/syscalls.h"

namespace reshard {
namespace {

constexpr Index kLeast = Index{128} << 10;  // shorter reads are faster through the cache
constexpr Index kLookedAtOnce = Index{16} << 20;

// Returns whether the page cache has the page around a byte, or false if that is unknown. Reading with RWF_NOWAIT would
// tell too, but it makes the kernel start to read missing pages.
bool has_page(const File& file, Index offset) {
  const Index page = ::sysconf(_SC_PAGESIZE);
  const std::size_t size = page;
  void* const seen = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.descriptor(), offset / page * page);
  if (seen == MAP_FAILED) return false;
  unsigned char is_there = 0;
  const bool told = ::mincore(seen, size, &is_there) == 0;
  ::munmap(seen, size);
  return told && (is_there & 1) != 0;
}

std::shared_ptr<const File> open_direct(const File& file) {
  auto opened = file.reopen_direct();
  return opened ? std::make_shared<const File>(std::move(*opened)) : nullptr;
}

}  // namespace

bool DirectReader::pays_at(const std::string& path) {
  struct statfs system {};
  return ::statfs(path.c_str(), &system) == 0 &&
         (system.f_type == EXT4_SUPER_MAGIC || system.f_type == XFS_SUPER_MAGIC);
}

bool DirectReader::wants_direct(const File& file, Index offset, Index length) {
  if (length < kLeast) return false;
  const Index stretch = offset / kLookedAtOnce;
  const std::size_t place = std::hash<const File*>()(&file) / sizeof(File) + static_cast<std::size_t>(stretch);
  CacheAnswer& asked = asked_[place % asked_.size()];
  {
    const std::lock_guard lock(mutex_);
    if (asked.file == &file && asked.stretch == stretch) return !asked.is_cached;
  }
  const CacheAnswer answer{&file, stretch, has_page(file, offset + length / 2)};
  const std::lock_guard lock(mutex_);
  asked = answer;
  return !answer.is_cached;
}

Status DirectReader::read(const std::shared_ptr<const File>& file, Index offset, Index length, MutableBytes out,
                          Index at) {
  if (wants_direct(*file, offset, length) && read_past_cache(file, offset, length, out.data() + at)) return {};
  return file->read_at(offset, out.subspan(at, length));
}

Status DirectReader::read_through(const std::shared_ptr<const File>& file, Index offset, MutableBytes out,
                                  MutableBytes scratch) {
  const Index length = std::ssize(out), room = std::ssize(scratch) / File::kDirectUnit * File::kDirectUnit;
  for (Index done = 0; done < length;) {
    const Index at = place(offset + done, 0), bytes = std::min(length - done, room - at);
    std::byte* const from = scratch.data() + at;
    if (!read_past_cache(file, offset + done, bytes, from)) return file->read_at(offset, out);
    if (from != out.data()) std::memcpy(out.data() + done, from, bytes);
    done += bytes;
  }
  return {};
}

bool DirectReader::read_past_cache(const std::shared_ptr<const File>& file, Index offset, Index length,
                                   std::byte* out) {
  const auto past_cache = direct_.get(file, open_direct);
  if (!past_cache) return false;
  // Reads start at the unit in which the remaining part begins. The last read may end at the end of the file.
  for (Index done = 0; done < length;) {
    const Index back = (offset + done) % File::kDirectUnit;
    const std::size_t bytes = end_of(back + length - done);
    const ssize_t n = sys().pread(past_cache->descriptor(), out + done - back, bytes, offset + done - back);
    if (n <= back) {
      direct_.refuse(*file);
      return false;
    }
    done = std::min(length, done + static_cast<Index>(n) - back);
  }
  return true;
}

}  // namespace reshard
