// SPDX-License-Identifier: Apache-2.0
#include "lib/base/cursor.h"

#include <bit>
#include <cinttypes>
#include <cstdio>

#include "lib/base/text.h"

namespace reshard {

static_assert(std::endian::native == std::endian::little, "integers are read in the machine's byte order");

std::string at(std::string_view path, Index offset) {
  char hex[32];
  std::snprintf(hex, sizeof hex, "@0x%" PRIx64, static_cast<std::uint64_t>(offset));
  return std::string(path) + hex;
}

Error Cursor::error(std::string_view what, std::string_view detail) const {
  return corrupt(at(path_, offset()) + ": " + std::string(what) + ": " + std::string(detail));
}

Error Cursor::short_error(Index wanted, std::string_view what) const {
  return error(what, "expected " + bytes_of(wanted) + ", got " + std::to_string(left()) + " before the end");
}

}  // namespace reshard
