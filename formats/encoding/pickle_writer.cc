#include "formats/encoding/pickle_writer.h"

#include <bit>
#include <cassert>

namespace reshard::pickle {
namespace {

void append_little_endian(std::string& out, std::uint64_t v, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(v >> (8 * i));
}

}  // namespace

PickleWriter::PickleWriter() : out_("\x80\x02", 2) {}

void PickleWriter::integer(Index v) {
  if (v >= 0 && v < 256) {
    op('K');
    append_little_endian(out_, static_cast<std::uint64_t>(v), 1);
  } else if (v >= 0 && v < 65536) {
    op('M');
    append_little_endian(out_, static_cast<std::uint64_t>(v), 2);
  } else if (v >= INT32_MIN && v <= INT32_MAX) {
    op('J');
    append_little_endian(out_, static_cast<std::uint64_t>(v), 4);
  } else {
    int bytes = 5;  // the fewest in which the sign still shows
    while (bytes < 8 && (v >> (8 * bytes - 1)) != 0 && (v >> (8 * bytes - 1)) != -1) ++bytes;
    op('\x8a');
    out_ += static_cast<char>(bytes);
    append_little_endian(out_, static_cast<std::uint64_t>(v), bytes);
  }
}

void PickleWriter::number(double v) {
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(v);
  op('G');
  for (int shift = 56; shift >= 0; shift -= 8) out_ += static_cast<char>(bits >> shift);
}

void PickleWriter::text(std::string_view s) {
  assert(s.size() <= UINT32_MAX);
  op('X');
  append_little_endian(out_, s.size(), 4);
  out_ += s;
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  op('c');
  out_.append(module).append(1, '\n').append(name).append(1, '\n');
}

void PickleWriter::shared_text(std::string_view s) {
  const auto [it, is_new] = shared_.try_emplace("X" + std::string(s), next_memo_);
  if (!is_new) return get(it->second);
  text(s);
  put();
}

void PickleWriter::shared_global(std::string_view module, std::string_view name) {
  const auto [it, is_new] = shared_.try_emplace("c" + std::string(module) + "\n" + std::string(name), next_memo_);
  if (!is_new) return get(it->second);
  global(module, name);
  put();
}

void PickleWriter::tuple_of_last(int n) {
  assert(n >= 1 && n <= 3);
  op(static_cast<char>(0x84 + n));
}

void PickleWriter::integers(std::span<const Index> v) {
  if (v.empty()) return empty_tuple();
  if (v.size() > 3) mark();
  for (Index i : v) integer(i);
  if (v.size() > 3) return tuple_from_mark();
  tuple_of_last(static_cast<int>(v.size()));
}

std::uint32_t PickleWriter::put() {
  const std::uint32_t memo = next_memo_++;
  op(memo < 256 ? 'q' : 'r');
  append_little_endian(out_, memo, memo < 256 ? 1 : 4);
  return memo;
}

void PickleWriter::get(std::uint32_t memo) {
  op(memo < 256 ? 'h' : 'j');
  append_little_endian(out_, memo, memo < 256 ? 1 : 4);
}

std::string PickleWriter::finish() && {
  op('.');
  return std::move(out_);
}

}  // namespace reshard::pickle
