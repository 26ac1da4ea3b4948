// Files read out of the page cache where it has them, and past it where it does not. That takes no processor time for a
// copy in the cache that nobody needs, and leaves there what others have in it.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

#include "lib/base/file.h"
#include "lib/base/recent_files.h"

namespace reshard {

// Thread-safe.
class DirectReader {
 public:
  // Where bytes from `offset` of a file on may lie in memory that begins at a page, `used` bytes of which hold
  // something already: in units of their own, which are the file's.
  static Index place(Index offset, Index used) { return end_of(used) + offset % File::kDirectUnit; }
  static Index end_of(Index used) { return ceil_div(used, File::kDirectUnit) * File::kDirectUnit; }

  // Whether reading what is not cached past the cache was seen to be faster on the file system of `path`, where it goes
  // into host memory: on ext4 and xfs (docs/benchmarks.md).
  static bool pays_at(const std::string& path);

  // Whether `length` bytes from `offset` on are to be read past the page cache: they are many, and not in it. That is
  // asked of the page in their middle, once for the stretch of 16 MiB in which they begin, as to ask each time was seen
  // to take 3 % of the processor's time for what is cached.
  bool wants_direct(const File& file, Index offset, Index length);

  // Reads `length` bytes from `offset` on to their place `at` in `out`, which reaches to end_of(at + length); whatever
  // else lies in these units is overwritten. Errors are those of File::read_at().
  Status read(const std::shared_ptr<const File>& file, Index offset, Index length, MutableBytes out, Index at);

  // Fills `out` with what lies from `offset` on, past the page cache, through `scratch`, more than a unit from a page's
  // first address on. All of `out` may lie there, at place(offset, 0). Errors are those of File::read_at().
  Status read_through(const std::shared_ptr<const File>& file, Index offset, MutableBytes out, MutableBytes scratch);

 private:
  // Another file may lie in the place of `file` by now: then this is of the slower way, but no way is wrong.
  struct Asked {
    const File* file = nullptr;
    Index stretch = 0;
    bool is_cached = false;
  };

  // To `out`, which lies in its page as the file does. False where it did not go, for whatever reason.
  bool read_past_cache(const std::shared_ptr<const File>& file, Index offset, Index length, std::byte* out);

  std::mutex mutex_;
  std::array<Asked, 256> asked_;  // each where the next with the same place is put; under the mutex
  RecentFiles<File> direct_;      // opened past the cache; refused: it cannot be
};

}  // namespace reshard
