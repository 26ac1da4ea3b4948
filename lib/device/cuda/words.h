// SPDX-License-Identifier: Apache-2.0
// The words that kernels read and write, and division by numbers known before a kernel starts.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lib/base/checked.h"
#include "lib/device/host_device.h"

namespace reshard {

// N bytes (1, 2, 4, 8 or 16), moved by one instruction.
template <int N>
struct alignas(N) Word {
  std::uint8_t bytes[N];
};
template <>
struct alignas(2) Word<2> {
  std::uint16_t half;
};
template <>
struct alignas(4) Word<4> {
  std::uint32_t single;
};
template <>
struct alignas(8) Word<8> {
  std::uint32_t single[2];
};
template <>
struct alignas(16) Word<16> {
  std::uint32_t single[4];
};

// Load and store at an address that is a multiple of sizeof(T).
template <class T>
RESHARD_HD T load_aligned(const std::byte* at) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const T*>(at);
#else
  T v;
  std::memcpy(&v, at, sizeof(T));
  return v;
#endif
}
template <class T>
RESHARD_HD void store_aligned(std::byte* at, const T& v) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<T*>(at) = v;
#else
  std::memcpy(at, &v, sizeof(T));
#endif
}

// Load and store at any address, byte by byte.
template <class T>
RESHARD_HD T load_any(const std::byte* at) {
  T v;
  std::memcpy(&v, at, sizeof(T));
  return v;
}
template <class T>
RESHARD_HD void store_any(std::byte* at, const T& v) {
  std::memcpy(at, &v, sizeof(T));
}

inline bool is_aligned(const void* at, Index bytes) { return reinterpret_cast<std::uintptr_t>(at) % bytes == 0; }

// The largest number that a Divisor can divide. Larger jobs are split.
inline constexpr Index kMaxCount = (Index{1} << 31) - 1;

// Division of numbers up to kMaxCount by a number d, 1 <= d <= kMaxCount, with one multiplication; a GPU's own division
// takes dozens of instructions. With 2^(s-1) < d <= 2^s, multiplying by 2^32 + m = ceil(2^(32+s) / d) and dropping 32 +
// s bits is exact.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(Index d) : divisor_(static_cast<std::uint32_t>(d)) {
    const int s = std::bit_width(divisor_ - 1);
    multiplier_ =
        static_cast<std::uint32_t>(((std::uint64_t{1} << 32) * ((std::uint64_t{1} << s) - divisor_)) / divisor_ + 1);
    shift_ = static_cast<std::uint32_t>(s);
  }

  // Returns n / d and sets n to n % d.
  RESHARD_HD std::uint32_t divide(std::uint32_t& n) const {
    const auto high = static_cast<std::uint32_t>((std::uint64_t{n} * multiplier_) >> 32);
    const std::uint32_t quotient = (high + n) >> shift_;
    n -= quotient * divisor_;
    return quotient;
  }

 private:
  std::uint32_t divisor_ = 1;
  std::uint32_t multiplier_ = 1;
  std::uint32_t shift_ = 0;
};

}  // namespace reshard
