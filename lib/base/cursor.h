// A bounded reader over bytes in memory that names what it reads.
//
// Each read says what it is after, so that an error tells the place and the thing:
//   path@offset: central directory entry: expected 46 bytes, got 12 to the end
// Lengths are compared with what is left before anything is added to a position.
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

// "path@0x1f40", the way every message names a place in a file.
std::string at(std::string_view path, Index offset);

class Cursor {
 public:
  // `path` and `base` (the offset of bytes[0] in that file) only serve error messages. The cursor refers to both
  // `bytes` and `path`; they must outlive it.
  Cursor(Bytes bytes, std::string_view path, Index base = 0) : bytes_(bytes), path_(path), base_(base) {}

  Index left() const { return static_cast<Index>(bytes_.size() - pos_); }
  Index position() const { return static_cast<Index>(pos_); }  // from the first byte of this cursor
  Index offset() const { return base_ + position(); }          // in the file
  bool done() const { return pos_ == bytes_.size(); }

  // An error at the current place.
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

  // A little-endian integer of T's width.
  template <class T>
  Result<T> read(std::string_view what) {
    Bytes b = TRY(take(static_cast<Index>(sizeof(T)), what));
    T v;
    std::memcpy(&v, b.data(), sizeof(T));  // every machine this runs on is little-endian; checked in cursor.cc
    return v;
  }

  // A cursor of its own over the next n bytes, which this one steps over.
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
