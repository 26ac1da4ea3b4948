#include "lib/device/digest.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace reshard {
namespace {

struct Weights {
  alignas(64) std::int16_t of[kDigestWords][kDigestBlock];
};

constexpr Weights make_weights() {
  Weights w{};
  for (int k = 0; k < kDigestWords; ++k)
    for (Index lane = 0; lane < kDigestBlock; ++lane) w.of[k][lane] = digest_weight(k, lane);
  return w;
}

constexpr Weights kWeights = make_weights();

using Sums = std::array<std::uint32_t, kDigestWords>;

// Adds to `sums` what `lanes` lanes within one block weigh, keys left out; `first` is the place of the first in the
// block. kLaneBytes is 1 or 2, the bytes of a lane at `data`.
using BlockSum = void (*)(const std::byte* data, Index first, Index lanes, Sums& sums);

template <int kLaneBytes>
inline std::int16_t read_lane(const std::byte* at) {
  if constexpr (kLaneBytes == 1) return std::to_integer<std::int16_t>(*at);
  std::int16_t lane;
  std::memcpy(&lane, at, sizeof(lane));
  return lane;
}

template <int kLaneBytes>
void block_portable(const std::byte* data, Index first, Index lanes, Sums& sums) {
  for (int k = 0; k < kDigestWords; ++k) {
    const std::int16_t* weights = kWeights.of[k] + first;
    std::uint32_t sum = 0;
    for (Index i = 0; i < lanes; ++i)
      sum += static_cast<std::uint32_t>(read_lane<kLaneBytes>(data + i * kLaneBytes) * weights[i]);
    sums[static_cast<std::size_t>(k)] += sum;
  }
}

#if defined(__x86_64__)

// Multiplying 16-bit lanes and adding neighbours into 32 bits is one instruction. Its sums wrap as the digest does.

template <class Vector>
void add_elements(const Vector& v, std::uint32_t& sum) {
  std::uint32_t element[sizeof(Vector) / sizeof(std::uint32_t)];
  std::memcpy(element, &v, sizeof(Vector));
  for (std::uint32_t e : element) sum += e;
}

template <int kLaneBytes>
__attribute__((target("avx2"))) void block_avx2(const std::byte* data, Index first, Index lanes, Sums& sums) {
  constexpr Index kStep = 16;
  __m256i acc[kDigestWords] = {};
  Index i = 0;
  for (; i + kStep <= lanes; i += kStep) {
    __m256i x;
    if constexpr (kLaneBytes == 2) {
      x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 2 * i));
    } else {
      x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i)));
    }
    for (int k = 0; k < kDigestWords; ++k) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kWeights.of[k] + first + i));
      acc[k] = _mm256_add_epi32(acc[k], _mm256_madd_epi16(x, w));
    }
  }
  for (std::size_t k = 0; k < kDigestWords; ++k) add_elements(acc[k], sums[k]);
  block_portable<kLaneBytes>(data + i * kLaneBytes, first + i, lanes - i, sums);
}

template <int kLaneBytes>
__attribute__((target("avx512f,avx512bw"))) void block_avx512(const std::byte* data, Index first, Index lanes,
                                                              Sums& sums) {
  constexpr Index kStep = 32;
  __m512i acc[kDigestWords] = {};
  Index i = 0;
  for (; i + kStep <= lanes; i += kStep) {
    __m512i x;
    if constexpr (kLaneBytes == 2) {
      x = _mm512_loadu_si512(data + 2 * i);
    } else {
      x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i)));
    }
    for (int k = 0; k < kDigestWords; ++k) {
      const __m512i w = _mm512_loadu_si512(kWeights.of[k] + first + i);
      acc[k] = _mm512_add_epi32(acc[k], _mm512_madd_epi16(x, w));
    }
  }
  for (std::size_t k = 0; k < kDigestWords; ++k) add_elements(acc[k], sums[k]);
  block_portable<kLaneBytes>(data + i * kLaneBytes, first + i, lanes - i, sums);
}

#endif

Digest sum_blocks(BlockSum narrow, BlockSum wide, Bytes run, Index first_element, Index element_bytes) {
  Digest total;
  const Index lane_bytes = element_bytes == 1 ? 1 : 2;
  const BlockSum block_sum = element_bytes == 1 ? narrow : wide;
  Index lane = first_element * digest_lanes(element_bytes);
  Index left = static_cast<Index>(run.size()) / lane_bytes;
  for (const std::byte* data = run.data(); left > 0;) {
    const Index first = lane % kDigestBlock;
    const Index lanes = std::min(kDigestBlock - first, left);
    Sums sums{};
    block_sum(data, first, lanes, sums);
    for (std::size_t k = 0; k < sums.size(); ++k)
      total.words[k] += sums[k] * digest_key(static_cast<int>(k), lane / kDigestBlock);
    data += lanes * lane_bytes;
    lane += lanes;
    left -= lanes;
  }
  return total;
}

Digest run_portable(Bytes run, Index first_element, Index element_bytes) {
  return sum_blocks(block_portable<1>, block_portable<2>, run, first_element, element_bytes);
}

#if defined(__x86_64__)
Digest run_avx2(Bytes run, Index first_element, Index element_bytes) {
  return sum_blocks(block_avx2<1>, block_avx2<2>, run, first_element, element_bytes);
}

Digest run_avx512(Bytes run, Index first_element, Index element_bytes) {
  return sum_blocks(block_avx512<1>, block_avx512<2>, run, first_element, element_bytes);
}
#endif

std::optional<std::uint32_t> hex_digit(char c) {
  if (c >= '0' && c <= '9') return static_cast<std::uint32_t>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<std::uint32_t>(c - 'a' + 10);
  return std::nullopt;
}

}  // namespace

std::string Digest::hex() const {
  std::string text;
  for (std::uint32_t word : words)
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 0xf];
  return text;
}

std::optional<Digest> Digest::from_hex(std::string_view text) {
  Digest d;
  if (text.size() != 8 * d.words.size()) return std::nullopt;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::optional<std::uint32_t> digit = hex_digit(text[i]);
    if (!digit) return std::nullopt;
    d.words[i / 8] = d.words[i / 8] << 4 | *digit;
  }
  return d;
}

std::vector<DigestVariant> digest_variants() {
  std::vector<DigestVariant> variants = {{"portable", run_portable}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) variants.push_back({"avx2", run_avx2});
  if (__builtin_cpu_supports("avx512bw")) variants.push_back({"avx512", run_avx512});
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

  // Dimensions from `outer` on lie in one run, as far as the box spans those inside whole.
  int outer = box.rank();
  Index run = 1;
  while (outer > 0) {
    --outer;
    run *= box.shape[outer];
    if (box.shape[outer] != tensor_shape[outer]) break;
  }

  const auto run_bytes = static_cast<std::size_t>(run * element_bytes);
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
