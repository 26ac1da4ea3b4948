// Checksums of extents that are seen in pieces, by several threads, in any order.
//
// CRC-32 of a whole follows from the CRCs of its parts in order, so each piece is summed while it is in cache and the
// ledger joins neighbours until an extent is whole.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

// A stretch of an extent, and its CRC. Trivially copyable: it goes from rank to rank as it is.
struct CrcPiece {
  Extent extent;
  Index begin = 0;
  Index length = 0;
  std::uint32_t crc = 0;
};

class CrcLedger {
 public:
  // Adds the CRC of bytes [begin, begin + length) of the extent. Returns the CRC of the whole extent when this piece
  // completed it. A piece that overlaps what is known already is left out unless it is all new. Thread-safe.
  std::optional<std::uint32_t> add(const Extent& extent, Index begin, Index length, std::uint32_t crc);

  // The CRC of a completed extent.
  std::optional<std::uint32_t> whole(const Extent& extent) const;

  // Extents that were begun and not completed: their pieces left gaps.
  std::vector<Extent> incomplete() const;

  // What is known of those, and of all, for another ledger to add.
  std::vector<CrcPiece> unfinished() const;
  std::vector<CrcPiece> everything() const;
  // Forgets all of it.
  void clear();

  // From now on what is added is also kept for take_recent(), which gives it once.
  void keep_recent() { recent_ = std::make_unique<CrcLedger>(); }
  std::vector<CrcPiece> take_recent();

 private:
  struct Piece {
    Index end;
    std::uint32_t crc;
  };
  struct Entry {
    Extent extent;
    std::map<Index, Piece> pieces;  // by begin; disjoint, neighbours joined
  };
  struct Done {
    Index length;
    std::uint32_t crc;
  };
  struct Key {
    std::uint32_t file;
    Index offset;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& k) const {
      return static_cast<std::size_t>((static_cast<std::uint64_t>(k.offset) ^ (std::uint64_t{k.file} << 40)) *
                                      0x9E3779B97F4A7C15u);
    }
  };
  mutable std::mutex mutex_;
  std::unordered_map<Key, Entry, KeyHash> open_;
  std::unordered_map<Key, Done, KeyHash> done_;
  std::unique_ptr<CrcLedger> recent_;
};

}  // namespace reshard
