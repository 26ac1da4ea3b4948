// SPDX-License-Identifier: Apache-2.0
#include "lib/device/digest.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace reshard {
namespace {

// The most lanes that a vector reads at once.
constexpr Index kMaxStep = 32;

struct Weights {
  alignas(64)
      std::int16_t of[kDigestWords][kDigestBlock + kMaxStep];  // with padding, because a vector may begin at any weight
};

constexpr Weights make_weights() {
  Weights w{};
  for (int k = 0; k < kDigestWords; ++k)
    for (Index lane = 0; lane < kDigestBlock; ++lane) w.of[k][lane] = digest_weight(k, lane);
  return w;
}

constexpr Weights kWeights = make_weights();

// A run of lanes within one block.
struct Stretch {
  Index block = 0;
  Index first = 0;  // index of its first lane in the block
  Index lanes = 0;
};

inline Stretch next_stretch(Index lane, Index left) {
  const Index first = lane % kDigestBlock;
  return {lane / kDigestBlock, first, std::min(kDigestBlock - first, left)};
}

// The digest of `lanes` lanes of kLaneBytes bytes (1 or 2) at `data`, the first of which has number `lane` in the
// tensor. One function for each instruction set.

template <int kLaneBytes>
inline std::int16_t read_lane(const std::byte* at) {
  if constexpr (kLaneBytes == 1) return std::to_integer<std::int16_t>(*at);
  std::int16_t lane;
  std::memcpy(&lane, at, sizeof(lane));
  return lane;
}

template <int kLaneBytes>
Digest sum_portable(const std::byte* data, Index lane, Index lanes) {
  Digest total;
  while (lanes > 0) {
    const Stretch s = next_stretch(lane, lanes);
    for (int k = 0; k < kDigestWords; ++k) {
      const std::int16_t* weights = kWeights.of[k] + s.first;
      std::uint32_t sum = 0;
      for (Index i = 0; i < s.lanes; ++i)
        sum += static_cast<std::uint32_t>(read_lane<kLaneBytes>(data + i * kLaneBytes) * weights[i]);
      total.words[k] += sum * digest_key(k, s.block);
    }
    data += s.lanes * kLaneBytes;
    lane += s.lanes;
    lanes -= s.lanes;
  }
  return total;
}

#if defined(__x86_64__)

// One instruction multiplies 16-bit lanes and adds neighbours into 32 bits. Its sums wrap as the digest requires.

#define RESHARD_AVX2 __attribute__((target("avx2")))
#define RESHARD_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2")))

// Returns the sum of each vector's elements.
RESHARD_AVX2 inline Digest add_across(const __m256i (&v)[kDigestWords]) {
  const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  Digest d;
  std::memcpy(d.words.data(), &sums, sizeof(sums));
  return d;
}

template <int kLaneBytes>
RESHARD_AVX2 Digest sum_avx2(const std::byte* data, Index lane, Index lanes) {
  constexpr Index kStep = 16;
  __m256i total[kDigestWords] = {};
  Digest ends;  // lanes of incomplete steps
  while (lanes > 0) {
    const Stretch s = next_stretch(lane, lanes);
    __m256i sum[kDigestWords] = {};
    Index i = 0;
    for (; i + kStep <= s.lanes; i += kStep) {
      __m256i x;
      if constexpr (kLaneBytes == 2) {
        x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 2 * i));
      } else {
        x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i)));
      }
      for (int k = 0; k < kDigestWords; ++k) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kWeights.of[k] + s.first + i));
        sum[k] = _mm256_add_epi32(sum[k], _mm256_madd_epi16(x, w));
      }
    }
    for (int k = 0; k < kDigestWords; ++k) {
      const __m256i key = _mm256_set1_epi32(static_cast<int>(digest_key(k, s.block)));
      total[k] = _mm256_add_epi32(total[k], _mm256_mullo_epi32(sum[k], key));
    }
    if (i < s.lanes) ends += sum_portable<kLaneBytes>(data + i * kLaneBytes, lane + i, s.lanes - i);
    data += s.lanes * kLaneBytes;
    lane += s.lanes;
    lanes -= s.lanes;
  }
  return ends += add_across(total);
}

template <int kLaneBytes>
RESHARD_AVX512 Digest sum_avx512(const std::byte* data, Index lane, Index lanes) {
  constexpr Index kStep = kMaxStep;
  __m512i total[kDigestWords] = {};
  while (lanes > 0) {
    const Stretch s = next_stretch(lane, lanes);
    __m512i sum[kDigestWords] = {};
    for (Index i = 0; i < s.lanes; i += kStep) {
      // Lanes past the end are not accessed and read as 0.
      const Index left = s.lanes - i;
      const auto mask = static_cast<__mmask32>(left >= kStep ? ~0u : (1u << left) - 1);
      __m512i x;
      if constexpr (kLaneBytes == 2) {
        x = left >= kStep ? _mm512_loadu_si512(data + 2 * i) : _mm512_maskz_loadu_epi16(mask, data + 2 * i);
      } else {
        x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, data + i));
      }
      for (int k = 0; k < kDigestWords; ++k) {
        const __m512i w = _mm512_loadu_si512(kWeights.of[k] + s.first + i);
        sum[k] = _mm512_add_epi32(sum[k], _mm512_madd_epi16(x, w));
      }
    }
    for (int k = 0; k < kDigestWords; ++k) {
      const __m512i key = _mm512_set1_epi32(static_cast<int>(digest_key(k, s.block)));
      total[k] = _mm512_add_epi32(total[k], _mm512_mullo_epi32(sum[k], key));
    }
    data += s.lanes * kLaneBytes;
    lane += s.lanes;
    lanes -= s.lanes;
  }
  __m256i folded[kDigestWords];
  for (int k = 0; k < kDigestWords; ++k) {
    __m256i half[2];
    std::memcpy(half, &total[k], sizeof(half));
    folded[k] = _mm256_add_epi32(half[0], half[1]);
  }
  return add_across(folded);
}

#endif

template <auto kSumBytes, auto kSumPairs>
Digest run_by(Bytes run, Index first_element, Index element_bytes) {
  const auto bytes = std::ssize(run);
  if (element_bytes == 1) return kSumBytes(run.data(), first_element, bytes);
  return kSumPairs(run.data(), first_element * digest_lanes(element_bytes), bytes / 2);
}

}  // namespace

std::string Digest::hex() const {
  std::string text;
  for (std::uint32_t word : words)
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 0xf];
  return text;
}

std::vector<DigestVariant> digest_variants() {
  std::vector<DigestVariant> variants = {{"portable", run_by<sum_portable<1>, sum_portable<2>>}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) variants.push_back({"avx2", run_by<sum_avx2<1>, sum_avx2<2>>});
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    variants.push_back({"avx512", run_by<sum_avx512<1>, sum_avx512<2>>});
#endif
  return variants;
}

Digest digest_run(Bytes run, Index first_element, Index element_bytes) {
  static const auto best = digest_variants().back().run;
  return best(run, first_element, element_bytes);
}

Digest digest_box(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* row_major_box_data) {
  Digest total;
  if (box.empty()) return total;
  const Dims strides = row_major_strides(tensor_shape);

  // Dimensions from `outer` on form one contiguous run, as far as the box spans the inner ones completely.
  int outer = box.rank();
  Index run = 1;
  while (outer > 0) {
    --outer;
    run *= box.shape[outer];
    if (box.shape[outer] != tensor_shape[outer]) break;
  }

  const std::size_t run_bytes = run * element_bytes;
  Index first = 0;
  for (int d = 0; d < box.rank(); ++d) first += box.origin[d] * strides[d];
  Dims at = Dims::filled(outer, 0);
  for (const std::byte* data = row_major_box_data;; data += run_bytes) {
    total += digest_run({data, run_bytes}, first, element_bytes);
    int d = outer - 1;
    for (; d >= 0; --d) {
      first += strides[d];
      if (++at[d] < box.shape[d]) break;
      first -= box.shape[d] * strides[d];
      at[d] = 0;
    }
    if (d < 0) return total;
  }
}

}  // namespace reshard
