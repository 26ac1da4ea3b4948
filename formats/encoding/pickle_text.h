// The bytes of a pickle: a string, or those of a file, which are read as far as they are asked for.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "lib/base/file.h"
#include "lib/base/result.h"

namespace reshard::pickle::internal {

class Text {
 public:
  Text() = default;
  explicit Text(std::string bytes);
  // Those of `file`, which outlives every fill(). They get addresses, and memory as they are read. An error where there
  // are no addresses for them.
  static Result<Text> of(const File& file);

  const unsigned char* data() const { return mapped_ ? mapped_.get() : whole(); }
  std::size_t size() const { return size_; }
  std::size_t filled() const { return filled_; }  // bytes that are there, but for those that were released
  // Reads on until `end` bytes are there, or all of them.
  Status fill(std::size_t end);

  // Of a file, what is no longer looked at gives its memory back: whole pages of [begin, end).
  void release(std::size_t begin, std::size_t end);
  // Copies bytes to where nothing is released, and says where that is, behind the end. Nothing where there is no room.
  std::optional<std::size_t> keep(std::size_t begin, std::size_t end);

 private:
  const unsigned char* whole() const { return reinterpret_cast<const unsigned char*>(whole_.data()); }

  std::string whole_;
  const File* file_ = nullptr;
  std::shared_ptr<unsigned char> mapped_;  // null: all of it is in whole_
  std::size_t size_ = 0, filled_ = 0;
  std::size_t kept_ = 0, room_ = 0;  // where the next copy goes, and where the room for them ends
};

}  // namespace reshard::pickle::internal
