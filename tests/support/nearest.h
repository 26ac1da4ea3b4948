// Rounds to nearest by the definition: of all values of an 8-bit or 16-bit type, takes the nearest, and of two equally
// near ones the one with even bits. The values are listed and searched; nothing here computes with the bits of a float.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/layout/dtype.h"

namespace reshard {

class NearestNumbers {
 public:
  explicit NearestNumbers(DType to) : to_(to), bytes_(static_cast<std::size_t>(byte_size(to))) {
    const int mantissa = to == DType::kBFloat16 ? 7 : to == DType::kFloat16 ? 10 : to == DType::kFloat8E5M2 ? 2 : 3;
    const int bias = to == DType::kBFloat16 ? 127 : to == DType::kFloat8E4M3 ? 7 : 15;
    // Infinity replaces the next number. float8_e4m3fn has no infinity: values above 448, its largest number, become
    // 448.
    const int last = to == DType::kFloat8E4M3 ? 0x7e : (2 * bias + 1) << mantissa;
    const auto number = [&](int bits) {
      const int exponent = bits >> mantissa, fraction = bits & ((1 << mantissa) - 1);
      return exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                           : std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
    };
    for (int bits = 0; bits < last; ++bits)
      middle_.push_back(static_cast<float>((number(bits) + number(bits + 1)) / 2));  // exact in a float
  }

  // Writes the rounded values of the `n` floats whose bits are `first` and up, all of one sign.
  void fill(std::uint32_t first, std::size_t n, std::byte* out) const {
    if (bytes_ == 1) {
      fill_as<std::uint8_t>(first, n, out);
    } else {
      fill_as<std::uint16_t>(first, n, out);
    }
  }

 private:
  template <class Bits>
  void fill_as(std::uint32_t first, std::size_t n, std::byte* out) const {
    const auto sign = static_cast<Bits>(first >> 31 << (8 * sizeof(Bits) - 1));
    const std::uint32_t lowest = first & 0x7fffffffu;
    auto next = std::lower_bound(middle_.begin(), middle_.end(),
                                 std::bit_cast<float>(lowest));  // the first midpoint at or above it
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t magnitude = lowest + static_cast<std::uint32_t>(i);
      const auto value = std::bit_cast<float>(magnitude);
      std::uint32_t bits = 0;
      if (std::isnan(value)) {
        bits = nan(magnitude, sign);
      } else {
        while (next != middle_.end() && *next < value) ++next;
        bits = static_cast<std::uint32_t>(next - middle_.begin());
        if (next != middle_.end() && *next == value) bits += bits % 2;
        bits |= sign;
      }
      const auto narrow = static_cast<Bits>(bits);
      std::memcpy(out + i * sizeof(Bits), &narrow, sizeof(Bits));
    }
  }

  // Returns torch's NaN: a single one without a sign for bfloat16; a quiet one with the same sign and upper bits for
  // float16; all ones for float8.
  std::uint32_t nan(std::uint32_t magnitude, std::uint32_t sign) const {
    if (to_ == DType::kBFloat16) return 0x7fc0;
    if (to_ == DType::kFloat16) return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);
    return sign | 0x7f;
  }

  DType to_;
  std::size_t bytes_;
  std::vector<float> middle_;  // midpoints between the values with bits n and n + 1
};

// Returns the bits of `n` floats, beginning with `first`.
inline std::vector<std::uint32_t> floats_from(std::uint32_t first, std::size_t n) {
  std::vector<std::uint32_t> out(n);
  for (std::size_t i = 0; i < n; ++i) out[i] = first + static_cast<std::uint32_t>(i);
  return out;
}

}  // namespace reshard
