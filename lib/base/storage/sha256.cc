// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/sha256.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace reshard {

namespace {

constexpr std::size_t kBlock = 64;

// Returns the end of a message of `bytes` bytes and its padding, in blocks: `rest`, a bit, zeros, the length in bits.
std::string padded_end(std::string_view rest, std::uint64_t bytes, bool is_big_endian) {
  constexpr std::size_t kLength = 8;
  std::string end(rest);
  end += '\x80';
  while (end.size() % kBlock != kBlock - kLength) end += '\0';
  for (std::size_t i = 0; i < kLength; ++i)
    end += static_cast<char>((bytes * 8) >> (8 * (is_big_endian ? kLength - 1 - i : i)));
  return end;
}

std::uint32_t rotate_left(std::uint32_t x, std::uint32_t n) { return (x << n) | (x >> (32 - n)); }
std::uint32_t rotate(std::uint32_t x, std::uint32_t n) { return (x >> n) | (x << (32 - n)); }
std::uint32_t byte_at(const char* from, std::size_t i) { return static_cast<std::uint8_t>(from[i]); }

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add_sha256_block(const char* from, std::array<std::uint32_t, 8>& state) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i)
    w[i] = byte_at(from, 4 * i) << 24 | byte_at(from, 4 * i + 1) << 16 | byte_at(from, 4 * i + 2) << 8 |
           byte_at(from, 4 * i + 3);
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  std::array<std::uint32_t, 8> v = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
    const std::uint32_t choose = (v[4] & v[5]) ^ (~v[4] & v[6]);
    const std::uint32_t t1 = v[7] + s1 + choose + kRound[i] + w[i];
    const std::uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
    const std::uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    v = {t1 + s0 + majority, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
  }
  for (std::size_t i = 0; i < 8; ++i) state[i] += v[i];
}

void add_blocks(std::string_view blocks, std::array<std::uint32_t, 8>& state) {
  for (; !blocks.empty(); blocks.remove_prefix(kBlock)) add_sha256_block(blocks.data(), state);
}

#ifdef __x86_64__
#define RESHARD_SHA __attribute__((target("sha,sse4.1")))

// The same with the processor's instructions, which keep the state as two vectors, ABEF and CDGH.
RESHARD_SHA void add_blocks_sha(std::string_view blocks, std::array<std::uint32_t, 8>& state) {
  const auto load = [](const void* from) RESHARD_SHA { return _mm_loadu_si128(static_cast<const __m128i*>(from)); };
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i abcd = _mm_shuffle_epi32(load(&state[0]), 0xB1), efgh = _mm_shuffle_epi32(load(&state[4]), 0x1B);
  __m128i abef = _mm_alignr_epi8(abcd, efgh, 8), cdgh = _mm_blend_epi16(efgh, abcd, 0xF0);
  for (; !blocks.empty(); blocks.remove_prefix(kBlock)) {
    const __m128i old_abef = abef, old_cdgh = cdgh;
    __m128i w[4];  // the last 16 words of the message schedule
#pragma GCC unroll 16
    for (std::size_t i = 0; i < 16; ++i) {
      __m128i& next = w[i % 4];
      if (i < 4) {
        next = _mm_shuffle_epi8(load(blocks.data() + 16 * i), big_endian);
      } else {
        const __m128i last = w[(i + 3) % 4], sum = _mm_alignr_epi8(last, w[(i + 2) % 4], 4);
        next = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(next, w[(i + 1) % 4]), sum), last);
      }
      const __m128i round = _mm_add_epi32(next, load(&kRound[4 * i]));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, round);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(round, 0x0E));
    }
    abef = _mm_add_epi32(abef, old_abef);
    cdgh = _mm_add_epi32(cdgh, old_cdgh);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[0]), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[4]), _mm_alignr_epi8(dchg, feba, 8));
}

// Older compilers' __builtin_cpu_supports does not know "sha".
bool has_sha() {
  constexpr unsigned kSha = 1U << 29, kSse41 = 1U << 19;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kSse41) == 0) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & kSha) != 0;
}
#endif

void add_sha256_blocks(std::string_view blocks, std::array<std::uint32_t, 8>& state) {
#ifdef __x86_64__
  static const bool has_instructions = has_sha();
  if (has_instructions) return add_blocks_sha(blocks, state);
#endif
  add_blocks(blocks, state);
}

// Returns floor(2^32 * abs(sin(i + 1))) for i from 0 to 63, the constants of MD5.
std::array<std::uint32_t, 64> md5_constants() {
  std::array<std::uint32_t, 64> out{};
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<std::uint32_t>(std::floor(4294967296.0 * std::fabs(std::sin(static_cast<double>(i + 1)))));
  return out;
}

void add_md5_block(const char* from, const std::array<std::uint32_t, 64>& constants,
                   std::array<std::uint32_t, 4>& state) {
  static constexpr std::array<std::array<std::uint32_t, 4>, 4> kShifts = {
      {{7, 12, 17, 22}, {5, 9, 14, 20}, {4, 11, 16, 23}, {6, 10, 15, 21}}};
  std::array<std::uint32_t, 16> w{};
  for (std::size_t i = 0; i < 16; ++i)
    w[i] = byte_at(from, 4 * i) | byte_at(from, 4 * i + 1) << 8 | byte_at(from, 4 * i + 2) << 16 |
           byte_at(from, 4 * i + 3) << 24;
  std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  const auto step = [&](std::uint32_t f, std::size_t i, std::size_t word) {
    const std::uint32_t sum = a + f + constants[i] + w[word];
    a = d;
    d = c;
    c = b;
    b += rotate_left(sum, kShifts[i / 16][i % 4]);
  };
  for (std::size_t i = 0; i < 16; ++i) step((b & c) | (~b & d), i, i);
  for (std::size_t i = 16; i < 32; ++i) step((d & b) | (~d & c), i, (5 * i + 1) % 16);
  for (std::size_t i = 32; i < 48; ++i) step(b ^ c ^ d, i, (3 * i + 5) % 16);
  for (std::size_t i = 48; i < 64; ++i) step(c ^ (b | ~d), i, 7 * i % 16);
  state = {state[0] + a, state[1] + b, state[2] + c, state[3] + d};
}

}  // namespace

void Sha256::add(std::string_view part) {
  bytes_ += part.size();
  if (!rest_.empty()) {
    const std::size_t taken = std::min(kBlock - rest_.size(), part.size());
    rest_ += part.substr(0, taken);
    part.remove_prefix(taken);
    if (rest_.size() < kBlock) return;
    add_sha256_blocks(rest_, state_);
    rest_.clear();
  }
  const std::size_t whole = part.size() / kBlock * kBlock;
  add_sha256_blocks(part.substr(0, whole), state_);
  rest_ = part.substr(whole);
}

std::string Sha256::digest() {
  add_sha256_blocks(padded_end(rest_, bytes_, true), state_);
  std::string out;
  for (const std::uint32_t word : state_)
    for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(word >> shift);
  return out;
}

std::string sha256(std::string_view message) {
  Sha256 sum;
  sum.add(message);
  return sum.digest();
}

std::string md5(std::string_view message) {
  static const std::array<std::uint32_t, 64> constants = md5_constants();
  std::array<std::uint32_t, 4> state = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476};
  const std::size_t whole = message.size() / kBlock * kBlock;
  for (std::size_t at = 0; at < whole; at += kBlock) add_md5_block(message.data() + at, constants, state);
  const std::string end = padded_end(message.substr(whole), message.size(), false);
  for (std::size_t at = 0; at < end.size(); at += kBlock) add_md5_block(end.data() + at, constants, state);
  std::string out;
  for (const std::uint32_t word : state)
    for (int shift = 0; shift < 32; shift += 8) out += static_cast<char>(word >> shift);
  return out;
}

std::string to_base64(std::string_view bytes) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::string_view three = bytes.substr(i, 3);
    std::uint32_t bits = 0;
    for (std::size_t k = 0; k < 3; ++k) bits = bits << 8 | (k < three.size() ? byte_at(three.data(), k) : 0);
    for (std::size_t k = 0; k < 4; ++k) out += k <= three.size() ? kDigits[bits >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

std::string hmac_sha256(std::string_view key, std::string_view message) {
  std::string padded(key.size() > kBlock ? sha256(key) : key);
  padded.resize(kBlock, '\0');
  std::string inner, outer;
  for (const char c : padded) {
    inner += static_cast<char>(c ^ 0x36);
    outer += static_cast<char>(c ^ 0x5c);
  }
  return sha256(outer + sha256(inner.append(message)));
}

std::string to_hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes)
    for (const int shift : {4, 0}) out += "0123456789abcdef"[(static_cast<unsigned char>(c) >> shift) & 15];
  return out;
}

}  // namespace reshard
