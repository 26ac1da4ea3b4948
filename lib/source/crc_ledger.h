// SPDX-License-Identifier: Apache-2.0
// Checksums of extents that are seen in pieces, by several threads, in any order.
//
// The CRC-32 of a whole can be combined from the CRCs of its parts, so each piece is summed while it is in cache, and
// the ledger joins adjacent pieces until an extent is complete.
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
#include "lib/transport/transport.h"

namespace reshard {

// A piece of an extent and its CRC. Trivially copyable, so it can be sent to other ranks.
struct CrcPiece {
  Extent extent;
  Index begin = 0;
  Index length = 0;
  std::uint32_t crc = 0;
};

using VisitPiece = std::function<void(const CrcPiece& piece)>;
using VisitExtent = std::function<void(const Extent& extent)>;
// Calls `visit` for each extent, with the same extents on every call.
using EachExtent = std::function<void(const VisitExtent& visit)>;
EachExtent extents_of(const Catalog& catalog);  // of all tensors of the catalog, which must outlive the result

class CrcLedger {
 public:
  // Only these extents are tracked; pieces of others are ignored. `each_extent` is called when the first piece is
  // added.
  explicit CrcLedger(EachExtent each_extent) : each_extent_(std::move(each_extent)) {}

  static constexpr Index kExtentBytes = 9;  // most memory per extent

  // Adds the CRC of bytes [begin, begin + length) of the extent. Returns the CRC of the whole extent if this piece
  // completed it. A piece that overlaps known bytes is ignored. Thread-safe.
  std::optional<std::uint32_t> add(const Extent& extent, Index begin, Index length, std::uint32_t crc);

  // Returns the unknown ranges [begin, end) of the extent, ascending.
  std::vector<std::pair<Index, Index>> gaps(const Extent& extent) const;
  // Returns whether add() would accept such a piece.
  bool is_new(const Extent& extent, Index begin, Index length) const;

  // Returns the CRC of a complete extent, or nothing.
  std::optional<std::uint32_t> whole(const Extent& extent) const;

  // Returns the extents of which some but not all bytes are known.
  std::vector<Extent> incomplete() const;

  // Visits the pieces of incomplete extents, or of all extents, so that another ledger can add them. A complete extent
  // is visited with both lengths 0.
  void visit_incomplete(const VisitPiece& visit) const;
  void visit_all(const VisitPiece& visit) const;
  // Adds the pieces of all ranks to rank 0's ledger. Every rank must call it.
  Status gather(Transport* ranks);
  // Forgets everything.
  void clear();

  // From now on also records added pieces for take_recent(), which returns each of them once.
  void keep_recent();
  std::vector<CrcPiece> take_recent();

 private:
  using Key = std::pair<std::uint32_t, Index>;  // file and offset
  // Incomplete extents.
  class IncompleteExtents {
   public:
    std::optional<std::uint32_t> add(const Extent& extent, Index begin, Index length, std::uint32_t crc);
    bool overlaps(const Key& key, Index begin, Index end) const;
    std::vector<std::pair<Index, Index>> gaps(const Extent& extent) const;
    std::vector<Extent> extents() const;
    void for_each(const VisitPiece& visit) const;

   private:
    struct Piece {
      Index end;
      std::uint32_t crc;
    };
    using Pieces = std::map<Index, Piece>;  // keyed by begin; disjoint, adjacent ones joined
    struct Entry {
      Extent extent;
      Pieces pieces;
    };
    static bool overlaps(const Pieces& pieces, Index begin, Index end);

    std::map<Key, Entry> entries_;
  };
  // The CRCs of complete extents, by file and offset. Compact, because a job has millions.
  class CompleteExtents {
   public:
    explicit CompleteExtents(const EachExtent& each_extent);
    std::optional<std::size_t> place(const Key& key) const;  // nothing: not a tracked extent
    const std::uint32_t* find(std::size_t place) const { return known_[place] ? &crcs_[place] : nullptr; }
    void add(std::size_t place, std::uint32_t crc);
    void clear() { known_.assign(known_.size(), false); }
    void for_each(const VisitPiece& visit) const;

   private:
    // The extents of a file whose offsets have the same upper half: [begin, end) in offsets_.
    struct Group {
      std::size_t begin = 0, end = 0;
    };
    std::map<std::pair<std::uint32_t, std::uint32_t>, Group> groups_;
    std::vector<std::uint32_t> offsets_;  // lower halves, ascending within a group
    std::vector<std::uint32_t> crcs_;
    std::vector<bool> known_;
  };
  CompleteExtents& complete() const;

  const EachExtent each_extent_;
  mutable std::mutex mutex_;
  IncompleteExtents incomplete_;
  mutable std::optional<CompleteExtents> complete_;
  // What was added since take_recent(): complete extents, and pieces of others.
  struct Recent {
    std::vector<CrcPiece> whole;
    IncompleteExtents pieces;
  };
  std::optional<Recent> recent_;
};

}  // namespace reshard
