// Short pieces of files that are read in order: what follows in the file is read with them. A call for each of 100,000
// scalars would take a tenth of the time that all of a conversion takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "lib/base/file.h"

namespace reshard {

// Thread-safe. What was read is kept: for files that are read once.
class ShortReads {
 public:
  static constexpr Index kLongest = 4096;  // bytes that are worth it

  // Fills `out` with what lies from `offset` on in the file of this number, which has `size` bytes. Errors are those of
  // File::read_at().
  Status read(std::uint32_t number, const File& file, Index size, Index offset, MutableBytes out);

 private:
  std::mutex mutex_;
  std::vector<std::byte> bytes_;  // that were read, from begin_ on
  std::uint32_t number_ = 0;      // of the file of the last piece, which they are of
  Index begin_ = 0;
  Index next_ = 0;  // where the last piece ended
};

}  // namespace reshard
