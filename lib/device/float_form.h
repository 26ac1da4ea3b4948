// Floating-point formats as their bits: where infinities begin, and what a magnitude is worth. For looking at values
// without making numbers of them (health.h).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace reshard {

// A floating-point format of one sign bit, whose magnitudes are ordered as their bits are.
struct FloatForm {
  int bits = 0;
  int mantissa = 0;           // bits
  int bias = 0;               // of the exponent
  std::uint64_t special = 0;  // the lowest magnitude that is not finite
  bool infinity = true;       // whether that is the infinity; without one, all from there on are NaN

  constexpr std::uint64_t magnitude_mask() const { return (std::uint64_t{1} << (bits - 1)) - 1; }
};
inline constexpr FloatForm kDouble = {64, 52, 1023, 0x7ff0000000000000, true};
inline constexpr FloatForm kSingle = {32, 23, 127, 0x7f800000, true};
inline constexpr FloatForm kHalf = {16, 10, 15, 0x7c00, true};
inline constexpr FloatForm kBrain = {16, 7, 127, 0x7f80, true};
inline constexpr FloatForm kE4M3 = {8, 3, 7, 0x7f, false};
inline constexpr FloatForm kE5M2 = {8, 2, 15, 0x7c, true};
// Their one NaN is the pattern of a negative zero; every magnitude is finite.
inline constexpr FloatForm kE4M3Fnuz = {8, 3, 8, 0x80, false};
inline constexpr FloatForm kE5M2Fnuz = {8, 2, 16, 0x80, false};

// A finite magnitude as a number.
inline double value_of(const FloatForm& form, std::uint64_t magnitude) {
  const std::uint64_t exponent = magnitude >> form.mantissa;
  const std::uint64_t fraction = magnitude & ((std::uint64_t{1} << form.mantissa) - 1);
  if (exponent == 0) return std::ldexp(static_cast<double>(fraction), 1 - form.bias - form.mantissa);
  const auto rebias = static_cast<std::uint64_t>(kDouble.bias - form.bias);
  return std::bit_cast<double>(((exponent + rebias) << kDouble.mantissa) | fraction
                                                                               << (kDouble.mantissa - form.mantissa));
}

}  // namespace reshard
