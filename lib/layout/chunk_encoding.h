// How the stored bytes of a chunk become the bytes of its elements: the filters they went through, in the order in
// which a writer applied them. lib/device/codec.h undoes them.
#pragma once

#include <vector>

#include "lib/base/checked.h"

namespace reshard {

struct ChunkFilter {
  enum class Kind {
    kShuffle,     // the first bytes of all elements, then the second ones, ...; a last part of an element stays behind
    kDeflate,     // a zlib stream (RFC 1950)
    kZstd,        // one zstd frame (RFC 8878)
    kFletcher32,  // four bytes behind the others: their checksum
  };
  Kind kind = Kind::kShuffle;
  Index unit = 1;  // bytes of an element, for kShuffle

  friend bool operator==(const ChunkFilter&, const ChunkFilter&) = default;
};

struct ChunkEncoding {
  std::vector<ChunkFilter> filters;
  Index decoded_bytes = 0;  // of the whole chunk

  friend bool operator==(const ChunkEncoding&, const ChunkEncoding&) = default;
};

}  // namespace reshard
