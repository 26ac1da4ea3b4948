// SPDX-License-Identifier: Apache-2.0
// GPU instructions that convert between floating-point types, since sm_89, for one or two numbers (PTX ISA, "cvt"). The
// results are still those of elements.h.
//
// The instructions round to nearest, ties to even, and handle denormals and the sign of zero like elements.h: up to the
// largest finite number of the target, both give the same bits. Beyond that they differ: `satfinite`, which is required
// for 8-bit targets, gives 57344 where e5m2 has infinity, and NaNs lose sign and payload. So the instructions are used
// only for vectors in which all numbers are in range, and elements.h converts the others. This only relies on NaNs and
// infinities of a narrow source staying such in float.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "lib/device/elements.h"

namespace reshard {

// The instructions by name. `low` goes to the lower half of a pair.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
struct FloatInstructions {
  static constexpr bool kHere = true;
  RESHARD_HD static std::uint16_t e4m3x2_f32(float low, float high) {
    std::uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  }
  RESHARD_HD static std::uint16_t e5m2x2_f32(float low, float high) {
    std::uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  }
  RESHARD_HD static std::uint32_t f16x2_f32(float low, float high) {
    std::uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  RESHARD_HD static std::uint32_t bf16x2_f32(float low, float high) {
    std::uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  RESHARD_HD static std::uint32_t f16x2_e4m3x2(std::uint16_t pair) {
    std::uint32_t out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(pair));
    return out;
  }
  RESHARD_HD static float f32_f16(std::uint16_t half) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half));
    return out;
  }
};
#else
struct FloatInstructions {
  static constexpr bool kHere = false;
};
#endif

// The largest finite number of each type.
template <class T>
inline constexpr std::uint32_t kLargest = 0x7f7fffff;
template <>
inline constexpr std::uint32_t kLargest<BFloat16> = 0x7f7f0000;
template <>
inline constexpr std::uint32_t kLargest<Float16> = 0x477fe000;  // 65504
template <>
inline constexpr std::uint32_t kLargest<Float8E5M2> = 0x47600000;  // 57344
template <>
inline constexpr std::uint32_t kLargest<Float8E4M3> = 0x43e00000;  // 448

// Two adjacent elements as stored in memory.
template <class T>
using Pair =
    std::conditional_t<sizeof(T) == 1, std::uint16_t, std::conditional_t<sizeof(T) == 2, std::uint32_t, std::uint64_t>>;

template <class Instructions, class From>
RESHARD_HD void widen_pair(Pair<From> pair, float* out) {
  if constexpr (std::is_same_v<From, float>) {
    out[0] = std::bit_cast<float>(static_cast<std::uint32_t>(pair));
    out[1] = std::bit_cast<float>(static_cast<std::uint32_t>(pair >> 32));
  } else if constexpr (std::is_same_v<From, BFloat16>) {
    out[0] = std::bit_cast<float>(pair << 16);
    out[1] = std::bit_cast<float>(pair & 0xffff0000u);
  } else {
    std::uint32_t halves = 0;
    if constexpr (std::is_same_v<From, Float16>) {
      halves = pair;
    } else if constexpr (std::is_same_v<From, Float8E4M3>) {
      halves = Instructions::f16x2_e4m3x2(pair);
    } else {  // e5m2 is the upper half of float16
      halves = (std::uint32_t{pair} & 0xff00u) << 16 | (std::uint32_t{pair} & 0xffu) << 8;
    }
    out[0] = Instructions::f32_f16(static_cast<std::uint16_t>(halves & 0xffff));
    out[1] = Instructions::f32_f16(static_cast<std::uint16_t>(halves >> 16));
  }
}

template <class Instructions, class To>
RESHARD_HD Pair<To> narrow_pair(const float* in) {
  if constexpr (std::is_same_v<To, float>) {
    return std::uint64_t{std::bit_cast<std::uint32_t>(in[1])} << 32 | std::bit_cast<std::uint32_t>(in[0]);
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    return Instructions::bf16x2_f32(in[0], in[1]);
  } else if constexpr (std::is_same_v<To, Float16>) {
    return Instructions::f16x2_f32(in[0], in[1]);
  } else if constexpr (std::is_same_v<To, Float8E5M2>) {
    return Instructions::e5m2x2_f32(in[0], in[1]);
  } else {
    return Instructions::e4m3x2_f32(in[0], in[1]);
  }
}

// Whether the instructions exist and help: bfloat16 to float is only a shift.
template <class Instructions, class From, class To>
inline constexpr bool kHasInstructions =
    Instructions::kHere && !std::is_same_v<From, double> && !std::is_same_v<To, double> &&
    !(std::is_same_v<From, BFloat16> && std::is_same_v<To, float>);

// Converts kPairs pairs. Returns false if a number is a NaN or exceeds the range of To, so that elements.h must convert
// them.
template <class Instructions, class From, class To, int kPairs>
RESHARD_HD bool convert_by_instructions(const Pair<From>* in, Pair<To>* out) {
  const float largest = std::bit_cast<float>(kLargest<To>);
  float wide[2 * kPairs];
  bool fit = true;
  RESHARD_UNROLL
  for (int i = 0; i < kPairs; ++i) widen_pair<Instructions, From>(in[i], wide + 2 * i);
  RESHARD_UNROLL
  for (int i = 0; i < 2 * kPairs; ++i) fit = fit & (std::fabs(wide[i]) <= largest);  // false for a NaN
  RESHARD_UNROLL
  for (int i = 0; i < kPairs; ++i) out[i] = narrow_pair<Instructions, To>(wide + 2 * i);
  return fit;
}

}  // namespace reshard
