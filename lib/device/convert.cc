#include "lib/device/convert.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace reshard {
namespace {

// Inlined into functions compiled for other instruction sets, so that each gets its own vectorised loop.
#define RESHARD_INLINE inline __attribute__((always_inline))

// The element types, each by how it is made from a float and made into one. For the vectoriser there are no branches,
// and no floating-point operation whose result is only sometimes used.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};
struct Float8E4M3 {
  std::uint8_t bits;
};
struct Float8E5M2 {
  std::uint8_t bits;
};

RESHARD_INLINE float widen(BFloat16 v) { return std::bit_cast<float>(static_cast<std::uint32_t>(v.bits) << 16); }

// A denormal m * 2^-24 is (2^-14 + m * 2^-24) - 2^-14. Infinities and NaNs get their exponent afterwards.
RESHARD_INLINE float widen(Float16 v) {
  constexpr std::int32_t kSmallest = 1 << 23;  // below it, shifted is a denormal
  constexpr std::int32_t kSpecial = 0x1f << 23;
  constexpr std::int32_t kRebias = (127 - 15) << 23;
  const std::int32_t sign = static_cast<std::int32_t>(static_cast<std::uint32_t>(v.bits & 0x8000) << 16);
  const std::int32_t shifted = (v.bits & 0x7fff) << 13;
  const std::int32_t denormal = (shifted - kSmallest) >> 31;  // all bits or none
  const std::int32_t biased = shifted + kRebias + (denormal & kSmallest);
  const std::int32_t minus = denormal & (kRebias + kSmallest);
  const auto finite = std::bit_cast<std::int32_t>(std::bit_cast<float>(biased) - std::bit_cast<float>(minus));
  const std::int32_t exponent = shifted >= kSpecial ? 0x7f800000 : 0;
  const std::int32_t quiet = shifted > kSpecial ? 1 << 22 : 0;
  return std::bit_cast<float>(sign | finite | exponent | quiet);
}

// The upper half of a float16.
RESHARD_INLINE float widen(Float8E5M2 v) { return widen(Float16{static_cast<std::uint16_t>(v.bits << 8)}); }

// No infinities; all ones are the only NaN. A denormal m * 2^-9 is (2^-6 + m * 2^-9) - 2^-6.
RESHARD_INLINE float widen(Float8E4M3 v) {
  constexpr std::int32_t kSmallest = 1 << 23;
  constexpr std::int32_t kNan = 0x7f << 20;
  constexpr std::int32_t kRebias = (127 - 7) << 23;
  const std::int32_t sign = static_cast<std::int32_t>(static_cast<std::uint32_t>(v.bits & 0x80) << 24);
  const std::int32_t shifted = (v.bits & 0x7f) << 20;
  const std::int32_t denormal = (shifted - kSmallest) >> 31;  // all bits or none
  const std::int32_t biased = shifted + kRebias + (denormal & kSmallest);
  const std::int32_t minus = denormal & (kRebias + kSmallest);
  const auto finite = std::bit_cast<std::int32_t>(std::bit_cast<float>(biased) - std::bit_cast<float>(minus));
  const std::int32_t exponent = shifted == kNan ? 0x7f800000 : 0;
  return std::bit_cast<float>(sign | finite | exponent);
}

RESHARD_INLINE float widen(double v) { return static_cast<float>(v); }

RESHARD_INLINE void narrow(float v, BFloat16& out) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = static_cast<std::uint16_t>((nan ? 0x7fc00000 : rounded) >> 16);
}

// The float adder does the rounding: for a number of exponent e, a float16 is counted in units of 2^(e-10), which is
// what the last bit of a float is worth next to 2^(e+13). Denormals are counted as if e were -14. 65536 and more stop
// at 65536, whose pattern would be that of infinity.
RESHARD_INLINE void narrow(float v, Float16& out) {
  constexpr std::int32_t kSmallest = (127 - 14) << 23;  // 2^-14, the smallest that is not a denormal
  constexpr std::int32_t kTooLarge = (127 + 16) << 23;  // 2^16
  constexpr std::int32_t kInfinity = 0xff << 23;
  const auto bits = std::bit_cast<std::int32_t>(v);
  const std::int32_t sign = (bits >> 16) & 0x8000;
  const std::int32_t abs = bits & 0x7fffffff;
  const std::int32_t nan = abs > kInfinity ? 0x200 | ((abs >> 13) & 0x3ff) : 0;
  const std::int32_t clamped = abs < kTooLarge ? abs : kTooLarge;
  const std::int32_t exponent = clamped & kInfinity;
  const std::int32_t power = exponent > kSmallest ? exponent : kSmallest;
  const std::int32_t next_to = power + (13 << 23);
  const auto rounded = std::bit_cast<std::int32_t>(std::bit_cast<float>(clamped) + std::bit_cast<float>(next_to));
  const std::int32_t units = rounded - next_to;
  out.bits = static_cast<std::uint16_t>(sign | (((power - kSmallest) >> 13) + units) | nan);
}

// The same for 8 bits. What is kTooLarge or more becomes its pattern; a NaN becomes all ones.
template <int kMantissa, int kBias, std::int32_t kTooLarge>
RESHARD_INLINE std::uint8_t narrow_to_8(float v) {
  constexpr std::int32_t kSmallest = (127 + 1 - kBias) << 23;
  constexpr std::int32_t kInfinity = 0xff << 23;
  const auto bits = std::bit_cast<std::int32_t>(v);
  const std::int32_t sign = (bits >> 24) & 0x80;
  const std::int32_t abs = bits & 0x7fffffff;
  const std::int32_t nan = abs > kInfinity ? 0x7f : 0;
  const std::int32_t clamped = abs < kTooLarge ? abs : kTooLarge;
  const std::int32_t exponent = clamped & kInfinity;
  const std::int32_t power = exponent > kSmallest ? exponent : kSmallest;
  const std::int32_t next_to = power + ((23 - kMantissa) << 23);
  const auto rounded = std::bit_cast<std::int32_t>(std::bit_cast<float>(clamped) + std::bit_cast<float>(next_to));
  const std::int32_t units = rounded - next_to;
  return static_cast<std::uint8_t>(sign | (((power - kSmallest) >> (23 - kMantissa)) + units) | nan);
}
// 448 is the largest; infinity is too large as well.
RESHARD_INLINE void narrow(float v, Float8E4M3& out) { out.bits = narrow_to_8<3, 7, (135 << 23) + (6 << 20)>(v); }
// 2^16 would be infinity's.
RESHARD_INLINE void narrow(float v, Float8E5M2& out) { out.bits = narrow_to_8<2, 15, (127 + 16) << 23>(v); }

RESHARD_INLINE void narrow(float v, double& out) { out = v; }

template <class T>
RESHARD_INLINE void widen_each(const std::byte* __restrict in, std::byte* __restrict out, Index n) {
  for (Index i = 0; i < n; ++i) {
    T v;
    std::memcpy(&v, in + i * static_cast<Index>(sizeof(T)), sizeof(T));
    const float f = widen(v);
    std::memcpy(out + i * static_cast<Index>(sizeof(float)), &f, sizeof(float));
  }
}

template <class T>
RESHARD_INLINE void narrow_each(const std::byte* __restrict in, std::byte* __restrict out, Index n) {
  for (Index i = 0; i < n; ++i) {
    float f;
    std::memcpy(&f, in + i * static_cast<Index>(sizeof(float)), sizeof(float));
    T v;
    narrow(f, v);
    std::memcpy(out + i * static_cast<Index>(sizeof(T)), &v, sizeof(T));
  }
}

// A conversion is at most two steps with float32 in the middle. That loses nothing: every float16, bfloat16 and float8
// is a float32, and from float64 to the narrow types it is the way that torch goes.
using Step = void (*)(const std::byte* in, std::byte* out, Index n);

// To and from float32.
struct Steps {
  struct Pair {
    Step widen, narrow;
  };
  Pair half, brain, wide, e4m3, e5m2;

  const Pair& of(DType dtype) const {
    switch (dtype) {
      case DType::kFloat16:
        return half;
      case DType::kBFloat16:
        return brain;
      case DType::kFloat8E4M3:
        return e4m3;
      case DType::kFloat8E5M2:
        return e5m2;
      default:
        return wide;
    }
  }
};

void convert_by(const Steps& steps, DType from, DType to, const std::byte* in, std::byte* out, Index n) {
  if (n <= 0) return;
  if (from == to) {
    std::memcpy(out, in, static_cast<std::size_t>(n * byte_size(from)));
  } else if (to == DType::kFloat32) {
    steps.of(from).widen(in, out, n);
  } else if (from == DType::kFloat32) {
    steps.of(to).narrow(in, out, n);
  } else {
    constexpr Index kChunk = 1024;
    std::byte middle[kChunk * sizeof(float)];
    for (Index i = 0; i < n; i += kChunk) {
      const Index part = std::min(kChunk, n - i);
      steps.of(from).widen(in + i * byte_size(from), middle, part);
      steps.of(to).narrow(middle, out + i * byte_size(to), part);
    }
  }
}

void convert_portable(DType from, DType to, const std::byte* in, std::byte* out, Index n) {
  static constexpr Steps kSteps = {{widen_each<Float16>, narrow_each<Float16>},
                                   {widen_each<BFloat16>, narrow_each<BFloat16>},
                                   {widen_each<double>, narrow_each<double>},
                                   {widen_each<Float8E4M3>, narrow_each<Float8E4M3>},
                                   {widen_each<Float8E5M2>, narrow_each<Float8E5M2>}};
  convert_by(kSteps, from, to, in, out, n);
}

#if defined(__x86_64__)

// The same loops, compiled for wider vectors; float16 through the processor's own instructions.
#define RESHARD_AVX2 __attribute__((target("avx2,f16c")))
#define RESHARD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")))

template <class T>
RESHARD_AVX2 void widen_avx2(const std::byte* in, std::byte* out, Index n) {
  widen_each<T>(in, out, n);
}
template <class T>
RESHARD_AVX2 void narrow_avx2(const std::byte* in, std::byte* out, Index n) {
  narrow_each<T>(in, out, n);
}
template <class T>
RESHARD_AVX512 void widen_avx512(const std::byte* in, std::byte* out, Index n) {
  widen_each<T>(in, out, n);
}
template <class T>
RESHARD_AVX512 void narrow_avx512(const std::byte* in, std::byte* out, Index n) {
  narrow_each<T>(in, out, n);
}

RESHARD_AVX2 void half_to_float_f16c(const std::byte* in, std::byte* out, Index n) {
  Index i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i));
    _mm256_storeu_ps(reinterpret_cast<float*>(out + 4 * i), _mm256_cvtph_ps(half));
  }
  widen_each<Float16>(in + 2 * i, out + 4 * i, n - i);
}

RESHARD_AVX2 void float_to_half_f16c(const std::byte* in, std::byte* out, Index n) {
  Index i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 wide = _mm256_loadu_ps(reinterpret_cast<const float*>(in + 4 * i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
  }
  narrow_each<Float16>(in + 4 * i, out + 2 * i, n - i);
}

void convert_avx2(DType from, DType to, const std::byte* in, std::byte* out, Index n) {
  static constexpr Steps kSteps = {{half_to_float_f16c, float_to_half_f16c},
                                   {widen_avx2<BFloat16>, narrow_avx2<BFloat16>},
                                   {widen_avx2<double>, narrow_avx2<double>},
                                   {widen_avx2<Float8E4M3>, narrow_avx2<Float8E4M3>},
                                   {widen_avx2<Float8E5M2>, narrow_avx2<Float8E5M2>}};
  convert_by(kSteps, from, to, in, out, n);
}

void convert_avx512(DType from, DType to, const std::byte* in, std::byte* out, Index n) {
  static constexpr Steps kSteps = {{half_to_float_f16c, float_to_half_f16c},
                                   {widen_avx512<BFloat16>, narrow_avx512<BFloat16>},
                                   {widen_avx512<double>, narrow_avx512<double>},
                                   {widen_avx512<Float8E4M3>, narrow_avx512<Float8E4M3>},
                                   {widen_avx512<Float8E5M2>, narrow_avx512<Float8E5M2>}};
  convert_by(kSteps, from, to, in, out, n);
}

// __builtin_cpu_supports knows the name only in newer compilers.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

#endif

}  // namespace

bool can_convert(DType from, DType to) {
  const auto is_known = [](DType t) { return is_floating(t) || t == DType::kFloat8E4M3 || t == DType::kFloat8E5M2; };
  return is_known(from) && is_known(to);
}

std::vector<ConvertVariant> convert_variants() {
  std::vector<ConvertVariant> variants = {{"portable", convert_portable}};
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  if (avx2) variants.push_back({"avx2", convert_avx2});
  if (avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    variants.push_back({"avx512", convert_avx512});
#endif
  return variants;
}

void convert(DType from, DType to, const std::byte* in, std::byte* out, Index n) {
  static const auto best = convert_variants().back().convert;
  best(from, to, in, out, n);
}

}  // namespace reshard
