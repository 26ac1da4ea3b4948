// SPDX-License-Identifier: Apache-2.0
// The metadata of one zarr array, of either version, as tensorstore writes them (tensorstore/driver/zarr/metadata.cc,
// tensorstore/driver/zarr3/metadata.cc, codec/sharding_indexed.cc).
//
//   NAME/.zarray      {"zarr_format": 2, "shape": [16, 12], "chunks": [4, 6], "dtype": "<f4" | "bfloat16" | ...,
//                      "compressor": null | {"id": "zstd" | "gzip" | "zlib", ...}, "filters": null, "order": "C" | "F",
//                      "fill_value": null | 0.0, "dimension_separator": "." | "/"}
//   NAME/1.0          a chunk, always of the full shape: the compressor's output
//
//   NAME/zarr.json    {"zarr_format": 3, "node_type": "array", "shape": [16, 12], "data_type": "bfloat16",
//                      "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
//                      "chunk_key_encoding": {"name": "default" | "v2", "configuration": {"separator": "/"}},
//                      "fill_value": 0.0, "codecs": [transpose..., bytes | sharding_indexed, zstd | gzip | crc32c ...]}
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

inline constexpr std::string_view kZarr2 = "/.zarray", kZarr3 = "/zarr.json";  // behind an array's name
inline constexpr Index kMaxArrayJson = Index{4} << 20;                         // bytes

// How the elements of a chunk are stored.
struct ChunkLayout {
  Dims shape;                        // of the chunk, as the array's dimensions are numbered
  Dims order;                        // the array's dimensions, the slowest in memory first
  std::vector<ChunkFilter> filters;  // in the order in which the writer applied them

  Dims strides() const;  // elements, by the array's dimensions
};

struct ShardIndex {
  Dims order;  // the array's dimensions in the order in which inner chunks are counted, the slowest first
  bool is_at_start = false;
  bool has_crc = false;
  bool is_big_endian = false;
};

struct ZarrArray {
  DType dtype = DType::kFloat32;
  std::string stored_type;  // as the metadata name it
  bool is_big_endian = false;
  Dims shape;
  Dims grid;          // shape of what is stored under one key: a chunk, or a shard
  ChunkLayout chunk;  // of the chunk, or of the inner chunks of a shard
  std::optional<ShardIndex> shards;
  std::string prefix, separator;  // of keys: "c" and "/", or none and "."
  std::vector<std::byte> fill;    // one element, little-endian; empty if the fill value is not supported

  // How many chunks (or shards) there are in each dimension.
  Dims counts() const;
  // The box of one of them, without what is behind the array's end.
  Box box_of(const Dims& number) const;
  // The key of one of them, behind the array's name and a slash.
  std::string key_of(const Dims& number) const;
};

// Parse the metadata of an array. Names of codecs, dtypes and options that are not read are unsupported errors that
// name them. `place` is for messages.
Result<ZarrArray> parse_zarr2(std::string_view text, const std::string& place);
Result<ZarrArray> parse_zarr3(std::string_view text, const std::string& place);

// An inner chunk of a shard: its box, from the shard's first element on, and its bytes, from the shard's first byte on.
struct InnerChunk {
  Box box;
  std::optional<std::pair<Index, Index>> bytes;  // offset and length; nothing: it is not stored
};

// Where the index of a shard of `length` bytes is; corrupt if the shard is too short for it.
struct IndexPlace {
  Index offset = 0, length = 0;
};
Result<IndexPlace> place_of_index(const ZarrArray& array, Index length);

// Parses a shard's index. `array` has shards, `length` is the shard's.
Result<std::vector<InnerChunk>> parse_shard_index(const ZarrArray& array, Bytes index, Index length);

}  // namespace reshard::orbax
