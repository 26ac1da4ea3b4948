// SPDX-License-Identifier: Apache-2.0
// Copies a box between two strided layouts: the innermost step of every reshard.
//
// A copy is first reduced to its simplest form: a run of bytes (the unit) that is contiguous on both sides, inside as
// few loops as the strides allow. A column shard of a row-major matrix is one loop around part of a row, a whole tensor
// is no loop at all, and a transpose is two loops around one element. This form is computed from shapes and strides
// alone and is the same for every device.
#pragma once

#include <algorithm>
#include <cstddef>

#include "lib/base/cursor.h"
#include "lib/layout/box.h"

namespace reshard {

struct CopyLoop {
  Index extent = 0;  // > 1
  Index from = 0;    // byte stride in the source
  Index to = 0;      // byte stride in the destination

  friend constexpr bool operator==(const CopyLoop&, const CopyLoop&) = default;
};

// Copies `unit` bytes for each point of the loops. The last loop has the smallest step in the destination.
struct CopyShape {
  Index unit = 0;  // 0: nothing to copy
  int loops = 0;
  CopyLoop loop[kMaxRank];

  // Returns the number of units.
  constexpr Index count() const {
    Index n = unit == 0 ? 0 : 1;
    for (int i = 0; i < loops; ++i) n *= loop[i].extent;
    return n;
  }
};

// Offsets of one unit, in bytes from the box's first element.
struct CopyOffsets {
  Index from = 0;
  Index to = 0;
};

constexpr Index magnitude(Index v) { return v < 0 ? -v : v; }

// Returns the simplest form of copying a box of `shape` elements of `element_bytes` bytes. Strides are in elements.
constexpr CopyShape simplify_copy(const Dims& shape, Index element_bytes, const Dims& from_strides,
                                  const Dims& to_strides) {
  CopyShape out;
  CopyLoop sorted[kMaxRank];
  int n = 0;
  for (int d = 0; d < shape.rank(); ++d) {
    if (shape[d] <= 0) return out;
    if (shape[d] == 1) continue;
    const CopyLoop next{shape[d], from_strides[d] * element_bytes, to_strides[d] * element_bytes};
    int at = n++;
    for (; at > 0 && magnitude(sorted[at - 1].to) < magnitude(next.to); --at) sorted[at] = sorted[at - 1];
    sorted[at] = next;
  }
  out.unit = element_bytes;
  for (int i = 0; i < n; ++i) {
    CopyLoop* outer = out.loops > 0 ? &out.loop[out.loops - 1] : nullptr;
    const CopyLoop& inner = sorted[i];
    if (outer && outer->from == inner.from * inner.extent && outer->to == inner.to * inner.extent) {
      *outer = {outer->extent * inner.extent, inner.from, inner.to};
    } else {
      out.loop[out.loops++] = inner;
    }
  }
  if (out.loops > 0) {
    const CopyLoop& last = out.loop[out.loops - 1];
    if (last.from == out.unit && last.to == out.unit) {
      out.unit *= last.extent;
      --out.loops;
    }
  }
  return out;
}

// Returns the offsets of the n-th unit, 0 <= n < shape.count(), where the last loop varies fastest.
constexpr CopyOffsets locate(const CopyShape& shape, Index n) {
  CopyOffsets at;
  for (int i = shape.loops - 1; i >= 0; --i) {
    const Index k = n % shape.loop[i].extent;
    n /= shape.loop[i].extent;
    at.from += k * shape.loop[i].from;
    at.to += k * shape.loop[i].to;
  }
  return at;
}

// Copies a box of `shape` elements of 1, 2, 4, 8 or 16 bytes. Strides are in elements, one per dimension for each side.
// `from` and `to` point to the box's first element and need no alignment. The sides must not overlap, and no two
// elements may have the same destination.
void copy_box(const Dims& shape, Index element_bytes, const std::byte* from, const Dims& from_strides, std::byte* to,
              const Dims& to_strides);

// Reverses the bytes of each `unit` bytes (1, 2, 4 or 8) in place. data.size() must be a multiple of `unit`.
void swap_bytes(MutableBytes data, Index unit);

}  // namespace reshard
