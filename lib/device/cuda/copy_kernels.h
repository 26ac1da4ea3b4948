// SPDX-License-Identifier: Apache-2.0
// Strided copies on a GPU: the kernels' arithmetic, which also runs on a CPU (host_device.h).
//
// A job is a CopyShape (copy.h) in the form that suits a GPU. Its words are as long as the addresses and strides allow,
// and numbered consecutively, so that neighbouring threads move neighbouring words whatever the shape is. A thread
// finds the offset of its word by dividing its number by the extents of the loops. If adjacent elements are along
// different loops in source and destination, the copy goes through tiles in shared memory, which are read along one
// loop and written along the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "lib/device/copy.h"
#include "lib/device/cuda/words.h"

namespace reshard {

// The loops of a CopyShape, prepared for computing the offsets of the n-th unit.
struct UnitGrid {
  int loops = 0;
  struct Loop {
    Divisor extent;
    Index from = 0, to = 0;
  } loop[kMaxRank];

  UnitGrid() = default;
  // shape.count() must be at most kMaxCount.
  explicit UnitGrid(const CopyShape& shape) : loops(shape.loops) {
    for (int i = 0; i < loops; ++i) loop[i] = {Divisor(shape.loop[i].extent), shape.loop[i].from, shape.loop[i].to};
  }

  // Returns the same as locate() in copy.h.
  RESHARD_HD CopyOffsets locate(std::uint32_t n) const {
    CopyOffsets at;
    for (int i = loops - 1; i > 0; --i) {
      std::uint32_t k = n;
      n = loop[i].extent.divide(k);
      at.from += k * loop[i].from;
      at.to += k * loop[i].to;
    }
    if (loops > 0) at = {at.from + n * loop[0].from, at.to + n * loop[0].to};
    return at;
  }
};

struct CopyJob {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  UnitGrid units;
  Divisor words_in_unit;
  std::uint32_t words = 0;
};

// Words that a thread has in flight.
inline constexpr std::uint32_t kCopyBatch = 4;

// Copies one thread's part of a tile of kCopyBatch * `threads` words.
template <int kWord>
RESHARD_HD void copy_words(const CopyJob& job, std::uint32_t tile, std::uint32_t thread, std::uint32_t threads) {
  Word<kWord> word[kCopyBatch];
  std::byte* to[kCopyBatch];
  const std::uint32_t first = tile * kCopyBatch * threads + thread;
  RESHARD_UNROLL
  for (std::uint32_t i = 0; i < kCopyBatch; ++i) {
    std::uint32_t n = first + i * threads;
    if (n < job.words) {
      const CopyOffsets at = job.units.locate(job.words_in_unit.divide(n));
      word[i] = load_aligned<Word<kWord>>(job.from + (at.from + Index{n} * kWord));
      to[i] = job.to + (at.to + Index{n} * kWord);
    }
  }
  RESHARD_UNROLL
  for (std::uint32_t i = 0; i < kCopyBatch; ++i) {
    if (first + i * threads < job.words) store_aligned(to[i], word[i]);
  }
}

// A copy of units of kWord bytes that are adjacent along loop `a` in the source and along loop `b` in the destination.
struct TransposeJob {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  UnitGrid outer;  // the other loops
  CopyLoop a, b;
  Divisor tiles_a, tiles_b;
  std::uint32_t tiles = 0;
  bool in_words = false;  // units of 1 or 2 bytes: neighbours can be moved as one word of 4 bytes
};

// Returns four bytes of two words, those that the digits of `selector` name, lowest first: 0 to 3 are x's, 4 to 7 y's.
RESHARD_HD std::uint32_t choose_bytes(std::uint32_t x, std::uint32_t y, std::uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(x, y, selector);
#else
  const std::uint64_t all = std::uint64_t{y} << 32 | x;
  std::uint32_t chosen = 0;
  for (int i = 0; i < 32; i += 8) chosen |= static_cast<std::uint32_t>(all >> 8 * (selector >> i / 2 & 7) & 0xff) << i;
  return chosen;
#endif
}

// Transposes 2 x 2 units of two bytes, or 4 x 4 units of one byte. A word is a row.
RESHARD_HD void transpose_square(Word<4> (&row)[2]) {
  const std::uint32_t x = row[0].single, y = row[1].single;
  row[0].single = choose_bytes(x, y, 0x5410);
  row[1].single = choose_bytes(x, y, 0x7632);
}
RESHARD_HD void transpose_square(Word<4> (&row)[4]) {
  const std::uint32_t upper[2] = {choose_bytes(row[0].single, row[1].single, 0x5140),
                                  choose_bytes(row[0].single, row[1].single, 0x7362)};
  const std::uint32_t lower[2] = {choose_bytes(row[2].single, row[3].single, 0x5140),
                                  choose_bytes(row[2].single, row[3].single, 0x7362)};
  RESHARD_UNROLL
  for (std::size_t i = 0; i < 2; ++i) {
    row[2 * i].single = choose_bytes(upper[i], lower[i], 0x5410);
    row[2 * i + 1].single = choose_bytes(upper[i], lower[i], 0x7632);
  }
}

// A tile of kSide units along each loop. Its rows are padded so that the units of a column are in different banks of
// shared memory (32 banks of 4 bytes).
//
// Full tiles of adjacent units of 1 or 2 bytes are moved in words of 4 bytes: a thread reads squares of kInWord words
// from as many rows, transposes them, and stores their words in the tile by column.
template <int kWord>
struct TransposeTile {
  static constexpr std::uint32_t kSide = kWord == 1 ? 128 : kWord == 2 ? 64 : 32;
  static constexpr std::uint32_t kThreads = 256;
  static constexpr std::uint32_t kEach = kSide * kSide / kThreads;  // units per thread
  static constexpr std::uint32_t kRows = kThreads / kSide;          // rows that all threads read or write at once
  static constexpr std::uint32_t kPitch = kSide + (kWord < 4 ? 4 / kWord : 1);

  static constexpr std::uint32_t kInWord = kWord < 4 ? 4 / kWord : 1;  // units
  static constexpr std::uint32_t kWords = kSide / kInWord;             // of 4 bytes, in a row or column
  static constexpr std::uint32_t kWordRows = kThreads / kWords;        // rows of words that all threads write at once
  static constexpr std::uint32_t kWordsEach = kSide * kWords / kThreads;
  static constexpr std::uint32_t kSquaresEach = kWordsEach / kInWord;

  union {
    Word<kWord> unit[kSide * kPitch];
    Word<4> word[kWord < 4 ? kSide * (kWords + 1) : 1];
  };

  struct Place {
    Index from = 0, to = 0;  // offsets of the tile's first unit
    Index rows_a = 0, rows_b = 0;
    RESHARD_HD bool is_full() const { return rows_a >= kSide && rows_b >= kSide; }
  };
  RESHARD_HD static Place place(const TransposeJob& job, std::uint32_t tile) {
    std::uint32_t b = tile;
    std::uint32_t a = job.tiles_b.divide(b);
    const CopyOffsets outer = job.outer.locate(job.tiles_a.divide(a));
    const Index first_a = Index{a} * kSide, first_b = Index{b} * kSide;
    return {outer.from + first_a * job.a.from + first_b * job.b.from,
            outer.to + first_a * job.a.to + first_b * job.b.to, job.a.extent - first_a, job.b.extent - first_b};
  }

  // The two phases; all threads of a block must finish the first before the second begins. Most tiles are full: for
  // these a thread checks no bounds and advances by addition.
  RESHARD_HD void read(const TransposeJob& job, std::uint32_t tile, std::uint32_t thread) {
    const Place at = place(job, tile);
    if constexpr (kWord < 4) {
      if (job.in_words && at.is_full()) return read_squares(job, at, thread);
    }
    const std::uint32_t a = thread % kSide, b = thread / kSide;
    const std::byte* from = job.from + (at.from + a * job.a.from + b * job.b.from);
    const Index step = Index{kRows} * job.b.from;
    Word<kWord>* to = unit + (b * kPitch + a);
    if (at.is_full()) {
      Word<kWord> moved[kEach];
      RESHARD_UNROLL
      for (Index i = 0; i < kEach; ++i, from += step) moved[i] = load_aligned<Word<kWord>>(from);
      RESHARD_UNROLL
      for (Index i = 0; i < kEach; ++i) to[i * kRows * kPitch] = moved[i];
      return;
    }
    for (Index i = 0; i < kEach && a < at.rows_a && b + i * kRows < at.rows_b; ++i, from += step)
      to[i * kRows * kPitch] = load_aligned<Word<kWord>>(from);
  }
  RESHARD_HD void write(const TransposeJob& job, std::uint32_t tile, std::uint32_t thread) const {
    const Place at = place(job, tile);
    if constexpr (kWord < 4) {
      if (job.in_words && at.is_full()) return write_words(job, at, thread);
    }
    const std::uint32_t b = thread % kSide, a = thread / kSide;
    const Word<kWord>* from = unit + (b * kPitch + a);
    std::byte* to = job.to + (at.to + a * job.a.to + b * job.b.to);
    const Index step = Index{kRows} * job.a.to;
    if (at.is_full()) {
      RESHARD_UNROLL
      for (Index i = 0; i < kEach; ++i, to += step) store_aligned(to, from[i * kRows]);
      return;
    }
    for (Index i = 0; i < kEach && b < at.rows_b && a + i * kRows < at.rows_a; ++i, to += step)
      store_aligned(to, from[i * kRows]);
  }

 private:
  // Reads squares: word p along a, of the kInWord rows from kInWord * q along b. Neighbouring threads' words are
  // kInWord columns apart in the tile, so banks are accessed several times, which costs less than the global reads.
  RESHARD_HD void read_squares(const TransposeJob& job, const Place& at, std::uint32_t thread) {
    const std::uint32_t p = thread % kWords, q = thread / kWords;
    const std::byte* from = job.from + (at.from + 4 * Index{p} + Index{kInWord} * q * job.b.from);
    const Index step = Index{kInWord} * kWordRows * job.b.from;
    Word<4> square[kSquaresEach][kInWord];
    RESHARD_UNROLL
    for (std::uint32_t i = 0; i < kSquaresEach; ++i, from += step) {
      RESHARD_UNROLL
      for (std::uint32_t row = 0; row < kInWord; ++row) square[i][row] = load_aligned<Word<4>>(from + row * job.b.from);
    }
    Word<4>* to = word + (kInWord * p * (kWords + 1) + q);
    RESHARD_UNROLL
    for (std::uint32_t i = 0; i < kSquaresEach; ++i, to += kWordRows) {
      transpose_square(square[i]);
      RESHARD_UNROLL
      for (std::size_t column = 0; column < kInWord; ++column) to[column * (kWords + 1)] = square[i][column];
    }
  }
  RESHARD_HD void write_words(const TransposeJob& job, const Place& at, std::uint32_t thread) const {
    const std::uint32_t q = thread % kWords, a = thread / kWords;
    const Word<4>* from = word + (a * (kWords + 1) + q);
    std::byte* to = job.to + (at.to + a * job.a.to + 4 * Index{q});
    const Index step = Index{kWordRows} * job.a.to;
    RESHARD_UNROLL
    for (std::size_t i = 0; i < kWordsEach; ++i, to += step) store_aligned(to, from[i * kWordRows * (kWords + 1)]);
  }
};

// ---- Making jobs, on the CPU

// Returns the longest word size with which the whole copy can be done.
inline int copy_word(const CopyShape& shape, const std::byte* from, const std::byte* to) {
  std::uintptr_t all = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
                       static_cast<std::uintptr_t>(shape.unit) | 16;
  for (int i = 0; i < shape.loops; ++i)
    all |= static_cast<std::uintptr_t>(shape.loop[i].from) | static_cast<std::uintptr_t>(shape.loop[i].to);
  return static_cast<int>(all & (~all + 1));
}

// Returns the loop with adjacent units in the source if it differs from the destination's and is long enough for tiles
// to pay off, otherwise -1.
inline int transposed_loop(const CopyShape& shape, int word) {
  constexpr Index kShortest = 8;
  if (shape.loops < 2 || shape.unit != word) return -1;
  const int last = shape.loops - 1;
  int nearest = last;
  for (int i = 0; i < last; ++i)
    if (magnitude(shape.loop[i].from) < magnitude(shape.loop[nearest].from)) nearest = i;
  if (nearest == last || shape.loop[nearest].extent < kShortest || shape.loop[last].extent < kShortest) return -1;
  return nearest;
}

// Splits a copy: calls body(part, at) for parts of at most `most` words each, with the offsets at which each begins.
template <class Body>
void for_each_part(const CopyShape& shape, Index word, Index most, const Body& body, CopyOffsets at = {}) {
  if (shape.unit == 0) return;
  const Index in_unit = shape.unit / word;
  if (in_unit <= most && shape.count() <= most / in_unit) return body(shape, at);
  CopyShape low = shape, high = shape;
  CopyLoop* longest = std::max_element(low.loop, low.loop + low.loops,
                                       [](const CopyLoop& x, const CopyLoop& y) { return x.extent < y.extent; });
  CopyOffsets middle = at;
  if (in_unit > most) {
    low.unit = in_unit / 2 * word;
    high.unit = shape.unit - low.unit;
    middle.from += low.unit;
    middle.to += low.unit;
  } else {
    const Index half = longest->extent / 2;
    high.loop[longest - low.loop].extent -= half;
    longest->extent = half;
    middle.from += half * longest->from;
    middle.to += half * longest->to;
  }
  for_each_part(low, word, most, body, at);
  for_each_part(high, word, most, body, middle);
}

// Returns a job for a part, which must have at most kMaxCount words.
inline CopyJob make_copy_job(const CopyShape& shape, const std::byte* from, std::byte* to, int word) {
  return {from, to, UnitGrid(shape), Divisor(shape.unit / word),
          static_cast<std::uint32_t>(shape.count() * (shape.unit / word))};
}

// Returns a transposing job for a part. `a` is the result of transposed_loop().
template <int kWord>
TransposeJob make_transpose_job(CopyShape shape, const std::byte* from, std::byte* to, int a) {
  constexpr Index kSide = TransposeTile<kWord>::kSide;
  TransposeJob job;
  job.from = from;
  job.to = to;
  job.a = shape.loop[a];
  job.b = shape.loop[shape.loops - 1];
  job.in_words = kWord < 4 && job.a.from == kWord && job.b.to == kWord && is_aligned(from, 4) && is_aligned(to, 4);
  for (int i = 0; i < shape.loops; ++i) {
    if (i != a) job.in_words = job.in_words && shape.loop[i].from % 4 == 0;
    if (i != shape.loops - 1) job.in_words = job.in_words && shape.loop[i].to % 4 == 0;
  }
  std::copy(shape.loop + a + 1, shape.loop + shape.loops - 1, shape.loop + a);
  shape.loops -= 2;
  const Index tiles_a = ceil_div(job.a.extent, kSide), tiles_b = ceil_div(job.b.extent, kSide);
  job.tiles_a = Divisor(tiles_a);
  job.tiles_b = Divisor(tiles_b);
  job.outer = UnitGrid(shape);
  job.tiles = static_cast<std::uint32_t>(shape.count() * tiles_a * tiles_b);
  return job;
}

// Splits a copy into jobs of at most `most` words, and calls visitor.copy<kWord>(job) or visitor.transpose<kWord>(job)
// to run each.
template <class Visitor>
void plan_copy(const CopyShape& shape, const std::byte* from, std::byte* to, Index most, Visitor& visitor) {
  const int word = copy_word(shape, from, to);
  const auto plan_part = [&]<int kWord>(const CopyShape& part, CopyOffsets at) {
    if (const int a = transposed_loop(part, kWord); a >= 0)
      visitor.template transpose<kWord>(make_transpose_job<kWord>(part, from + at.from, to + at.to, a));
    else
      visitor.template copy<kWord>(make_copy_job(part, from + at.from, to + at.to, kWord));
  };
  for_each_part(shape, word, most, [&](const CopyShape& part, CopyOffsets at) {
    switch (word) {
      case 1:
        return plan_part.template operator()<1>(part, at);
      case 2:
        return plan_part.template operator()<2>(part, at);
      case 4:
        return plan_part.template operator()<4>(part, at);
      case 8:
        return plan_part.template operator()<8>(part, at);
      default:
        return plan_part.template operator()<16>(part, at);
    }
  });
}

}  // namespace reshard
