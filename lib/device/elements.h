// SPDX-License-Identifier: Apache-2.0
// The floating-point element types, each defined by its conversions to and from float: the arithmetic of convert.h for
// every processor.
//
// So that compilers vectorise it, the code has no branches and no floating-point operation whose result is only
// sometimes used.
#pragma once

#include <bit>
#include <cstdint>

#include "lib/device/host_device.h"

namespace reshard {

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

RESHARD_HD float widen(BFloat16 v) { return std::bit_cast<float>(static_cast<std::uint32_t>(v.bits) << 16); }

// A denormal m * 2^-24 is computed as (2^-14 + m * 2^-24) - 2^-14. Infinities and NaNs get their exponent afterwards.
RESHARD_HD float widen(Float16 v) {
  constexpr std::int32_t kSmallest = 1 << 23;  // below it, `shifted` is a denormal
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

// A float8_e5m2 is the upper half of a float16.
RESHARD_HD float widen(Float8E5M2 v) { return widen(Float16{static_cast<std::uint16_t>(v.bits << 8)}); }

// There are no infinities, and all ones is the only NaN. A denormal m * 2^-9 is computed as (2^-6 + m * 2^-9) - 2^-6.
RESHARD_HD float widen(Float8E4M3 v) {
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

// Converts a NaN as a processor does when it changes the width: sign and upper bits are kept, and the quiet bit is set.
// Needed explicitly on GPUs, which turn every NaN into the same one.
RESHARD_HD float nan_to_float(std::uint64_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits >> 32 & 0x80000000u) | 0x7fc00000u |
                              static_cast<std::uint32_t>(bits >> 29 & 0x3fffffu));
}
RESHARD_HD double nan_to_double(std::uint32_t bits) {
  return std::bit_cast<double>(std::uint64_t{bits & 0x80000000u} << 32 | 0x7ff8000000000000u |
                               std::uint64_t{bits & 0x3fffffu} << 29);
}

RESHARD_HD float widen(double v) {
#ifdef __CUDA_ARCH__
  if (v != v) return nan_to_float(std::bit_cast<std::uint64_t>(v));
#endif
  return static_cast<float>(v);
}

RESHARD_HD void narrow(float v, BFloat16& out) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = static_cast<std::uint16_t>((nan ? 0x7fc00000 : rounded) >> 16);
}

// Rounds with the float adder: a float16 of exponent e is a multiple of 2^(e-10), which is the value of the last bit of
// a float next to 2^(e+13). Denormals use e = -14. Values of 65536 and more are clamped to 65536, whose pattern is that
// of infinity.
RESHARD_HD void narrow(float v, Float16& out) {
  constexpr std::int32_t kSmallest = (127 - 14) << 23;  // 2^-14, the smallest normal number
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

// Narrows to 8 bits in the same way. Values of kTooLarge and more become its pattern; a NaN becomes all ones.
template <int kMantissa, int kBias, std::int32_t kTooLarge>
RESHARD_HD std::uint8_t narrow_to_8(float v) {
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
// 448 is the largest; infinity is clamped to it too.
RESHARD_HD void narrow(float v, Float8E4M3& out) { out.bits = narrow_to_8<3, 7, (135 << 23) + (6 << 20)>(v); }
// 2^16 has the pattern of infinity.
RESHARD_HD void narrow(float v, Float8E5M2& out) { out.bits = narrow_to_8<2, 15, (127 + 16) << 23>(v); }

RESHARD_HD void narrow(float v, double& out) {
#ifdef __CUDA_ARCH__
  if (v != v) {
    out = nan_to_double(std::bit_cast<std::uint32_t>(v));
    return;
  }
#endif
  out = v;
}

RESHARD_HD float widen(float v) { return v; }
RESHARD_HD void narrow(float v, float& out) { out = v; }

}  // namespace reshard
