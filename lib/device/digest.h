// SPDX-License-Identifier: Apache-2.0
// A digest of a tensor that does not depend on how the tensor is sharded.
//
// A tensor's row-major bytes are a sequence of 16-bit little-endian lanes, numbered from 0; in a tensor of 1-byte
// elements each byte is a lane, zero-extended. x(L) is lane L read as a signed number. With weight tables W_k of 1024
// odd signed 16-bit numbers and odd 32-bit keys R_k(b), the digest's words are, for k = 0 .. 3,
//
//     word k  =  sum over L of  x(L) * W_k[L mod 1024] * R_k(L div 1024)   modulo 2^32.
//
// Because it is a sum, the digest of a tensor is the sum of the digests of any boxes that cover it exactly, in any
// order and on any machine: a converter compares source and destination without assembling either.
//
// It protects against accidents (a flipped bit, a missing or misplaced piece), not against attackers: anyone who knows
// the tables can construct collisions. Guarantees:
//   - A single wrong lane always changes all four words: weights and keys are odd, so no nonzero difference of
//     magnitude below 2^16 is multiplied to 0 modulo 2^32.
//   - Swapping two unequal lanes of one block of 1024 is always detected: |(x - y) * (W[i] - W[j])| is below 2^32, and
//     no two positions have equal weights in all four tables (the tests check that).
//   - Any other error within a block that is independent of the tables is missed by one word with probability at most
//     2^-15: whatever the other lanes add up to, at most one of the 2^15 odd weights of a wrong lane cancels it. An
//     error that spans blocks must cancel through the keys as well. The worst errors are in the top bits of lanes
//     alone, where only 16 bits of a word can reveal them; wrong low bits leave up to 31. The words use independent
//     tables, so all four miss with the product of these probabilities, about 2^-60 or less.
//   - Zeros contribute nothing. A missing piece of zeros must be found by the coverage check.
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

// Spreads a counter over all 64 bits; all weights and keys come from it.
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

// Returns the number of lanes of an element.
constexpr Index digest_lanes(Index element_bytes) { return element_bytes == 1 ? 1 : element_bytes / 2; }

// Returns the contribution of `run` to the tensor's digest: consecutive elements of the row-major tensor, starting at
// element number `first_element` (>= 0). run.size() must be a multiple of element_bytes (1, 2, 4, 8 or 16).
Digest digest_run(Bytes run, Index first_element, Index element_bytes);

// Returns the contribution of `box`, whose elements are row-major (within the box) at `row_major_box_data`. The box
// must be inside the tensor.
Digest digest_box(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* row_major_box_data);

struct DigestVariant {
  std::string_view name;  // "portable", "avx2", "avx512"
  Digest (*run)(Bytes run, Index first_element, Index element_bytes);
};

// Returns the implementations that this machine can run. The portable one is first and defines the results;
// digest_run() uses the last. For tests and benchmarks.
std::vector<DigestVariant> digest_variants();

}  // namespace reshard
