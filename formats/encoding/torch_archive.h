// What torch.save writes: a zip of a pickle and of the bytes of the tensors in it.
//
//   archive/data.pkl     a pickle (protocol 2); a tensor in it is a call that names its bytes, and how they lie:
//                          torch._utils._rebuild_tensor_v2(('storage', torch.FloatStorage, '0', 'cpu', 6), 0, (2, 3),
//                          ...)
//   archive/byteorder    "little" or "big"; absent: little
//   archive/data/0       the bytes of storage '0'
//   archive/version      "3\n"
//
// torch.distributed.checkpoint stores every tensor chunk as such an archive of one tensor (an item), and every other
// value as one without storages. Written by: torch/serialization.py, torch/_utils.py.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "formats/encoding/pickle.h"
#include "formats/encoding/zip.h"
#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/layout/box.h"
#include "lib/layout/dtype.h"

namespace reshard::torch_archive {

inline constexpr Index kMaxTensorPickleBytes = Index{16} << 20;
inline constexpr Index kMaxObjectPickleBytes = Index{256} << 20;
inline constexpr Index kAlignment = 64;  // of payloads we write, in the file

// Where the elements of the one tensor of an item lie. Element x is at
//   payload_offset + start_bytes + byte_size(dtype) * sum(x[d] * strides[d]),
// inside the payload for every x.
struct StoredTensor {
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;                      // elements, not negative
  Index start_bytes = 0;             // from the payload's first byte
  Index payload_offset = 0;          // in the file
  Index payload_length = 0;          // bytes; may be more than the tensor needs
  std::optional<std::uint32_t> crc;  // CRC-32 of the payload, where recorded
  bool big_endian = false;
};

// Reads the description of the tensor in the item at [offset, offset + length) of the file; not its payload.
// Quantized, sparse, conjugated and such tensors are unsupported errors that say so.
Result<StoredTensor> read_tensor_item(const File& file, Index offset, Index length);

// Reads the pickle of any item.
Result<pickle::Document> read_object_item(const File& file, Index offset, Index length);

// Reads any item from end to end: that it is one whole archive, and that the checksums of its members hold.
Status check_item(const File& file, Index offset, Index length);

// The size of an item to be written: header, payload and trailer follow each other without gaps.
struct ItemShape {
  Index header_bytes = 0;
  Index payload_bytes = 0;
  Index trailer_bytes = 0;
  Index total() const { return header_bytes + payload_bytes + trailer_bytes; }
};

// The item of a tensor that lies row-major in its payload, at `file_offset` of its file. Payloads are aligned to
// kAlignment of the file, so sizes depend on the offset; they do not depend on the checksum. `shape`'s volume in bytes
// must be a valid Index.
ItemShape item_shape(DType dtype, const Dims& shape, Index file_offset);
// The bytes around its payload; `crc` is the payload's CRC-32.
std::string item_header(DType dtype, const Dims& shape, Index file_offset, std::uint32_t crc);
std::string item_trailer(DType dtype, const Dims& shape, Index file_offset, std::uint32_t crc);

// A tensor of a file of many.
struct NamedTensor {
  std::string_view name;  // UTF-8
  DType dtype = DType::kFloat32;
  Dims shape;
  std::uint32_t crc = 0;  // CRC-32 of its payload
};

// The bytes around the payloads of a file that torch.load gives as a dict of these tensors, in this order, each
// row-major and aligned to kAlignment. Their number and lengths do not depend on the checksums. The file must stay
// below 2^63 bytes.
zip::Builder::Around around_tensors(std::span<const NamedTensor> tensors);

// A whole item around a pickle that refers to no tensors.
std::string object_item(std::string_view pickle_bytes);

}  // namespace reshard::torch_archive
