// SPDX-License-Identifier: Apache-2.0
// A bounded reader over bytes in memory. Each read names what it reads, for the error message:
//    path@offset: central directory entry: expected 46 bytes, got 12 before the end
// A length is compared with the bytes left before it is added to a position, so positions never overflow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

using Bytes = std::span<const std::byte>;
using MutableBytes = std::span<std::byte>;

inline Bytes as_bytes(std::string_view s) { return {reinterpret_cast<const std::byte*>(s.data()), s.size()}; }
inline std::string_view as_string(Bytes b) { return {reinterpret_cast<const char*>(b.data()), b.size()}; }

// Returns "path@0x1f40", the form in which every message names an offset in a file.
std::string at(std::string_view path, Index offset);

class Cursor {
 public:
  // `path` and `base` (the offset of bytes[0] in that file) are only used in error messages. `bytes` and the text of
  // `path` must outlive the cursor.
  Cursor(Bytes bytes, std::string_view path, Index base = 0) : bytes_(bytes), path_(path), base_(base) {}

  Index left() const { return static_cast<Index>(bytes_.size() - pos_); }
  Index position() const { return static_cast<Index>(pos_); }  // relative to the first byte of this cursor
  Index offset() const { return base_ + position(); }          // in the file
  bool done() const { return pos_ == bytes_.size(); }

  // Returns a corrupt error at the current offset.
  Error error(std::string_view what, std::string_view detail) const;

  Result<Bytes> take(Index n, std::string_view what) {
    if (n < 0 || n > left()) return short_error(n, what);
    Bytes out = bytes_.subspan(pos_, static_cast<std::size_t>(n));
    pos_ += static_cast<std::size_t>(n);
    return out;
  }

  Status skip(Index n, std::string_view what) {
    TRY(take(n, what));
    return {};
  }

  // Reads a little-endian integer of T's width.
  template <class T>
  Result<T> read(std::string_view what) {
    Bytes b = TRY(take(static_cast<Index>(sizeof(T)), what));
    T v;
    std::memcpy(&v, b.data(), sizeof(T));  // little-endian machines only: cursor.cc asserts it
    return v;
  }

  // Returns a cursor over the next n bytes and advances this one past them.
  Result<Cursor> sub(Index n, std::string_view what) {
    Index start = offset();
    Bytes b = TRY(take(n, what));
    return Cursor(b, path_, start);
  }

 private:
  Error short_error(Index wanted, std::string_view what) const;

  Bytes bytes_;
  std::size_t pos_ = 0;
  std::string_view path_;
  Index base_;
};

}  // namespace reshard
