// SPDX-License-Identifier: Apache-2.0
// Compression of chunks of elements: byte shuffle, zstd, deflate, gzip, and checksums (lib/layout/chunk_encoding.h).
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/layout/chunk_encoding.h"

namespace reshard {

// The largest decoded size of a chunk. Readers refuse larger chunks when they list them.
inline constexpr Index kMaxChunkBytes = Index{64} << 20;

// Groups the i-th bytes of all elements of `unit` bytes; the bytes of an incomplete last element stay at the end. `out`
// must have the size of `in` and not overlap it.
void shuffle_bytes(Bytes in, Index unit, MutableBytes out);
void unshuffle_bytes(Bytes in, Index unit, MutableBytes out);

// Returns HDF5's Fletcher-32 checksum, which is over 16-bit big-endian words.
std::uint32_t fletcher32(Bytes bytes);

// Returns the library's version, "1.5.4".
std::string zstd_version();

// Reverses the filters of chunks. Reuses its buffers, so use one decoder per thread.
class ChunkDecoder {
 public:
  ChunkDecoder();
  ~ChunkDecoder();
  ChunkDecoder(ChunkDecoder&&) noexcept;
  ChunkDecoder& operator=(ChunkDecoder&&) noexcept;

  // Returns the decoded elements of the chunk `stored`, which may be overwritten. The result is valid until the next
  // call. `place` names the chunk in errors. A result that is not encoding.decoded_bytes long is a corrupt error;
  // buffers never exceed that size plus checksums.
  Result<MutableBytes> decode(MutableBytes stored, const ChunkEncoding& encoding, const std::string& place);

 private:
  struct Contexts;
  std::unique_ptr<Contexts> contexts_;
  std::array<std::vector<std::byte>, 2> buffers_;
};

// Shuffles and compresses chunks with zstd. Use one encoder per thread.
class ChunkEncoder {
 public:
  // `level` is zstd's compression level.
  ChunkEncoder(int level, Index max_chunk_bytes);
  ~ChunkEncoder();

  // Returns a zstd frame with a content checksum, or an empty result if it would not be smaller than the chunk. The
  // frame is page-aligned and valid until the next call. `unit` is the element size in bytes, 1 for no shuffle.
  Result<Bytes> encode(Bytes chunk, Index unit);
  // Returns the memory in bytes that an encoder takes for chunks of this size.
  static Index memory(int level, Index max_chunk_bytes);

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace reshard
