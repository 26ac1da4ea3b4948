// Implements the instructions of lib/device/cuda/float_instructions.h in plain arithmetic, as the PTX ISA describes
// them. If the ISA leaves a NaN's bits open, or they differ from those in elements.h, the result deliberately does not
// look like a NaN, so that code which relies on such bits fails its test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace reshard {

struct DocumentedInstructions {
  static constexpr bool kHere = true;

  // Satfinite: values above the largest finite number become that number.
  static std::uint16_t e4m3x2_f32(float low, float high) {
    return static_cast<std::uint16_t>(to_8_bits(low, 3, 7, 448) | to_8_bits(high, 3, 7, 448) << 8);
  }
  static std::uint16_t e5m2x2_f32(float low, float high) {
    return static_cast<std::uint16_t>(to_8_bits(low, 2, 15, 57344) | to_8_bits(high, 2, 15, 57344) << 8);
  }
  static std::uint32_t f16x2_f32(float low, float high) {
    return to_16_bits(low, 10, 15) | to_16_bits(high, 10, 15) << 16;
  }
  static std::uint32_t bf16x2_f32(float low, float high) {
    return to_16_bits(low, 7, 127) | to_16_bits(high, 7, 127) << 16;
  }
  static std::uint32_t f16x2_e4m3x2(std::uint16_t pair) {
    return half_of_e4m3(pair & 0xff) | half_of_e4m3(pair >> 8) << 16;
  }
  static float f32_f16(std::uint16_t half) {
    const int exponent = half >> 10 & 0x1f, mantissa = half & 0x3ff;
    double v = 0;
    if (exponent == 0x1f) {
      v = mantissa == 0 ? INFINITY : NAN;
    } else {
      v = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    }
    return static_cast<float>((half & 0x8000) != 0 ? -v : v);
  }

 private:
  // Returns the bits of a number in range, without its sign, rounded to the nearest, ties to even.
  static std::uint32_t magnitude_bits(double v, int mantissa, int bias) {
    if (v == 0) return 0;
    const int exponent = std::max(std::ilogb(v), 1 - bias);
    const double units = std::nearbyint(std::ldexp(v, mantissa - exponent));
    return (static_cast<std::uint32_t>(exponent + bias - 1) << mantissa) + static_cast<std::uint32_t>(units);
  }
  static std::uint32_t to_8_bits(float v, int mantissa, int bias, double largest) {
    if (std::isnan(v)) return 0x2a;
    const std::uint32_t sign = std::signbit(v) ? 0x80 : 0;
    return sign | magnitude_bits(std::min<double>(std::fabs(v), largest), mantissa, bias);
  }
  static std::uint32_t to_16_bits(float v, int mantissa, int bias) {
    if (std::isnan(v)) return 0x2a2a;
    const std::uint32_t sign = std::signbit(v) ? 0x8000 : 0;
    const std::uint32_t infinity = static_cast<std::uint32_t>(2 * bias + 1) << mantissa;
    if (std::isinf(v)) return sign | infinity;
    return sign | std::min(magnitude_bits(std::fabs(v), mantissa, bias), infinity);
  }
  static std::uint32_t half_of_e4m3(int byte) {
    const int exponent = byte >> 3 & 0xf, mantissa = byte & 7;
    if ((byte & 0x7f) == 0x7f) return 0x7fff;
    const double v = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return to_16_bits(static_cast<float>((byte & 0x80) != 0 ? -v : v), 10, 15);
  }
};

}  // namespace reshard
