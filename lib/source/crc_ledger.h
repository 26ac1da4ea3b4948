// Checksums of extents that are seen in pieces, by several threads, in any order.
//
// CRC-32 of a whole follows from the CRCs of its parts in order, so each piece is summed while it is in cache and the
// ledger joins neighbours until an extent is whole.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
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

using VisitPiece = std::function<void(const CrcPiece& piece)>;
using VisitExtent = std::function<void(const Extent& extent)>;
// Calls `visit` for each extent there is, the same whenever it is called.
using EachExtent = std::function<void(const VisitExtent& visit)>;
EachExtent extents_of(const Catalog& catalog);  // of all its tensors; refers to it

class CrcLedger {
 public:
  // Of those extents and no others: what is said of others is left out. They are asked for with the first piece.
  explicit CrcLedger(EachExtent each_extent) : each_extent_(std::move(each_extent)) {}

  static constexpr Index kExtentBytes = 9;  // of memory that an extent takes, at most

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

  // Tells what is known of those, and of all, for another ledger to add. Of an extent that is whole the lengths are 0.
  void tell_unfinished(const VisitPiece& visit) const;
  void tell_everything(const VisitPiece& visit) const;
  // Forgets all of it.
  void clear();

  // From now on what is added is also kept for take_recent(), which gives it once.
  void keep_recent();
  std::vector<CrcPiece> take_recent();

 private:
  using Key = std::pair<std::uint32_t, Index>;  // file and offset
  // Extents of which some is known, and not all.
  class Open {
   public:
    std::optional<std::uint32_t> add(const Extent& extent, Index begin, Index length, std::uint32_t crc);
    bool overlaps(const Key& key, Index begin, Index end) const;
    std::vector<std::pair<Index, Index>> gaps(const Extent& extent) const;
    std::vector<Extent> extents() const;
    void tell(const VisitPiece& visit) const;

   private:
    struct Piece {
      Index end;
      std::uint32_t crc;
    };
    using Pieces = std::map<Index, Piece>;  // by begin; disjoint, neighbours joined
    struct Entry {
      Extent extent;
      Pieces pieces;
    };
    static bool overlaps(const Pieces& pieces, Index begin, Index end);

    std::map<Key, Entry> entries_;
  };
  // The CRCs of all extents, by file and offset: a job has millions.
  class Done {
   public:
    explicit Done(const EachExtent& each_extent);
    std::optional<std::size_t> place(const Key& key) const;  // nothing: it is none of them
    const std::uint32_t* find(std::size_t place) const { return known_[place] ? &crcs_[place] : nullptr; }
    void add(std::size_t place, std::uint32_t crc);
    void clear() { known_.assign(known_.size(), false); }
    void tell(const VisitPiece& visit) const;

   private:
    // Of a file those whose offsets have this upper half: [begin, end) in offsets_.
    struct Group {
      std::size_t begin = 0, end = 0;
    };
    std::map<std::pair<std::uint32_t, std::uint32_t>, Group> groups_;
    std::vector<std::uint32_t> offsets_;  // lower halves, ascending in each group
    std::vector<std::uint32_t> crcs_;
    std::vector<bool> known_;
  };
  Done& done() const;

  const EachExtent each_extent_;
  mutable std::mutex mutex_;
  Open open_;
  mutable std::optional<Done> done_;
  // What was added since it was last taken: extents that came whole, and pieces of others.
  struct Recent {
    std::vector<CrcPiece> whole;
    Open pieces;
  };
  std::optional<Recent> recent_;
};

}  // namespace reshard
