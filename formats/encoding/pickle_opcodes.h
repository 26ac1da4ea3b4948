// SPDX-License-Identifier: Apache-2.0
// Names and operands of pickle opcodes. Internal to formats/encoding/pickle*.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "formats/encoding/pickle.h"

namespace reshard::pickle::internal {

// Returns the opcode's name in Lib/pickletools.py, or an empty text for an unsupported opcode.
std::string_view opcode_name(unsigned char op);

// Returns the number in n <= 8 little-endian bytes. The usual widths are single loads, because a load that follows a
// copy of single bytes stalls.
inline std::uint64_t little_endian(const unsigned char* p, std::size_t n) {
  const auto load = [&](auto v) {
    std::memcpy(&v, p, sizeof v);
    return std::uint64_t{v};
  };
  if (n == 1) return *p;
  if (n == 4) return load(std::uint32_t{0});
  if (n == 8) return load(std::uint64_t{0});
  if (n == 2) return load(std::uint16_t{0});
  std::uint64_t v = 0;
  std::memcpy(&v, p, n);
  return v;
}

// The operand of an opcode that pushes a string or a number.
struct Leaf {
  Kind kind;
  std::size_t length_width;  // bytes of the length field before the payload; 0: the payload has `fixed` bytes
  std::size_t fixed;
};

// Returns the operand of an opcode that pushes a string or a number. Must not be called for other opcodes.
constexpr Leaf leaf_of(unsigned char op) {
  switch (op) {
    case 'J':
      return {Kind::kInt, 0, 4};
    case 0x8a:
      return {Kind::kInt, 1, 0};
    case 0x8b:
      return {Kind::kInt, 4, 0};
    case 'G':
      return {Kind::kFloat, 0, 8};
    case 'X':
      return {Kind::kString, 4, 0};
    case 0x8c:
      return {Kind::kString, 1, 0};
    case 0x8d:
      return {Kind::kString, 8, 0};
    case 'T':
      return {Kind::kString, 4, 0};
    case 'U':
      return {Kind::kString, 1, 0};
    case 'B':
      return {Kind::kBytes, 4, 0};
    case 'C':
      return {Kind::kBytes, 1, 0};
    case 0x8e:
      return {Kind::kBytes, 8, 0};
    default:
      return {Kind::kBytes, 8, 0};  // BYTEARRAY8
  }
}

}  // namespace reshard::pickle::internal
