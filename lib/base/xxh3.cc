// SPDX-License-Identifier: Apache-2.0
#include "lib/base/xxh3.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

namespace reshard {
namespace {

using U32 = std::uint32_t;
using U64 = std::uint64_t;
__extension__ using U128 = unsigned __int128;

constexpr U64 kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr U64 kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                            0x27D4EB2F165667C5};
constexpr std::size_t kStripe = 64, kSecretStep = 8, kSecretBytes = 192, kShort = 240;
constexpr std::size_t kBlockStripes = (kSecretBytes - kStripe) / kSecretStep;

constexpr std::array<unsigned char, kSecretBytes> kSecret = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

// Words are little-endian, as this program's machines are.
template <class Word>
Word load(const void* at) {
  Word out;
  std::memcpy(&out, at, sizeof out);
  return out;
}
U64 word(const std::byte* at) { return load<U64>(at); }
U64 secret(std::size_t at) { return load<U64>(kSecret.data() + at); }
U64 secret32(std::size_t at) { return load<U32>(kSecret.data() + at); }

U64 low(U128 x) { return static_cast<U64>(x); }
U64 high(U128 x) { return static_cast<U64>(x >> 64); }
U128 product(U64 a, U64 b) { return static_cast<U128>(a) * b; }
U64 folded(U64 a, U64 b) { return low(product(a, b)) ^ high(product(a, b)); }

U64 avalanche(U64 h) {
  h = (h ^ (h >> 37)) * 0x165667919E3779F9;
  return h ^ (h >> 32);
}
U64 avalanche64(U64 h) {
  h = (h ^ (h >> 33)) * kPrime64[1];
  h = (h ^ (h >> 29)) * kPrime64[2];
  return h ^ (h >> 32);
}

struct Hash {
  U64 low = 0, high = 0;
};

U64 mix16(const std::byte* in, std::size_t at) { return folded(word(in) ^ secret(at), word(in + 8) ^ secret(at + 8)); }
void mix32(Hash& h, const std::byte* a, const std::byte* b, std::size_t at) {
  h.low = (h.low + mix16(a, at)) ^ (word(b) + word(b + 8));
  h.high = (h.high + mix16(b, at + 16)) ^ (word(a) + word(a + 8));
}

Hash of_1_to_3(const std::byte* in, std::size_t n) {
  const U32 a = load<unsigned char>(in), b = load<unsigned char>(in + n / 2), c = load<unsigned char>(in + n - 1);
  const U32 both = (a << 16) | (b << 24) | c | (static_cast<U32>(n) << 8);
  const U32 turned = std::rotl(__builtin_bswap32(both), 13);
  return {avalanche64(both ^ secret32(0) ^ secret32(4)), avalanche64(turned ^ secret32(8) ^ secret32(12))};
}

Hash of_4_to_8(const std::byte* in, std::size_t n) {
  const U64 both = load<U32>(in) + (static_cast<U64>(load<U32>(in + n - 4)) << 32);
  const U128 m = product(both ^ secret(16) ^ secret(24), kPrime64[0] + (n << 2));
  Hash h{low(m), high(m)};
  h.high += h.low << 1;
  h.low ^= h.high >> 3;
  h.low = (h.low ^ (h.low >> 35)) * 0x9FB21C651E98DF25;
  h.low ^= h.low >> 28;
  return {h.low, avalanche(h.high)};
}

Hash of_9_to_16(const std::byte* in, std::size_t n) {
  const U64 first = word(in), last = word(in + n - 8), flipped = last ^ secret(48) ^ secret(56);
  const U128 m = product(first ^ last ^ secret(32) ^ secret(40), kPrime64[0]);
  Hash h{low(m) + (static_cast<U64>(n - 1) << 54), high(m)};
  h.high += flipped + static_cast<U64>(static_cast<U32>(flipped)) * (kPrime32[1] - 1);
  h.low ^= __builtin_bswap64(h.high);
  const U128 again = product(h.low, kPrime64[1]);
  return {avalanche(low(again)), avalanche(high(again) + h.high * kPrime64[1])};
}

Hash finished(const Hash& h, std::size_t n) {
  const U64 mixed = h.low * kPrime64[0] + h.high * kPrime64[3] + n * kPrime64[1];
  return {avalanche(h.low + h.high), 0 - avalanche(mixed)};
}

Hash of_17_to_128(const std::byte* in, std::size_t n) {
  Hash h{n * kPrime64[0], 0};
  for (std::size_t i = (n - 1) / 32 + 1; i-- > 0;) mix32(h, in + 16 * i, in + n - 16 * (i + 1), 32 * i);
  return finished(h, n);
}

Hash of_129_to_240(const std::byte* in, std::size_t n) {
  Hash h{n * kPrime64[0], 0};
  for (std::size_t end = 32; end < 160; end += 32) mix32(h, in + end - 32, in + end - 16, end - 32);
  h = {avalanche(h.low), avalanche(h.high)};
  for (std::size_t end = 160; end <= n; end += 32) mix32(h, in + end - 32, in + end - 16, 3 + end - 160);
  mix32(h, in + n - 16, in + n - 32, 136 - 17 - 16);
  return finished(h, n);
}

Hash of_short(const std::byte* in, std::size_t n) {
  if (n == 0) return {avalanche64(secret(64) ^ secret(72)), avalanche64(secret(80) ^ secret(88))};
  if (n <= 3) return of_1_to_3(in, n);
  if (n <= 8) return of_4_to_8(in, n);
  if (n <= 16) return of_9_to_16(in, n);
  return n <= 128 ? of_17_to_128(in, n) : of_129_to_240(in, n);
}

U64 merged(const std::array<U64, 8>& lanes, std::size_t at, U64 start) {
  for (std::size_t i = 0; i < 4; ++i)
    start += folded(lanes[2 * i] ^ secret(at + 16 * i), lanes[2 * i + 1] ^ secret(at + 16 * i + 8));
  return avalanche(start);
}

}  // namespace

Xxh3::Xxh3()
    : lanes_{kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]} {}

void Xxh3::add_stripe(Lanes& lanes, const std::byte* stripe, std::size_t secret_at) {
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const U64 value = word(stripe + 8 * i), key = value ^ secret(secret_at + 8 * i);
    lanes[i ^ 1] += value;
    lanes[i] += static_cast<U64>(static_cast<U32>(key)) * (key >> 32);
  }
}

void Xxh3::scramble(Lanes& lanes) {
  for (std::size_t i = 0; i < lanes.size(); ++i)
    lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ secret(kSecretBytes - kStripe + 8 * i)) * kPrime32[0];
}

void Xxh3::update(Bytes bytes) {
  constexpr std::size_t kStep = std::size_t{1} << 16;
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(kStep, bytes.size()))) {
    const Bytes part = bytes.first(std::min(kStep, bytes.size()));
    length_ += part.size();
    pending_.insert(pending_.end(), part.begin(), part.end());
    if (length_ <= kShort) continue;
    std::size_t used = 0;
    for (; pending_.size() - used > 2 * kStripe; used += kStripe) {
      add_stripe(lanes_, pending_.data() + used, kSecretStep * stripes_);
      if (++stripes_ < kBlockStripes) continue;
      scramble(lanes_);
      stripes_ = 0;
    }
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(used));
  }
}

std::string Xxh3::hex() const {
  Hash h;
  if (length_ <= kShort) {
    h = of_short(pending_.data(), pending_.size());
  } else {
    Lanes lanes = lanes_;
    std::size_t stripes = stripes_;
    for (std::size_t used = 0; pending_.size() - used > kStripe; used += kStripe) {
      add_stripe(lanes, pending_.data() + used, kSecretStep * stripes);
      if (++stripes == kBlockStripes) scramble(lanes), stripes = 0;
    }
    add_stripe(lanes, pending_.data() + pending_.size() - kStripe, kSecretBytes - kStripe - 7);
    h = {merged(lanes, 11, length_ * kPrime64[0]),
         merged(lanes, kSecretBytes - kStripe - 11, ~(length_ * kPrime64[1]))};
  }
  std::array<char, 33> text;
  std::snprintf(text.data(), text.size(), "%016llx%016llx", static_cast<unsigned long long>(h.high),
                static_cast<unsigned long long>(h.low));
  return text.data();
}

}  // namespace reshard
