// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes that came from a file. Every product, sum and round-up of untrusted numbers goes through here,
// so that no wrapped value ever reaches a comparison or an allocation.
#pragma once

#include <cstdint>
#include <optional>

namespace reshard {

// One integer type for elements, bytes, ranks and offsets, so that nobody has to think about width.
using Index = std::int64_t;

inline std::optional<Index> checked_add(Index a, Index b) {
  Index r;
  if (__builtin_add_overflow(a, b, &r)) return std::nullopt;
  return r;
}

inline std::optional<Index> checked_mul(Index a, Index b) {
  Index r;
  if (__builtin_mul_overflow(a, b, &r)) return std::nullopt;
  return r;
}

// Returns the smallest multiple of `unit` (> 0) that is >= a (>= 0), or nothing on overflow.
inline std::optional<Index> checked_round_up(Index a, Index unit) {
  Index r;
  if (__builtin_add_overflow(a, unit - 1, &r)) return std::nullopt;
  return r / unit * unit;
}

// Returns a / b rounded up, for a >= 0 and b > 0.
constexpr Index ceil_div(Index a, Index b) { return a / b + (a % b != 0); }

// Returns an on-disk u64 as an Index, or nothing if it is above INT64_MAX.
inline std::optional<Index> to_index(std::uint64_t v) {
  if (v > static_cast<std::uint64_t>(INT64_MAX)) return std::nullopt;
  return static_cast<Index>(v);
}

// Returns whether [offset, offset + length) is inside [0, size).
inline bool fits_inside(Index offset, Index length, Index size) {
  return offset >= 0 && length >= 0 && length <= size && offset <= size - length;
}

}  // namespace reshard
