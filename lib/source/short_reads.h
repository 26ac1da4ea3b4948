// SPDX-License-Identifier: Apache-2.0
// Reads ahead for short pieces that are read in file order. A call for each of 100,000 scalars would take a tenth of a
// whole conversion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "lib/base/file.h"

namespace reshard {

// Bytes that were read ahead stay in memory, so a later change of the file may go unnoticed. Use it only for files that
// are read about once and must not change meanwhile. Thread-safe.
class ShortReads {
 public:
  static constexpr Index kLongest = 4096;  // longest piece to use it for, in bytes

  // Fills `out` from `offset` of file number `number`, whose size is `size` bytes. Errors are those of File::read_at().
  Status read(std::uint32_t number, const File& file, Index size, Index offset, MutableBytes out);

 private:
  std::mutex mutex_;
  std::vector<std::byte> bytes_;  // bytes read ahead, from begin_
  std::uint32_t number_ = 0;      // number of the file they are from
  Index begin_ = 0;
  Index next_ = 0;  // end of the last piece
};

}  // namespace reshard
