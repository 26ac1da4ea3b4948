// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file, which holds named, dense, row-major tensors behind a JSON header.
//
//   +--------------+-----------------------------------------------+----------------------------------+
//   | u64, little  | JSON, N bytes, starts with '{', may end in    | tensor data, back to back,       |
//   | endian: N    | spaces                                        | no holes, to the end of the file |
//   +--------------+-----------------------------------------------+----------------------------------+
//   0              8                                               8 + N
//
//   {"__metadata__": {"format": "pt"},
//    "w": {"dtype": "BF16", "shape": [128256, 2048], "data_offsets": [0, 525336576]}, ...}
//
// data_offsets are [begin, end), relative to byte 8 + N. The grammar and its limits are those of the reference
// implementation (huggingface/safetensors, safetensors/src/tensor.rs). Every rule is enforced: readers that trusted one
// of these numbers could be made to read or write outside their buffers.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/layout/box.h"
#include "lib/layout/dtype.h"

namespace reshard {

inline constexpr Index kMaxSafetensorsHeader = 100'000'000;  // bytes of JSON, the reference implementation's limit

using SafetensorsMetadata = std::vector<std::pair<std::string, std::string>>;

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;        // as torch counts: half of what the file says in the last dimension of F4
  Index offset = 0;  // bytes, from the start of the file
  Index length = 0;  // bytes; always shape x dtype
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  SafetensorsMetadata metadata;           // __metadata__, in the header's order
  Index data_start = 0;                   // bytes, from the start of the file
  Index end = 0;                          // one past the last byte of data, from the start of the file
};

// How the end of the data, which the header gives, must relate to the bytes of the file.
enum class SafetensorsEnd {
  kExact,      // the data end where the bytes end: a whole file
  kWithin,     // other bytes may follow: an item inside another file (DCP's SAFETENSORS items)
  kUnchecked,  // the data may be missing: only the header is needed
};

// Reads and checks the header of the safetensors bytes [offset, offset + length) of `file`. Fails with kCorrupt if a
// rule is broken, and with kUnsupported for dtypes that are unknown or narrower than a byte, for more than kMaxRank
// dimensions and for fields that the grammar does not have.
Result<SafetensorsHeader> read_safetensors_header(const File& file, Index offset, Index length, SafetensorsEnd end);
// Does the same for a whole file.
Result<SafetensorsHeader> read_safetensors_header(const File& file, SafetensorsEnd end = SafetensorsEnd::kExact);

// Writes the bytes before the tensor data of a file, tensor by tensor in the order of the data: the length, JSON, and
// spaces up to a multiple of `align_data_to` (at least 8), where the data start.
class SafetensorsHeaderWriter {
 public:
  explicit SafetensorsHeaderWriter(const SafetensorsMetadata& metadata);

  // Adds a tensor and returns its size in bytes. Fails with kUnsupported for a dtype or a name that the format cannot
  // express, and for 2^63 bytes or more.
  Result<Index> add(std::string_view name, DType dtype, const Dims& shape);
  // Returns the bytes written since the last call, so that a long header is never in memory as a whole. The first call
  // starts at byte kBegin of the file; the length before it is known only at the end.
  static constexpr Index kBegin = 8;
  std::string take();
  Index held() const { return std::ssize(text_); }  // bytes that take() would return
  // Ends the header after the last tensor and returns the byte of the file at which the data start. take() returns the
  // rest of the header. Fails with kUnsupported if the header exceeds the limit.
  Result<Index> finish(Index align_data_to = 4096);
  // Returns the file's first kBegin bytes.
  static std::string length_field(Index data_start);

 private:
  std::string text_;
  Index taken_ = 0;    // bytes that take() returned so far
  Index end_ = 0;      // of the data so far, from their start
  Index tensors_ = 0;  // so far
  bool is_first_ = true;
};

// Returns these bytes as one text, for a file with `entries` in this order. Fills in each entry's offset and length.
Result<std::string> safetensors_header(std::vector<SafetensorsEntry>& entries, const SafetensorsMetadata& metadata,
                                       Index align_data_to = 4096);

}  // namespace reshard
