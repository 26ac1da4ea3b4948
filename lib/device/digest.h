// A digest of a tensor that does not depend on how the tensor is cut up.
//
// A tensor's row-major bytes are a sequence of 16-bit little-endian lanes, numbered from 0; in a tensor of 1-byte
// elements each byte is a lane, zero-extended. With lane L read as a signed number x(L), weight tables W_k of 1024
// odd signed 16-bit numbers and odd 32-bit keys R_k(b), the digest's words are, for k = 0 .. 3,
//
//     word k  =  sum over L of  x(L) * W_k[L mod 1024] * R_k(L div 1024)   modulo 2^32.
//
// It is a sum, so the digest of a tensor is the sum of the digests of any boxes that cover it exactly, computed in any
// order on any machine: a converter compares source and destination without putting either together.
//
// It guards against accidents (a flipped bit, a piece that is missing or in the wrong place), not against people: who
// knows the tables can make collisions. What it promises:
//   - A single wrong lane always shows, in all four words: weights and keys are odd, so no nonzero difference below
//   2^16
//     in size is multiplied to 0 modulo 2^32.
//   - Two unequal lanes of one block of 1024 exchanged always show: (x - y) * (W[i] - W[j]) is below 2^32 in size, and
//     in no two positions are all four weights equal (the tests check that).
//   - Any other error within a block, if it knows nothing of the tables, is missed by a word with a probability of at
//     most 2^-15: whatever the other lanes add up to, at most one of the 2^15 odd weights of a wrong lane cancels it.
//     An error over several blocks has to cancel through the keys as well. The worst are errors in the lanes' top bits
//     alone, where 16 bits of a word are left to tell; wrong low bits leave up to 31. The words use independent tables,
//     so all four miss with the product of that, about 2^-60 or less.
//   - Zeros weigh nothing. A missing piece that should have been zero is for the coverage check to find.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/layout/box.h"

namespace reshard {

inline constexpr int kDigestWords = 4;
inline constexpr Index kDigestBlock = 1024;  // lanes

struct Digest {
  std::array<std::uint32_t, kDigestWords> words{};

  Digest& operator+=(const Digest& other) {
    for (std::size_t k = 0; k < words.size(); ++k) words[k] += other.words[k];
    return *this;
  }
  friend bool operator==(const Digest&, const Digest&) = default;

  std::string hex() const;  // 32 lower-case digits, word 0 first
};

// Scatters a counter over all 64 bits; the source of all weights and keys.
constexpr std::uint64_t digest_mix(std::uint64_t v) {
  v = (v ^ (v >> 32)) * 0x9fb21c651e98df25u;
  v = (v ^ (v >> 29)) * 0xd6e8feb86659fd93u;
  return v ^ (v >> 32);
}

// W_k[lane], 0 <= lane < kDigestBlock.
constexpr std::int16_t digest_weight(int k, Index lane) {
  const auto counter = static_cast<std::uint64_t>(k * kDigestBlock + lane + 1);
  return static_cast<std::int16_t>((digest_mix(counter) & 0xffff) | 1);
}

// R_k(block).
constexpr std::uint32_t digest_key(int k, Index block) {
  const std::uint64_t stream = 0x632be59bd9b4e019u * static_cast<std::uint64_t>(k + 1);
  return static_cast<std::uint32_t>(digest_mix(static_cast<std::uint64_t>(block) ^ stream) >> 32) | 1;
}

// How many lanes an element has.
constexpr Index digest_lanes(Index element_bytes) { return element_bytes == 1 ? 1 : element_bytes / 2; }

// The part of a tensor's digest that comes from `run`: elements that follow each other in the row-major tensor, the
// first of them element number `first_element` (>= 0). run.size() is a multiple of element_bytes (1, 2, 4, 8 or 16).
Digest digest_run(Bytes run, Index first_element, Index element_bytes);

// The part that comes from `box`, whose elements lie row-major on their own at `row_major_box_data`. The box lies
// inside the tensor.
Digest digest_box(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* row_major_box_data);

struct DigestVariant {
  std::string_view name;  // "portable", "avx2", "avx512"
  Digest (*run)(Bytes run, Index first_element, Index element_bytes);
};

// What this machine can run, the portable one first: it is the definition, the last is what digest_run() uses. For
// tests and benchmarks.
std::vector<DigestVariant> digest_variants();

}  // namespace reshard
