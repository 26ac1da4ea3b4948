// SPDX-License-Identifier: Apache-2.0
#include "lib/device/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace reshard {
namespace {

// Copies one unit. kUnit > 0 is a size known at compile time.
template <Index kUnit>
inline void copy_unit(std::byte* to, const std::byte* from, Index unit) {
  std::memcpy(to, from, kUnit > 0 ? kUnit : unit);
}

template <Index kUnit>
void copy_line(const CopyLoop& line, Index unit, const std::byte* from, std::byte* to) {
  for (Index i = 0; i < line.extent; ++i) copy_unit<kUnit>(to + i * line.to, from + i * line.from, unit);
}

template <Index kUnit>
struct Unsigned;
template <>
struct Unsigned<1> : std::type_identity<std::uint8_t> {};
template <>
struct Unsigned<2> : std::type_identity<std::uint16_t> {};
template <>
struct Unsigned<4> : std::type_identity<std::uint32_t> {};
template <>
struct Unsigned<8> : std::type_identity<std::uint64_t> {};

// Transposes a square of units in vector registers, with as many units on a side as fit in 16 bytes. `from_line` and
// `to_line` are the byte strides between lines; the units of a line are contiguous on both sides.
template <Index kUnit>
struct Square {
  static constexpr std::size_t kSide = 16 / kUnit;
  typedef typename Unsigned<kUnit>::type Line __attribute__((vector_size(16)));

  // Returns a0 b0 a1 b1 ..., starting from the middle of both lines if kHigh.
  template <bool kHigh, std::size_t... kAt>
  static Line interleave(Line a, Line b, std::index_sequence<kAt...>) {
    return __builtin_shufflevector(a, b, ((kAt % 2) * kSide + kAt / 2 + (kHigh ? kSide / 2 : 0))...);
  }

  static void transpose(const std::byte* from, Index from_line, std::byte* to, Index to_line) {
    Line lines[kSide], shuffled[kSide];
    for (std::size_t i = 0; i < kSide; ++i)
      std::memcpy(&lines[i], from + static_cast<Index>(i) * from_line, sizeof(Line));
    // Seen as one sequence of kSide * kSide units, each round moves unit i to 2 i modulo the length minus one, which
    // rotates the bits of its index by one. After half of the bits, row and column are exchanged.
    for (std::size_t round = 1; round < kSide; round *= 2) {
      for (std::size_t i = 0; i < kSide / 2; ++i) {
        constexpr auto kAll = std::make_index_sequence<kSide>();
        shuffled[2 * i] = interleave<false>(lines[i], lines[i + kSide / 2], kAll);
        shuffled[2 * i + 1] = interleave<true>(lines[i], lines[i + kSide / 2], kAll);
      }
      std::copy(shuffled, shuffled + kSide, lines);
    }
    for (std::size_t i = 0; i < kSide; ++i) std::memcpy(to + static_cast<Index>(i) * to_line, &lines[i], sizeof(Line));
  }
};

// Copies the tile of the first `rows` points of `outer` and `columns` of `inner`.
template <Index kUnit>
void copy_tile(const CopyLoop& outer, const CopyLoop& inner, Index rows, Index columns, Index unit,
               const std::byte* from, std::byte* to) {
  if constexpr (kUnit <= 8) {
    constexpr Index kSide = Square<kUnit>::kSide;
    if (outer.from == kUnit && inner.to == kUnit && rows % kSide == 0 && columns % kSide == 0) {
      for (Index r = 0; r < rows; r += kSide)
        for (Index c = 0; c < columns; c += kSide)
          Square<kUnit>::transpose(from + r * kUnit + c * inner.from, inner.from, to + r * outer.to + c * kUnit,
                                   outer.to);
      return;
    }
  }
  for (Index r = 0; r < rows; ++r)
    copy_line<kUnit>({columns, inner.from, inner.to}, unit, from + r * outer.from, to + r * outer.to);
}

// Copies two loops of which `outer` has the smaller step in the source and `inner` the smaller one in the destination.
// Works in tiles, so that cache lines of the strided side stay in cache until they are fully used.
template <Index kUnit>
void copy_transposed(const CopyLoop& outer, const CopyLoop& inner, Index unit, const std::byte* from, std::byte* to) {
  constexpr Index kTile = kUnit == 1 ? 64 : 32;
  for (Index i = 0; i < outer.extent; i += kTile)
    for (Index j = 0; j < inner.extent; j += kTile)
      copy_tile<kUnit>(outer, inner, std::min(kTile, outer.extent - i), std::min(kTile, inner.extent - j), unit,
                       from + i * outer.from + j * inner.from, to + i * outer.to + j * inner.to);
}

// Calls `body(from, to)` for each point of the loops of `outer`.
template <class Body>
void for_each_point(const CopyShape& outer, const std::byte* from, std::byte* to, Body body) {
  Index at[kMaxRank] = {};
  for (;;) {
    body(from, to);
    int i = outer.loops - 1;
    for (; i >= 0; --i) {
      const CopyLoop& loop = outer.loop[i];
      if (++at[i] < loop.extent) {
        from += loop.from;
        to += loop.to;
        break;
      }
      at[i] = 0;
      from -= loop.from * (loop.extent - 1);
      to -= loop.to * (loop.extent - 1);
    }
    if (i < 0) return;
  }
}

// Returns the loop with the smallest step in the source.
int nearest_in_source(const CopyShape& shape) {
  int best = shape.loops - 1;
  for (int i = best - 1; i >= 0; --i)
    if (magnitude(shape.loop[i].from) < magnitude(shape.loop[best].from)) best = i;
  return best;
}

CopyLoop take_loop(CopyShape& shape, int which) {
  const CopyLoop taken = shape.loop[which];
  for (int i = which + 1; i < shape.loops; ++i) shape.loop[i - 1] = shape.loop[i];
  --shape.loops;
  return taken;
}

template <Index kUnit>
void copy_units(CopyShape shape, const std::byte* from, std::byte* to) {
  const Index unit = shape.unit;
  const int nearest = nearest_in_source(shape);
  const CopyLoop inner = take_loop(shape, shape.loops - 1);
  if constexpr (kUnit > 0 && kUnit <= 16) {
    if (nearest < shape.loops) {
      const CopyLoop outer = take_loop(shape, nearest);
      for_each_point(shape, from, to,
                     [&](const std::byte* f, std::byte* t) { copy_transposed<kUnit>(outer, inner, unit, f, t); });
      return;
    }
  }
  for_each_point(shape, from, to, [&](const std::byte* f, std::byte* t) { copy_line<kUnit>(inner, unit, f, t); });
}

template <class T>
T reversed(T v) {
  if constexpr (sizeof(T) == 2) return __builtin_bswap16(v);
  if constexpr (sizeof(T) == 4) return __builtin_bswap32(v);
  if constexpr (sizeof(T) == 8) return __builtin_bswap64(v);
}

template <class T>
void swap_all(MutableBytes data) {
  for (std::size_t i = 0; i + sizeof(T) <= data.size(); i += sizeof(T)) {
    T v;
    std::memcpy(&v, data.data() + i, sizeof(T));
    v = reversed(v);
    std::memcpy(data.data() + i, &v, sizeof(T));
  }
}

}  // namespace

void copy_box(const Dims& shape, Index element_bytes, const std::byte* from, const Dims& from_strides, std::byte* to,
              const Dims& to_strides) {
  const CopyShape simple = simplify_copy(shape, element_bytes, from_strides, to_strides);
  if (simple.unit == 0) return;
  if (simple.loops == 0) {
    std::memcpy(to, from, simple.unit);
    return;
  }
  switch (simple.unit) {
    case 1:
      return copy_units<1>(simple, from, to);
    case 2:
      return copy_units<2>(simple, from, to);
    case 4:
      return copy_units<4>(simple, from, to);
    case 8:
      return copy_units<8>(simple, from, to);
    case 16:
      return copy_units<16>(simple, from, to);
    case 32:
      return copy_units<32>(simple, from, to);
    case 64:
      return copy_units<64>(simple, from, to);
    default:
      return copy_units<0>(simple, from, to);
  }
}

void swap_bytes(MutableBytes data, Index unit) {
  switch (unit) {
    case 2:
      return swap_all<std::uint16_t>(data);
    case 4:
      return swap_all<std::uint32_t>(data);
    case 8:
      return swap_all<std::uint64_t>(data);
    default:
      return;
  }
}

}  // namespace reshard
