// SPDX-License-Identifier: Apache-2.0
// Returns zip's CRC-32 (reflected polynomial 0xEDB88320, with initial and final inversion) of `data`, continuing from
// `crc`: the CRC of nothing is 0, and crc32(crc32(0, a), b) is the CRC of a followed by b.
#pragma once

#include <cstdint>

#include "lib/base/cursor.h"

namespace reshard {

std::uint32_t crc32(std::uint32_t crc, Bytes data);

// CRC-32C, the reflected polynomial 0x82F63B78 (Castagnoli). The CRC of nothing is 0, and a CRC continues with the next
// piece, as above.
std::uint32_t crc32c(std::uint32_t crc, Bytes data);

// Returns the CRC of a followed by b, given their CRCs and b's length in bytes (>= 0).
std::uint32_t crc32_combine(std::uint32_t a, std::uint32_t b, Index length_b);

}  // namespace reshard
