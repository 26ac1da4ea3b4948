// SPDX-License-Identifier: Apache-2.0
// The header of a GGUF file, which llama.cpp writes and reads (ggml-org/ggml, docs/gguf.md; gguf-py/gguf/constants.py):
//
//   header    magic "GGUF"  version u32 (2 or 3)  tensors u64  pairs u64
//   pair      key string  type u32  value               general.architecture = "llama", llama.block_count = 32
//   string    length u64  bytes
//   array     type u32  count u64  values
//   tensor    name string  dimensions u32  extents u64 each, fastest first  type u32  offset u64
//   data      from the next multiple of general.alignment; a tensor's offset counts from there
//
// Numbers are all little-endian or, as the version then shows, all big-endian.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/layout/box.h"
#include "lib/layout/dtype.h"

namespace reshard::gguf {

inline constexpr std::string_view kMagic = "GGUF";

// A type of elements: plain ones, or blocks of `block` quantized elements in `bytes` bytes.
struct ElementType {
  std::uint32_t number;
  std::string_view name;  // "Q4_K"
  Index block;
  Index bytes;
  DType dtype;  // uint8 if the elements are quantized

  bool is_quantized() const { return block > 1; }
};
const ElementType* find_type(std::uint32_t number);  // null: unknown

struct TensorInfo {
  std::string name;
  const ElementType* type = nullptr;
  Dims shape;          // slowest first, like torch's; for a quantized type the last dimension counts bytes
  Index elements = 0;  // before they were packed
  Index offset = 0;    // in the file
  Index bytes = 0;
};

struct Header {
  Index version = 0;
  bool big_endian = false;
  // The pairs, an object. A value is null if it is an array of strings, of arrays, or of more than kLongestArray
  // values.
  Json metadata = Json::object();
  std::vector<std::pair<std::string, Index>> lengths;  // of all arrays, by key
  std::vector<TensorInfo> tensors;

  const Json* find(std::string_view key) const { return metadata.find(key); }
  Index length_of(std::string_view key) const;  // of an array; 0 if it is missing
};
inline constexpr Index kLongestArray = 4096;

// Reads the header of a file. Only the header is read, in pieces; the file may end where the data begin.
Result<Header> read_header(const File& file);

}  // namespace reshard::gguf
