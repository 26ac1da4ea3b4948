// SPDX-License-Identifier: Apache-2.0
// The metadata of one zarr array, of either version, as tensorstore writes them (tensorstore/driver/zarr/metadata.cc,
// tensorstore/driver/zarr3/metadata.cc, codec/sharding_indexed.cc).
//
//   NAME/.zarray      {"zarr_format": 2, "shape": [16, 12], "chunks": [4, 6], "dtype": "<f4" | "bfloat16" | ...,
//                      "compressor": null | {"id": "zstd" | "gzip" | "zlib" | "blosc", ...}, "filters": null, "order":
//                      "C" | "F", "fill_value": null | 0.0, "dimension_separator": "." | "/"}
//   NAME/1.0          a chunk, always of the full shape: the compressor's output
//
//   NAME/zarr.json    {"zarr_format": 3, "node_type": "array", "shape": [16, 12], "data_type": "bfloat16",
//                      "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
//                      "chunk_key_encoding": {"name": "default" | "v2", "configuration": {"separator": "/"}},
//                      "fill_value": 0.0, "codecs": [transpose..., bytes | sharding_indexed, zstd | gzip | blosc |
//                      crc32c ...]}
//   NAME/c/1/0        a chunk; or, with the codec sharding_indexed, a shard: inner chunks in any order, and an index
//                     at its end or start: u64 offset and length of each inner chunk in row-major order (2^64-1 twice:
//                     not stored), and most often a CRC-32C
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/json.h"
#include "lib/base/result.h"
#include "lib/layout/box.h"
#include "lib/layout/chunk_encoding.h"
#include "lib/layout/dtype.h"

namespace reshard::orbax {

inline constexpr std::string_view kZarr2 = "/.zarray", kZarr3 = "/zarr.json";  // follow an array's name
inline constexpr Index kMaxArrayJson = Index{4} << 20;                         // bytes

// How the elements of a chunk are stored.
struct ChunkLayout {
  Dims shape;                        // of the chunk, in the order of the array's dimensions
  Dims order;                        // the array's dimensions, the slowest-varying in memory first
  bool is_blosc = false;             // the elements are in a buffer of c-blosc, to which the filters were applied
  std::vector<ChunkFilter> filters;  // in the order in which the writer applied them

  bool is_plain() const { return filters.empty() && !is_blosc; }

  Dims strides() const;  // in elements, for each of the array's dimensions
};

struct ShardIndex {
  Dims order;  // the array's dimensions in the order that numbers inner chunks, the slowest first
  bool is_at_start = false;
  bool has_crc = false;
  bool is_big_endian = false;
};

struct ZarrArray {
  DType dtype = DType::kFloat32;
  std::string stored_type;  // the name in the metadata
  bool is_big_endian = false;
  Dims shape;
  Dims grid;          // shape of the value of one key: a chunk or a shard
  ChunkLayout chunk;  // of a chunk, or of the inner chunks of a shard
  std::optional<ShardIndex> shards;
  std::string prefix, separator;  // of keys: "c" and "/", or none and "."
  std::vector<std::byte> fill;    // one element, little-endian; empty if the fill value is not supported

  // Returns the number of chunks (or shards) in each dimension.
  Dims counts() const;
  // Returns the box of a chunk, clipped at the end of the array.
  Box box_of(const Dims& number) const;
  // Returns the key of a chunk, without the array's name and slash.
  std::string key_of(const Dims& number) const;
};

// Parse the metadata of an array. Fail (unsupported), naming it, for a codec, dtype or option that is not supported.
// `place` is for messages.
Result<ZarrArray> parse_zarr2(std::string_view text, const std::string& place);
Result<ZarrArray> parse_zarr3(std::string_view text, const std::string& place);

// Returns the sizes as a JSON array.
Json list_of(const Dims& dims);

// The form of an array that is written: row-major chunks of the shape `grid`, each a zstd frame unless `zstd_level` is
// 0.
struct ZarrForm {
  int version = 3;  // or 2
  int zstd_level = 0;

  std::string_view metadata_suffix() const { return version == 3 ? kZarr3 : kZarr2; }
};

// Returns the metadata of an array; nothing if zarr has no such dtype. Keys of chunks are those of key_of() with the
// prefix "c" and the separator "/", or in version 2 with no prefix and ".".
std::optional<std::string> zarr_text(const ZarrForm& form, DType dtype, const Dims& shape, const Dims& grid);

// An inner chunk of a shard. Its box and its bytes are relative to the shard.
struct InnerChunk {
  Box box;
  std::optional<std::pair<Index, Index>> bytes;  // offset and length; nothing if it is not stored
};

// Returns where the index of a shard of `length` bytes is. Fails (corrupt) if the shard is too short.
struct IndexPlace {
  Index offset = 0, length = 0;
};
Result<IndexPlace> place_of_index(const ZarrArray& array, Index length);

// Parses the index of a shard of `length` bytes. `array.shards` must be set.
Result<std::vector<InnerChunk>> parse_shard_index(const ZarrArray& array, Bytes index, Index length);

}  // namespace reshard::orbax
