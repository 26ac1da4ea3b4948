// SPDX-License-Identifier: Apache-2.0
// The bytes of a pickle: a string, or a file that is read in pieces as needed.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "lib/base/file.h"
#include "lib/base/result.h"

namespace reshard::pickle::internal {

constexpr std::size_t kPlaces = std::size_t{1} << 30;  // positions that a handle can express (pickle_tree.h)

// Bytes with stable addresses.
class Text {
 public:
  Text() = default;
  explicit Text(std::string bytes);
  // Returns the bytes of `file`, which must outlive every fill(). Reserves addresses for all of them; memory is taken
  // as they are read. Fails if the addresses cannot be reserved.
  static Result<Text> of(const File& file);

  const unsigned char* data() const { return mapped_ ? mapped_.get() : whole(); }
  std::size_t size() const { return size_; }
  std::size_t filled() const { return filled_; }  // bytes read so far, including released ones
  // Reads until `end` bytes were read, or all of them.
  Status fill(std::size_t end);

  // Frees the memory of the whole pages in [begin, end), which must not be read again. Does nothing for a string.
  void release(std::size_t begin, std::size_t end);
  // Copies bytes to a place behind the end that is never released, and returns its position. Returns nothing if there
  // is no room.
  std::optional<std::size_t> keep(std::size_t begin, std::size_t end);

 private:
  const unsigned char* whole() const { return reinterpret_cast<const unsigned char*>(whole_.data()); }

  std::string whole_;
  const File* file_ = nullptr;
  std::shared_ptr<unsigned char> mapped_;  // null if the bytes are in whole_
  std::size_t size_ = 0, filled_ = 0;
  std::size_t kept_ = 0, room_ = 0;  // position of the next copy, and the end of the room for copies
};

}  // namespace reshard::pickle::internal
