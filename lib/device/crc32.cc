#include "lib/device/crc32.h"

#include <isa-l/crc.h>
#include <zlib.h>

namespace reshard {

std::uint32_t crc32(std::uint32_t crc, Bytes data) {
  return crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(data.data()), data.size());
}

std::uint32_t crc32_combine(std::uint32_t a, std::uint32_t b, Index length_b) {
  static_assert(sizeof(z_off_t) == sizeof(Index));
  return static_cast<std::uint32_t>(::crc32_combine(a, b, length_b));
}

}  // namespace reshard
