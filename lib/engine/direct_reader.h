// Files read into memory for a device: out of the page cache what is there, and past it what is not. That takes no
// processor time for a copy that nobody needs, and leaves what others have in the cache.
#pragma once

#include <memory>

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

  // Reads `length` bytes from `offset` on to their place `at` in `out`, which reaches to end_of(at + length); whatever
  // else lies in these units is overwritten. Errors are those of File::read_at().
  Status read(const std::shared_ptr<const File>& file, Index offset, Index length, MutableBytes out, Index at);

 private:
  RecentFiles<File> direct_;  // opened past the cache; refused: it cannot be
};

}  // namespace reshard
