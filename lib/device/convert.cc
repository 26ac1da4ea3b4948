// SPDX-License-Identifier: Apache-2.0
#include "lib/device/convert.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "lib/device/elements.h"

namespace reshard {
namespace {

template <class T>
RESHARD_HD void widen_each(const std::byte* __restrict in, std::byte* __restrict out, Index n) {
  for (Index i = 0; i < n; ++i) {
    T v;
    std::memcpy(&v, in + i * Index{sizeof(T)}, sizeof(T));
    const float f = widen(v);
    std::memcpy(out + i * Index{sizeof(float)}, &f, sizeof(float));
  }
}

template <class T>
RESHARD_HD void narrow_each(const std::byte* __restrict in, std::byte* __restrict out, Index n) {
  for (Index i = 0; i < n; ++i) {
    float f;
    std::memcpy(&f, in + i * Index{sizeof(float)}, sizeof(float));
    T v;
    narrow(f, v);
    std::memcpy(out + i * Index{sizeof(T)}, &v, sizeof(T));
  }
}

// A conversion is at most two steps through float32. That loses nothing: every float16, bfloat16 and float8 is exactly
// a float32, and from float64 to the narrow types torch takes the same way.
using Step = void (*)(const std::byte* in, std::byte* out, Index n);

// The conversions to and from float32.
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
    std::memcpy(out, in, n * byte_size(from));
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

// The same loops compiled for wider vectors. float16 uses the processor's own instructions.
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

// Older compilers' __builtin_cpu_supports does not know "f16c".
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
