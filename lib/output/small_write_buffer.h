// SPDX-License-Identifier: Apache-2.0
// Buffers short pieces of an output until the data around them is written too. Many of them are adjacent, or separated
// by short headers, so one call can write them together. A call for each would take longer than all other work on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/result.h"
#include "lib/checkpoint/format.h"

namespace reshard {

class SmallWriteBuffer {
 public:
  static constexpr Index kLongest = 64;             // longest piece to buffer, in bytes
  static constexpr Index kMemory = Index{4} << 20;  // most memory for all pieces, in bytes

  // Returns the memory in bytes that a piece takes.
  static constexpr Index bytes_of(Index length) { return length + Index{sizeof(Piece)}; }

  // Buffers a piece. Returns false if there is no room and the caller must write it. Thread-safe.
  bool add(std::uint32_t file, Index offset, Bytes bytes);

  // Emits the buffered pieces before this offset, or all, that were not emitted yet, ordered by file and offset. No
  // add() may follow.
  Status give_before(std::uint32_t file, Index offset, const EmitBytes& emit);
  Status give_all(const EmitBytes& emit);

 private:
  struct Piece {
    std::uint32_t file = 0;
    std::uint32_t begin = 0;  // in bytes_
    Index offset = 0;
    Index length = 0;
  };
  std::mutex mutex_;
  std::vector<Piece> pieces_;
  std::vector<std::byte> bytes_;
  Index memory_ = 0;  // bytes used
  std::size_t given_ = 0;
};

// Joins writes that are adjacent in a file, up to a length.
class JoinedWrites {
 public:
  explicit JoinedWrites(EmitBytes write) : write_(std::move(write)) {}
  Status add(std::uint32_t file, Index offset, Bytes bytes);
  Status finish();  // writes the rest

 private:
  const EmitBytes write_;
  std::uint32_t file_ = 0;
  Index begin_ = 0;
  std::string held_;
};

}  // namespace reshard
