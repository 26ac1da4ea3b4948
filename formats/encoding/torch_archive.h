// Items: the small torch.save archives (formats/encoding/torch_file.h draws one) that stand one after the other in the
// files of torch.distributed.checkpoint. Every chunk of a tensor is one with a single storage, every other value one
// without storages.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/encoding/pickle.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/stored_tensor.h"
#include "formats/encoding/zip.h"
#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/layout/box.h"
#include "lib/layout/dtype.h"

namespace reshard::torch_archive {

inline constexpr Index kMaxTensorPickleBytes = Index{16} << 20;
inline constexpr Index kAlignment = 64;  // of payloads we write, in the file

// Reads the description of the tensor in the item at [offset, offset + length) of the file; not its payload.
// Quantized, sparse, conjugated and such tensors are unsupported errors that say so.
Result<StoredTensor> read_tensor_item(const File& file, Index offset, Index length);

// Reads the pickle of any item.
Result<pickle::Document> read_object_item(const File& file, Index offset, Index length);
Result<pickle::Document> read_object_item(std::string_view item);

// Reads any item from end to end: that it is one whole archive, and that the checksums of its members hold.
Status check_item(const File& file, Index offset, Index length);

// An item to be written: a tensor that lies row-major in its payload, and what surrounds that: header, payload and
// trailer follow each other without gaps. Payloads are aligned to kAlignment of the file: the item is the same at any
// offset that is as far from a multiple of it.
class Item {
 public:
  // `shape`'s volume in bytes must be a valid Index.
  Item(DType dtype, const Dims& shape, Index file_offset);

  const std::string& header() const { return header_; }
  const std::string& trailer() const { return trailer_; }
  Index header_bytes() const { return static_cast<Index>(header_.size()); }
  Index payload_bytes() const { return payload_bytes_; }
  Index trailer_bytes() const { return static_cast<Index>(trailer_.size()); }
  Index total() const { return header_bytes() + payload_bytes() + trailer_bytes(); }
  // What is said of the payload's CRC-32; 0 at first.
  void set_crc(std::uint32_t crc);

 private:
  std::string header_, trailer_;
  Index payload_bytes_;
  std::size_t header_crc_, trailer_crc_;  // where it stands in these
};

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

// Pushes a tensor that is all of the storage `key`, row-major.
void append_tensor(pickle::PickleWriter& w, DType dtype, const Dims& shape, std::string_view key);

// What torch.load gives of a file where that is no dict of its tensors: a pickle with the i-th tensor as storage "i",
// and with storages of its own behind those, counted on.
struct Content {
  std::string pickle;
  std::vector<std::string> storages;
};
// As above, of a file of this content.
zip::Builder::Around around_tensors(std::span<const NamedTensor> tensors, const Content& content);

// Pushes a tensor of no elements, [0], such as ZeRO 3 leaves in the place of a parameter.
void append_placeholder(pickle::PickleWriter& w, DType dtype);

// A whole item around a pickle that refers to no tensors but placeholders, of these dtypes, each named once.
std::string object_item(std::string_view pickle_bytes, std::span<const DType> placeholders = {});

}  // namespace reshard::torch_archive
