// SPDX-License-Identifier: Apache-2.0
// Pieces that are copied together. A matrix that is stored transposed is read and written in rows that are far apart in
// the file. A copy of one row touches a cache line for each of its elements, so that many rows are copied at once.
#pragma once

#include <cstddef>
#include <span>

#include "lib/source/pieces.h"

namespace reshard {

// Returns how many groups, from the first on and of at most `room` bytes together, are single pieces that follow each
// other along one dimension of a fragment. At least 1. Extends `rows`, a copy of the first piece, to all of them: its
// strides are then those in memory that holds the groups' bytes one after the other.
std::size_t take_rows(std::span<const PieceGroup> groups, Index element_bytes, Index room, Piece& rows);

}  // namespace reshard
