// Short pieces of an output's data, kept in memory until what surrounds them is written too. Many of them lie in a row,
// or between short headers: together they take one call where each by itself takes longer than all else that is done
// for it.
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
  static constexpr Index kLongest = 64;             // bytes of a piece that is kept
  static constexpr Index kMemory = Index{4} << 20;  // bytes of memory that all pieces take at most

  // Memory that a piece of so many bytes takes while there is room.
  static constexpr Index bytes_of(Index length) { return length + static_cast<Index>(sizeof(Piece)); }

  // Keeps it. False: there is no room, so it is to be written. Thread-safe.
  bool add(std::uint32_t file, Index offset, Bytes bytes);

  // Gives, by file and offset, what was not given yet of what lies before this place, or of all. No add() from then on.
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
  Index memory_ = 0;  // that they take
  std::size_t given_ = 0;
};

// Hands on at once, up to a length, what follows each other in a file.
class JoinedWrites {
 public:
  explicit JoinedWrites(EmitBytes write) : write_(std::move(write)) {}
  Status add(std::uint32_t file, Index offset, Bytes bytes);
  Status finish();  // hands on the rest

 private:
  const EmitBytes write_;
  std::uint32_t file_ = 0;
  Index begin_ = 0;
  std::string held_;
};

}  // namespace reshard
