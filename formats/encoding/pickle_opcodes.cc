// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/pickle_opcodes.h"

#include <array>
#include <optional>

namespace reshard::pickle::internal {
namespace {

// The size of an opcode's argument, without a payload whose length the argument gives.
struct Argument {
  enum class Form { kUnknown, kFixed, kCounted, kLines } form = Form::kUnknown;
  std::size_t n = 0;  // bytes, or lines
};
using enum Argument::Form;

constexpr Argument leaf(unsigned char op) {
  const Leaf of = leaf_of(op);
  return of.length_width == 0 ? Argument{kFixed, of.fixed} : Argument{kCounted, of.length_width};
}

// An opcode under its name in Lib/pickletools.py.
struct Opcode {
  unsigned char code;
  std::string_view name;
  Argument argument;
};

constexpr Opcode kOpcodes[] = {
    {0x80, "PROTO", {kFixed, 1}},        {0x95, "FRAME", {kFixed, 8}},       {'.', "STOP", {kFixed, 0}},
    {'(', "MARK", {kFixed, 0}},          {'0', "POP", {kFixed, 0}},          {'1', "POP_MARK", {kFixed, 0}},
    {'2', "DUP", {kFixed, 0}},           {'N', "NONE", {kFixed, 0}},         {0x88, "NEWTRUE", {kFixed, 0}},
    {0x89, "NEWFALSE", {kFixed, 0}},     {'K', "BININT1", {kFixed, 1}},      {'M', "BININT2", {kFixed, 2}},
    {'J', "BININT", leaf('J')},          {0x8a, "LONG1", leaf(0x8a)},        {0x8b, "LONG4", leaf(0x8b)},
    {'G', "BINFLOAT", leaf('G')},        {'X', "BINUNICODE", leaf('X')},     {0x8c, "SHORT_BINUNICODE", leaf(0x8c)},
    {0x8d, "BINUNICODE8", leaf(0x8d)},   {'T', "BINSTRING", leaf('T')},      {'U', "SHORT_BINSTRING", leaf('U')},
    {'B', "BINBYTES", leaf('B')},        {'C', "SHORT_BINBYTES", leaf('C')}, {0x8e, "BINBYTES8", leaf(0x8e)},
    {0x96, "BYTEARRAY8", leaf(0x96)},    {')', "EMPTY_TUPLE", {kFixed, 0}},  {0x85, "TUPLE1", {kFixed, 0}},
    {0x86, "TUPLE2", {kFixed, 0}},       {0x87, "TUPLE3", {kFixed, 0}},      {'t', "TUPLE", {kFixed, 0}},
    {']', "EMPTY_LIST", {kFixed, 0}},    {'a', "APPEND", {kFixed, 0}},       {'e', "APPENDS", {kFixed, 0}},
    {'l', "LIST", {kFixed, 0}},          {'}', "EMPTY_DICT", {kFixed, 0}},   {'s', "SETITEM", {kFixed, 0}},
    {'u', "SETITEMS", {kFixed, 0}},      {'d', "DICT", {kFixed, 0}},         {0x8f, "EMPTY_SET", {kFixed, 0}},
    {0x90, "ADDITEMS", {kFixed, 0}},     {0x91, "FROZENSET", {kFixed, 0}},   {'c', "GLOBAL", {kLines, 2}},
    {0x93, "STACK_GLOBAL", {kFixed, 0}}, {'R', "REDUCE", {kFixed, 0}},       {0x81, "NEWOBJ", {kFixed, 0}},
    {0x92, "NEWOBJ_EX", {kFixed, 0}},    {'b', "BUILD", {kFixed, 0}},        {'Q', "BINPERSID", {kFixed, 0}},
    {'q', "BINPUT", {kFixed, 1}},        {'r', "LONG_BINPUT", {kFixed, 4}},  {'p', "PUT", {kLines, 1}},
    {0x94, "MEMOIZE", {kFixed, 0}},      {'h', "BINGET", {kFixed, 1}},       {'j', "LONG_BINGET", {kFixed, 4}},
    {'g', "GET", {kLines, 1}},
};

// The rows by code; unknown codes have no name.
constexpr std::array<Opcode, 256> by_code() {
  std::array<Opcode, 256> out{};
  for (const Opcode& opcode : kOpcodes) out[opcode.code] = opcode;
  return out;
}
constexpr std::array<Opcode, 256> kByCode = by_code();

}  // namespace

std::string_view opcode_name(unsigned char op) { return kByCode[op].name; }

}  // namespace reshard::pickle::internal

namespace reshard::pickle {

std::optional<Index> length_of(std::string_view bytes) {
  using internal::Argument;
  std::size_t pos = 0;
  while (pos < bytes.size()) {
    const auto op = static_cast<unsigned char>(bytes[pos++]);
    const Argument argument = internal::kByCode[op].argument;
    if (op == '.' || argument.form == Argument::Form::kUnknown) return static_cast<Index>(pos);
    if (argument.form == Argument::Form::kLines) {
      for (std::size_t line = 0; line < argument.n; ++line) {
        const std::size_t end = bytes.find('\n', pos);
        if (end == std::string_view::npos) return std::nullopt;
        pos = end + 1;
      }
      continue;
    }
    if (argument.n > bytes.size() - pos) return std::nullopt;
    std::uint64_t payload = 0;
    if (argument.form == Argument::Form::kCounted)
      payload = internal::little_endian(reinterpret_cast<const unsigned char*>(bytes.data()) + pos, argument.n);
    pos += argument.n;
    if (payload > bytes.size() - pos) return std::nullopt;
    pos += payload;
  }
  return std::nullopt;
}

}  // namespace reshard::pickle
