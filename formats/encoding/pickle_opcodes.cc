#include "formats/encoding/pickle_opcodes.h"

#include <optional>

#include "formats/encoding/pickle_tree.h"

namespace reshard::pickle::internal {

std::string_view opcode_name(unsigned char op) {
  switch (op) {
    case 0x80:
      return "PROTO";
    case 0x95:
      return "FRAME";
    case '.':
      return "STOP";
    case '(':
      return "MARK";
    case '0':
      return "POP";
    case '1':
      return "POP_MARK";
    case '2':
      return "DUP";
    case 'N':
      return "NONE";
    case 0x88:
      return "NEWTRUE";
    case 0x89:
      return "NEWFALSE";
    case 'K':
      return "BININT1";
    case 'M':
      return "BININT2";
    case 'J':
      return "BININT";
    case 0x8a:
      return "LONG1";
    case 0x8b:
      return "LONG4";
    case 'G':
      return "BINFLOAT";
    case 'X':
      return "BINUNICODE";
    case 0x8c:
      return "SHORT_BINUNICODE";
    case 0x8d:
      return "BINUNICODE8";
    case 'T':
      return "BINSTRING";
    case 'U':
      return "SHORT_BINSTRING";
    case 'B':
      return "BINBYTES";
    case 'C':
      return "SHORT_BINBYTES";
    case 0x8e:
      return "BINBYTES8";
    case 0x96:
      return "BYTEARRAY8";
    case ')':
      return "EMPTY_TUPLE";
    case 0x85:
      return "TUPLE1";
    case 0x86:
      return "TUPLE2";
    case 0x87:
      return "TUPLE3";
    case 't':
      return "TUPLE";
    case ']':
      return "EMPTY_LIST";
    case 'a':
      return "APPEND";
    case 'e':
      return "APPENDS";
    case 'l':
      return "LIST";
    case '}':
      return "EMPTY_DICT";
    case 's':
      return "SETITEM";
    case 'u':
      return "SETITEMS";
    case 'd':
      return "DICT";
    case 0x8f:
      return "EMPTY_SET";
    case 0x90:
      return "ADDITEMS";
    case 0x91:
      return "FROZENSET";
    case 'c':
      return "GLOBAL";
    case 0x93:
      return "STACK_GLOBAL";
    case 'R':
      return "REDUCE";
    case 0x81:
      return "NEWOBJ";
    case 0x92:
      return "NEWOBJ_EX";
    case 'b':
      return "BUILD";
    case 'Q':
      return "BINPERSID";
    case 'q':
      return "BINPUT";
    case 'r':
      return "LONG_BINPUT";
    case 'p':
      return "PUT";
    case 0x94:
      return "MEMOIZE";
    case 'h':
      return "BINGET";
    case 'j':
      return "LONG_BINGET";
    case 'g':
      return "GET";
    default:
      return "";
  }
}

namespace {

// The size of an opcode's argument, without a payload whose length the argument gives.
struct Argument {
  enum class Form { kUnknown, kFixed, kCounted, kLines } form = Form::kUnknown;
  std::size_t n = 0;  // bytes, or lines
};

Argument argument_of(unsigned char op) {
  using enum Argument::Form;
  switch (op) {
    case 'J':
    case 0x8a:
    case 0x8b:
    case 'G':
    case 'X':
    case 0x8c:
    case 0x8d:
    case 'T':
    case 'U':
    case 'B':
    case 'C':
    case 0x8e:
    case 0x96: {
      const Leaf leaf = leaf_of(op);
      return leaf.length_width == 0 ? Argument{kFixed, leaf.fixed} : Argument{kCounted, leaf.length_width};
    }
    case 'K':
    case 'q':
    case 'h':
    case 0x80:
      return {kFixed, 1};
    case 'M':
      return {kFixed, 2};
    case 'r':
    case 'j':
      return {kFixed, 4};
    case 0x95:
      return {kFixed, 8};
    case 'p':
    case 'g':
      return {kLines, 1};
    case 'c':
      return {kLines, 2};
    default:
      return {opcode_name(op).empty() ? kUnknown : kFixed, 0};
  }
}

}  // namespace
}  // namespace reshard::pickle::internal

namespace reshard::pickle {

std::optional<Index> length_of(std::string_view bytes) {
  using internal::Argument;
  std::size_t pos = 0;
  while (pos < bytes.size()) {
    const auto op = static_cast<unsigned char>(bytes[pos++]);
    const Argument argument = internal::argument_of(op);
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
    pos += static_cast<std::size_t>(payload);
  }
  return std::nullopt;
}

}  // namespace reshard::pickle
