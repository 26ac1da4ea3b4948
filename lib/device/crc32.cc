// SPDX-License-Identifier: Apache-2.0
#include "lib/device/crc32.h"

#include <isa-l/crc.h>
#include <zlib.h>

#include <algorithm>

namespace reshard {

std::uint32_t crc32(std::uint32_t crc, Bytes data) {
  return crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(data.data()), data.size());
}

std::uint32_t crc32c(std::uint32_t crc, Bytes data) {
  // The library neither inverts nor takes lengths beyond an int; nor does it write to the buffer.
  constexpr std::size_t kMost = std::size_t{1} << 30;
  crc = ~crc;
  while (!data.empty()) {
    const Bytes piece = data.first(std::min(data.size(), kMost));
    auto* const bytes = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(piece.data()));
    crc = crc32_iscsi(bytes, static_cast<int>(piece.size()), crc);
    data = data.subspan(piece.size());
  }
  return ~crc;
}

std::uint32_t crc32_combine(std::uint32_t a, std::uint32_t b, Index length_b) {
  static_assert(sizeof(z_off_t) == sizeof(Index));
  return static_cast<std::uint32_t>(::crc32_combine(a, b, length_b));
}

}  // namespace reshard
