// SPDX-License-Identifier: Apache-2.0
#include "lib/base/blake3.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "lib/base/storage/sha256.h"

namespace reshard {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::array<std::uint32_t, 8> kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr std::uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8;
constexpr std::size_t kBlocksOfChunk = 16;
constexpr int kRounds = 7;
constexpr std::size_t kChunkBytes = 1024;
using Schedule = std::array<std::array<std::uint8_t, 16>, kRounds>;  // the words of the block in each round

constexpr Schedule make_schedule() {
  constexpr std::array<std::uint8_t, 16> kPermutation = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
  Schedule out{};
  for (std::size_t i = 0; i < 16; ++i) out[0][i] = static_cast<std::uint8_t>(i);
  for (std::size_t r = 1; r < kRounds; ++r)
    for (std::size_t i = 0; i < 16; ++i) out[r][i] = out[r - 1][kPermutation[i]];
  return out;
}
constexpr Schedule kSchedule = make_schedule();

// The same word of so many chunks, which are compressed together.
constexpr std::size_t kLanes = 8;
using Lanes = std::uint32_t __attribute__((vector_size(sizeof(std::uint32_t) * kLanes)));
using Chains = std::array<std::array<std::uint32_t, 8>, kLanes>;
#define RESHARD_INLINE inline __attribute__((always_inline))  // also into functions for other instruction sets

// Word is a number or Lanes.
template <int kBits, class Word>
RESHARD_INLINE void rotate(Word& x) {
  x = x >> kBits | x << (32 - kBits);
}

template <class Word>
RESHARD_INLINE void mix(Word* s, std::size_t a, std::size_t b, std::size_t c, std::size_t d, const Word& x,
                        const Word& y) {
  s[a] += s[b] + x;
  s[d] ^= s[a];
  rotate<16>(s[d]);
  s[c] += s[d];
  s[b] ^= s[c];
  rotate<12>(s[b]);
  s[a] += s[b] + y;
  s[d] ^= s[a];
  rotate<8>(s[d]);
  s[c] += s[d];
  s[b] ^= s[c];
  rotate<7>(s[b]);
}

// Mixes a block's 16 words `m` into the state, whose first half becomes the new chain.
template <class Word>
RESHARD_INLINE void mix_block(Word* s, const Word* m) {
#pragma GCC unroll 7
  for (int r = 0; r < kRounds; ++r) {
    const auto& at = kSchedule[r];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) mix(s, i, 4 + i, 8 + i, 12 + i, m[at[2 * i]], m[at[2 * i + 1]]);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i)
      mix(s, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[at[8 + 2 * i]], m[at[9 + 2 * i]]);
  }
  for (std::size_t i = 0; i < 8; ++i) s[i] ^= s[i + 8];
}

RESHARD_INLINE std::uint32_t word_at(const std::byte* p) {
  std::uint32_t out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

// Computes the chaining values of kLanes whole chunks. `number` is the first one's.
RESHARD_INLINE void hash_chunks(const std::byte* bytes, std::uint64_t number, Chains& out) {
  const Lanes zero{};
  Lanes s[16], m[16];
  for (std::size_t i = 0; i < 8; ++i) s[i] = zero + kStart[i];
  for (std::size_t block = 0; block < kBlocksOfChunk; ++block) {
    const std::uint32_t flags =
        (block == 0 ? kChunkStart : 0) | (block + 1 == kBlocksOfChunk ? kChunkEnd : std::uint32_t{0});
    for (std::size_t i = 0; i < 16; ++i)
      for (std::size_t lane = 0; lane < kLanes; ++lane)
        m[i][lane] = word_at(bytes + lane * kChunkBytes + block * 64 + i * 4);
    for (std::size_t i = 0; i < 4; ++i) s[8 + i] = zero + kStart[i];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      s[12][lane] = static_cast<std::uint32_t>(number + lane);
      s[13][lane] = static_cast<std::uint32_t>((number + lane) >> 32);
    }
    s[14] = zero + 64;
    s[15] = zero + flags;
    mix_block(s, m);
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane)
    for (std::size_t i = 0; i < 8; ++i) out[lane][i] = s[i][lane];
}

void hash_chunks_of_any(const std::byte* bytes, std::uint64_t number, Chains& out) { hash_chunks(bytes, number, out); }
using HashChunks = decltype(hash_chunks_of_any);
#if defined(__x86_64__)
__attribute__((target("avx2"))) void hash_chunks_avx2(const std::byte* bytes, std::uint64_t number, Chains& out) {
  hash_chunks(bytes, number, out);
}
HashChunks* fastest() { return __builtin_cpu_supports("avx2") ? hash_chunks_avx2 : hash_chunks_of_any; }
#else
HashChunks* fastest() { return hash_chunks_of_any; }
#endif

}  // namespace

Blake3::Blake3() { start_chunk(); }

void Blake3::start_chunk() {
  const std::uint64_t counter = blocks_ == 0 ? 0 : block_.counter + 1;
  block_ = {.chain = kStart, .counter = counter, .flags = kChunkStart};
  blocks_ = 0;
}

Blake3::Chain Blake3::compress(const Node& node) {
  std::array<std::uint32_t, 16> m, s;
  std::memcpy(m.data(), node.block.data(), node.block.size());
  std::copy(node.chain.begin(), node.chain.end(), s.begin());
  std::copy(kStart.begin(), kStart.begin() + 4, s.begin() + 8);
  s[12] = static_cast<std::uint32_t>(node.counter);
  s[13] = static_cast<std::uint32_t>(node.counter >> 32);
  s[14] = node.length;
  s[15] = node.flags;
  mix_block(s.data(), m.data());
  Chain out;
  std::copy(s.begin(), s.begin() + 8, out.begin());
  return out;
}

Blake3::Node Blake3::parent_of(const Chain& left, const Chain& right) {
  Node out{.chain = kStart, .length = 64, .flags = kParent};
  std::memcpy(out.block.data(), left.data(), sizeof left);
  std::memcpy(out.block.data() + sizeof left, right.data(), sizeof right);
  return out;
}

// Joins the new chunk with the complete subtrees of its size: as many as its number of chunks has zeros at the end.
void Blake3::add_chunk(Chain chunk) {
  for (std::uint64_t chunks = block_.counter + 1; chunks % 2 == 0; chunks /= 2) {
    chunk = compress(parent_of(subtrees_.back(), chunk));
    subtrees_.pop_back();
  }
  subtrees_.push_back(chunk);
}

void Blake3::update(Bytes bytes) {
  static HashChunks* const hash = fastest();
  while (!bytes.empty()) {
    if (block_.length == block_.block.size()) {
      const bool is_last = ++blocks_ == kBlocksOfChunk;
      if (is_last) block_.flags |= kChunkEnd;
      block_.chain = compress(block_);
      if (is_last) {
        add_chunk(block_.chain);
        start_chunk();
      }
      block_.length = 0;
      block_.flags = is_last ? kChunkStart : 0;
    }
    // The last chunk may be the root, so it waits in block_.
    while (blocks_ == 0 && block_.length == 0 && bytes.size() > kLanes * kChunkBytes) {
      Chains chains;
      hash(bytes.data(), block_.counter, chains);
      for (const Chain& chain : chains) {
        add_chunk(chain);
        ++block_.counter;
      }
      bytes = bytes.subspan(kLanes * kChunkBytes);
    }
    const std::size_t n = std::min(bytes.size(), block_.block.size() - block_.length);
    std::memcpy(block_.block.data() + block_.length, bytes.data(), n);
    block_.length += static_cast<std::uint32_t>(n);
    bytes = bytes.subspan(n);
  }
}

std::string Blake3::hex() const {
  Node node = block_;
  std::fill(node.block.begin() + node.length, node.block.end(), std::byte{0});
  node.flags |= kChunkEnd;
  for (auto left = subtrees_.rbegin(); left != subtrees_.rend(); ++left) node = parent_of(*left, compress(node));
  node.flags |= kRoot;
  const Chain digest = compress(node);
  return to_hex({reinterpret_cast<const char*>(digest.data()), sizeof digest});
}

}  // namespace reshard
