// Chunks of elements made smaller and back: byte shuffle, zstd, deflate, Fletcher-32 (lib/layout/chunk_encoding.h).
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/layout/chunk_encoding.h"

namespace reshard {

// The largest chunk, decoded, that is read: a reader refuses larger ones when it lists them.
inline constexpr Index kMaxChunkBytes = Index{64} << 20;

// Groups the i-th bytes of all elements of `unit` bytes; bytes of an incomplete last element stay at the end.
// `out` has the size of `in` and does not overlap it.
void shuffle_bytes(Bytes in, Index unit, MutableBytes out);
void unshuffle_bytes(Bytes in, Index unit, MutableBytes out);

// HDF5's Fletcher-32: over 16-bit big-endian words.
std::uint32_t fletcher32(Bytes bytes);

// Of the library, "1.5.4".
std::string zstd_version();

// Undoes the filters of `encoding`. Keeps its memory from chunk to chunk; one for each thread.
class ChunkDecoder {
 public:
  ChunkDecoder();
  ~ChunkDecoder();
  ChunkDecoder(ChunkDecoder&&) noexcept;
  ChunkDecoder& operator=(ChunkDecoder&&) noexcept;

  // The elements of a chunk stored as `stored`, which may be changed; valid until the next call. `place` names the
  // chunk in errors. Anything but encoding.decoded_bytes bytes is a corrupt error; no more is ever allocated for it
  // than that and a checksum.
  Result<MutableBytes> decode(MutableBytes stored, const ChunkEncoding& encoding, const std::string& place);

 private:
  struct Contexts;
  std::unique_ptr<Contexts> contexts_;
  std::array<std::vector<std::byte>, 2> buffers_;
};

// Shuffles and compresses chunks with zstd. One for each thread.
class ChunkEncoder {
 public:
  // `level` as zstd counts; `unit` bytes an element, 1 for no shuffle.
  ChunkEncoder(int level, Index max_chunk_bytes);
  ~ChunkEncoder();

  // The frame, with a checksum of its content, page-aligned and valid until the next call; empty when it would not be
  // smaller than the chunk.
  Result<Bytes> encode(Bytes chunk, Index unit);
  // Bytes that one of these takes for chunks of this size.
  static Index memory(int level, Index max_chunk_bytes);

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace reshard
