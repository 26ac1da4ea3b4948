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
#include <utility>
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
  CrcLedger();
  ~CrcLedger();

  static constexpr Index kExtentBytes = 20;  // of memory that a complete extent takes, where they were expected

  // How many extents there may be: memory for that many is taken when the first is complete.
  void expect(std::size_t extents) { done_.expect(extents); }

  // Adds the CRC of bytes [begin, begin + length) of the extent. Returns the CRC of the whole extent when this piece
  // completed it. A piece that overlaps what is known already is left out unless it is all new. Thread-safe.
  std::optional<std::uint32_t> add(const Extent& extent, Index begin, Index length, std::uint32_t crc);

  // What of the extent is not known yet: [begin, end), ascending.
  std::vector<std::pair<Index, Index>> gaps(const Extent& extent) const;
  // Whether add() would take in a piece of it.
  bool is_new(const Extent& extent, Index begin, Index length) const;

  // The CRC of a completed extent.
  std::optional<std::uint32_t> whole(const Extent& extent) const;

  // Extents that were begun and not completed: their pieces left gaps.
  std::vector<Extent> incomplete() const;

  // What is known of those, and of all, for another ledger to add. Of an extent that is whole the lengths are 0.
  std::vector<CrcPiece> unfinished() const;
  std::vector<CrcPiece> everything() const;
  // Forgets all of it.
  void clear();

  // From now on what is added is also kept for take_recent(), which gives it once.
  void keep_recent();
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
  using Key = std::pair<std::uint32_t, Index>;  // file and offset
  // The CRCs of extents that are complete, by file and offset: a job has millions.
  class Done {
   public:
    void expect(std::size_t extents) { expected_ = extents; }
    const std::uint32_t* find(const Key& key) const;  // null: not there
    void add(const Key& key, std::uint32_t crc);
    // Calls visit(key, crc) for each.
    template <class Visit>
    void each(const Visit& visit) const {
      for (const Slot& slot : slots_)
        if (slot.offset >= 0) visit(Key(slot.file, slot.offset), slot.crc);
    }

   private:
    struct Slot {
      Index offset = -1;  // free
      std::uint32_t file = 0, crc = 0;
    };
    std::size_t place(const Key& key) const;  // its own, or the free one for it
    void grow(std::size_t slots);

    std::vector<Slot> slots_;  // a fifth of them is free, at least
    std::size_t size_ = 0, expected_ = 0;
  };

  static bool overlaps(const Entry& entry, Index begin, Index end);

  mutable std::mutex mutex_;
  std::map<Key, Entry> open_;
  Done done_;
  // What was added since it was last taken: extents that came whole, and pieces of others.
  struct Recent;
  std::unique_ptr<Recent> recent_;
};

}  // namespace reshard
