// SPDX-License-Identifier: Apache-2.0
// Reads files from the page cache if they are cached, and bypasses it if they are not. That saves the processor time of
// a copy into the cache that nobody will use, and does not evict what others have cached.
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
  // Returns the position in page-aligned memory for bytes from `offset` of a file, if its first `used` bytes are taken.
  // The position starts in a new direct-I/O unit and has the same alignment within it as `offset`.
  static Index place(Index offset, Index used) { return end_of(used) + offset % File::kDirectUnit; }
  static Index end_of(Index used) { return ceil_div(used, File::kDirectUnit) * File::kDirectUnit; }

  // Returns whether bypassing the cache was measured to be faster on the file system of `path`: on ext4 and xfs
  // (docs/benchmarks.md).
  static bool pays_at(const std::string& path);

  // Returns whether `length` bytes from `offset` should bypass the page cache: if they are many, and not cached. It
  // tests the page in their middle, once per 16 MiB of the file, because testing each time took 3 % of the processor
  // time for cached files.
  bool wants_direct(const File& file, Index offset, Index length);

  // Reads `length` bytes from `offset` to their position `at` in `out` (see place()), which must extend to end_of(at +
  // length). Other bytes in these units are overwritten. Errors are those of File::read_at().
  Status read(const std::shared_ptr<const File>& file, Index offset, Index length, MutableBytes out, Index at);

  // Fills `out` from `offset` of the file, bypassing the page cache, through `scratch`, which must be page-aligned and
  // longer than one unit. `out` may be inside `scratch`, at place(offset, 0). Errors are those of File::read_at().
  Status read_through(const std::shared_ptr<const File>& file, Index offset, MutableBytes out, MutableBytes scratch);

 private:
  // A new file may have the address of a closed one. Then the answer may select the slower way, but never a wrong one.
  struct CacheAnswer {
    const File* file = nullptr;
    Index stretch = 0;
    bool is_cached = false;
  };

  // Reads to `out`, which has the same position in its page as in the file. Returns false on any failure.
  bool read_past_cache(const std::shared_ptr<const File>& file, Index offset, Index length, std::byte* out);

  std::mutex mutex_;
  std::array<CacheAnswer, 256> asked_;  // a hash table without collision handling; guarded by mutex_
  RecentFiles<File> direct_;            // files opened for direct I/O; refused files do not support it
};

}  // namespace reshard
