// The input of a fuzz target as an unnamed file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/base/file.h"
#include "tests/fuzz/fuzz_target.h"

namespace reshard {

// Returns the same file at each call, with these bytes and no others.
inline const File& input_file(const std::uint8_t* data, std::size_t size) {
  static const File file = *File::create_in_memory();
  require(file.set_length(static_cast<Index>(size)).has_value());
  require(file.write_at(0, {reinterpret_cast<const std::byte*>(data), size}).has_value());
  return file;
}

}  // namespace reshard
