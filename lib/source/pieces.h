// Which bytes of which extents hold a box: what reading and writing share.
#pragma once

#include <functional>
#include <vector>

#include "lib/checkpoint/fragment_index.h"

namespace reshard {

// A box of one fragment, as bytes of its extent.
struct Piece {
  std::size_t fragment = 0;
  Extent extent;
  bool big_endian = false;
  Box box;          // global coordinates
  Dims strides;     // elements, in the extent
  Index begin = 0;  // bytes from extent.offset to the first element
  Index end = 0;    // to the byte after the furthest element
};

// Pieces whose spans in one extent touch or overlap: what one read or write call can serve.
struct PieceGroup {
  Extent extent;
  Index begin = 0;  // bytes from extent.offset
  Index end = 0;
  std::vector<Piece> pieces;

  Index length() const { return end - begin; }
};

// Whether a box with these strides is one unbroken row-major run.
bool is_one_run(const Dims& shape, const Dims& strides);

// A box of one fragment, and where its first byte lies.
struct StoredPiece {
  Box box;  // global coordinates
  std::uint32_t file = 0;
  Index offset = 0;
};
using PieceFilter = std::function<bool(const StoredPiece& piece)>;

// The pieces of `box`, in the index's order.
std::vector<StoredPiece> stored_pieces(const FragmentList& fragments, const FragmentIndex& index, const Box& box,
                                       Index element_bytes);

// The pieces of `box`, grouped, in file order; of those only that are `wanted` (null: all). A group spans at most
// `max_span` bytes: pieces that reach further (a transposed tensor) are cut until they fit.
std::vector<PieceGroup> pieces_of(const FragmentList& fragments, const FragmentIndex& index, const Box& box,
                                  Index element_bytes, Index max_span, const PieceFilter& wanted = nullptr);

// The other way: what of a fragment's elements lies in bytes [begin, end) of its extent, in boxes; of a fragment whose
// elements do not interleave no more than 2 rank - 1. No element lies across `begin` or `end`.
std::vector<Piece> pieces_between(const FragmentList& fragments, std::size_t number, Index element_bytes, Index begin,
                                  Index end);

// Elements from the first of `box` to the first of `part`, which lies inside it, where `box` has these strides.
Index offset_in(const Box& box, const Dims& strides, const Box& part);

}  // namespace reshard
