// SPDX-License-Identifier: Apache-2.0
// How the stored bytes of a chunk decode to its elements: the filters, in the order in which the writer applied them.
// lib/device/codec.h reverses them.
#pragma once

#include <vector>

#include "lib/base/checked.h"

namespace reshard {

struct ChunkFilter {
  enum class Kind {
    // The first bytes of all elements, then all second bytes, and so on. A partial element at the end is left in place.
    kShuffle,
    kDeflate,     // a zlib stream (RFC 1950)
    kGzip,        // a gzip member (RFC 1952)
    kZstd,        // one zstd frame (RFC 8878)
    kFletcher32,  // a checksum of four bytes after the data
    kCrc32c,      // a CRC-32C of four bytes after the data, little-endian
  };
  Kind kind = Kind::kShuffle;
  Index unit = 1;  // bytes per element, for kShuffle

  friend bool operator==(const ChunkFilter&, const ChunkFilter&) = default;
};

struct ChunkEncoding {
  std::vector<ChunkFilter> filters;
  Index decoded_bytes = 0;  // of the whole chunk

  friend bool operator==(const ChunkEncoding&, const ChunkEncoding&) = default;
};

}  // namespace reshard
