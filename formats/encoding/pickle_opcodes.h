// What the reader of pickles knows about single opcodes. Internal to formats/encoding/pickle*.
#pragma once

#include <cstddef>
#include <string_view>

#include "formats/encoding/pickle.h"

namespace reshard::pickle::internal {

// The name in Lib/pickletools.py; empty for opcodes that are not read here.
std::string_view opcode_name(unsigned char op);

// What a leaf's opcode is followed by.
struct Leaf {
  Kind kind;
  std::size_t length_width;  // bytes that say how many payload bytes follow; 0: `fixed` bytes follow
  std::size_t fixed;
};

// Of the opcodes that push a string or a number; the others are not asked about.
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
