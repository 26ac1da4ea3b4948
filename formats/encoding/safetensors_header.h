// One safetensors file: named, dense, row-major tensors behind a JSON header.
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
// data_offsets are [begin, end) from byte 8 + N. The grammar and its limits are those of the reference implementation
// (huggingface/safetensors, safetensors/src/tensor.rs). Every rule is enforced: readers that trusted one of these
// numbers have been made to read or write outside their buffers.
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
  Dims shape;
  Index offset = 0;  // bytes, from the start of the file
  Index length = 0;  // bytes; always shape x dtype
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  SafetensorsMetadata metadata;           // __metadata__, in the header's order
  Index data_start = 0;                   // bytes, from the start of the file
  Index end = 0;                          // one past the last byte of data, from the start of the file
};

// How the data's end, which the header gives, has to relate to the bytes that are there.
enum class SafetensorsEnd {
  kExact,      // the data end where the bytes end: a whole file
  kWithin,     // something may follow: a blob inside another file (DCP's SAFETENSORS items)
  kUnchecked,  // the data need not be there: only the header is asked for
};

// Reads and checks the header of the safetensors bytes [offset, offset + length) of `file`. Corrupt when a rule is
// broken; unsupported for element types that are not whole bytes or not known, more than kMaxRank dimensions, or fields
// the grammar does not have.
Result<SafetensorsHeader> read_safetensors_header(const File& file, Index offset, Index length, SafetensorsEnd end);
// The same for a whole file.
Result<SafetensorsHeader> read_safetensors_header(const File& file, SafetensorsEnd end = SafetensorsEnd::kExact);

// The bytes before the tensor data of a file, made tensor by tensor in the order of the data: length, JSON, and spaces
// so that the data start at a multiple of `align_data_to` (at least 8).
class SafetensorsHeaderWriter {
 public:
  explicit SafetensorsHeaderWriter(const SafetensorsMetadata& metadata);

  // Adds a tensor and returns its bytes. Unsupported for an element type, or a name, that the format cannot express,
  // and for 2^63 bytes or more.
  Result<Index> add(std::string_view name, DType dtype, const Dims& shape);
  // What was made since it was last called, so that a long header is never in memory as a whole: from byte kBegin of
  // the file on. The length that stands before it is known in the end.
  static constexpr Index kBegin = 8;
  std::string take();
  Index held() const { return std::ssize(text_); }  // bytes that take() would give
  // After the last tensor: where the data start, in bytes from the start of the file. take() gives the rest.
  // Unsupported for a header over the limit.
  Result<Index> finish(Index align_data_to = 4096);
  static std::string length_field(Index data_start);  // the file's first kBegin bytes

 private:
  std::string text_;
  Index taken_ = 0;    // bytes that take() gave
  Index end_ = 0;      // of the data, from their start
  Index tensors_ = 0;  // so far
  bool is_first_ = true;
};

// The same as one text, of a file that holds `entries` in this order. Fills in each entry's offset and length.
Result<std::string> safetensors_header(std::vector<SafetensorsEntry>& entries, const SafetensorsMetadata& metadata,
                                       Index align_data_to = 4096);

}  // namespace reshard
