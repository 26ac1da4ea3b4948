#include "lib/device/copy.h"

#include <cstdint>
#include <cstring>

namespace reshard {
namespace {

// Transposes go tile by tile, so that the lines that one side strides over stay in cache until all of each is used.
constexpr Index kTile = 32;

// Copies one unit; kUnit > 0 is its size known when this is compiled.
template <Index kUnit>
inline void copy_unit(std::byte* to, const std::byte* from, Index unit) {
  std::memcpy(to, from, static_cast<std::size_t>(kUnit > 0 ? kUnit : unit));
}

template <Index kUnit>
void copy_line(const CopyLoop& line, Index unit, const std::byte* from, std::byte* to) {
  for (Index i = 0; i < line.extent; ++i) copy_unit<kUnit>(to + i * line.to, from + i * line.from, unit);
}

// Two loops of which `outer` has the smaller step in the source and `inner` the smaller one in the destination.
template <Index kUnit>
void copy_transposed(const CopyLoop& outer, const CopyLoop& inner, Index unit, const std::byte* from, std::byte* to) {
  for (Index i = 0; i < outer.extent; i += kTile) {
    const Index rows = std::min(kTile, outer.extent - i);
    for (Index j = 0; j < inner.extent; j += kTile) {
      const CopyLoop line{std::min(kTile, inner.extent - j), inner.from, inner.to};
      for (Index r = i; r < i + rows; ++r)
        copy_line<kUnit>(line, unit, from + r * outer.from + j * inner.from, to + r * outer.to + j * inner.to);
    }
  }
}

// Runs `body(from, to)` for each point of the loops of `outer`.
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

// The loop with the smallest step in the source.
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
  if (kUnit > 0 && nearest < shape.loops) {
    const CopyLoop outer = take_loop(shape, nearest);
    for_each_point(shape, from, to,
                   [&](const std::byte* f, std::byte* t) { copy_transposed<kUnit>(outer, inner, unit, f, t); });
  } else {
    for_each_point(shape, from, to, [&](const std::byte* f, std::byte* t) { copy_line<kUnit>(inner, unit, f, t); });
  }
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
    std::memcpy(to, from, static_cast<std::size_t>(simple.unit));
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
