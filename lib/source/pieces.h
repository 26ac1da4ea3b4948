// SPDX-License-Identifier: Apache-2.0
// Finds the bytes that hold a box, for reading and writing.
#pragma once

#include <functional>
#include <vector>

#include "lib/checkpoint/fragment_index.h"

namespace reshard {

// A box inside one fragment, and its bytes in the fragment's extent.
struct Piece {
  std::size_t fragment = 0;
  Extent extent;
  bool big_endian = false;
  Box box;          // global coordinates
  Dims strides;     // elements, within the extent
  Index begin = 0;  // bytes from extent.offset to the first element
  Index end = 0;    // after the last byte of the furthest element
};

// Pieces of one extent whose byte ranges touch or overlap, so that one read or write call can serve them.
struct PieceGroup {
  Extent extent;
  Index begin = 0;  // bytes from extent.offset
  Index end = 0;
  std::vector<Piece> pieces;

  Index length() const { return end - begin; }
};

// Returns whether a box with these strides is one contiguous row-major run.
bool is_one_run(const Dims& shape, const Dims& strides);
// Returns whether a group is one piece that is contiguous in its file and in memory with these strides.
bool is_one_run(const PieceGroup& group, const Dims& memory_strides);
// Returns whether a group spans bytes that none of its pieces has.
bool has_gaps(const PieceGroup& group, Index element_bytes);

// A box inside one fragment, and the file offset of its first byte.
struct StoredPiece {
  Box box;  // global coordinates
  std::uint32_t file = 0;
  Index offset = 0;
};
using PieceFilter = std::function<bool(const StoredPiece& piece)>;

// Returns the pieces of `box`, in the index's order.
std::vector<StoredPiece> stored_pieces(const FragmentList& fragments, const FragmentIndex& index, const Box& box,
                                       Index element_bytes);

// Returns the groups of pieces of `box` in file order, restricted to the `wanted` pieces (null: all). A group spans at
// most `max_span` bytes; pieces with a wider span (of a transposed tensor) are split.
std::vector<PieceGroup> pieces_of(const FragmentList& fragments, const FragmentIndex& index, const Box& box,
                                  Index element_bytes, Index max_span, const PieceFilter& wanted = nullptr);

// The inverse: returns the boxes of a fragment's elements in bytes [begin, end) of its extent; at most 2 rank - 1 boxes
// if the elements do not interleave. No element may cross `begin` or `end`.
std::vector<Piece> pieces_between(const FragmentList& fragments, std::size_t number, Index element_bytes, Index begin,
                                  Index end);

// Returns the element offset, with the strides of `box`, from the first element of `box` to that of `part`, which is
// inside it.
Index offset_in(const Box& box, const Dims& strides, const Box& part);

}  // namespace reshard
