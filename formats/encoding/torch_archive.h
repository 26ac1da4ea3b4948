// SPDX-License-Identifier: Apache-2.0
// Items: the small torch.save archives (drawn in formats/encoding/torch_file.h) that torch.distributed.checkpoint
// writes one after the other into its files. A chunk of a tensor is an item with one storage, any other value an item
// without storages. Also writes whole torch.save files. Producer: torch/distributed/checkpoint/filesystem.py,
// torch/serialization.py.
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
inline constexpr Index kAlignment = 64;  // of the payloads that we write, in the file

// Reads the description of the tensor in the item at [offset, offset + length) of the file, not its payload. Fails with
// kUnsupported for quantized, sparse, conjugated and similar tensors.
Result<StoredTensor> read_tensor_item(const File& file, Index offset, Index length);

// Reads the pickle of any item.
Result<pickle::Document> read_object_item(const File& file, Index offset, Index length);
Result<pickle::Document> read_object_item(std::string_view item);

// Reads an item from end to end. Fails unless it is one whole archive and the checksums of its members are right.
Status check_item(const File& file, Index offset, Index length);

// The bytes of an item with a row-major tensor: header, payload, trailer, without gaps. The payload is aligned to
// kAlignment in the file, so the bytes depend on the item's offset only modulo kAlignment.
class Item {
 public:
  // The size in bytes must fit an Index.
  Item(DType dtype, const Dims& shape, Index file_offset);

  const std::string& header() const { return header_; }
  const std::string& trailer() const { return trailer_; }
  Index header_bytes() const { return static_cast<Index>(header_.size()); }
  Index payload_bytes() const { return payload_bytes_; }
  Index trailer_bytes() const { return static_cast<Index>(trailer_.size()); }
  Index total() const { return header_bytes() + payload_bytes() + trailer_bytes(); }
  // Sets the payload's CRC-32 in header and trailer; it is 0 before.
  void set_crc(std::uint32_t crc);

 private:
  std::string header_, trailer_;
  Index payload_bytes_;
  std::size_t header_crc_, trailer_crc_;  // offset of the CRC in each
};

// A tensor in a torch.save file.
struct NamedTensor {
  std::string_view name;  // UTF-8
  DType dtype = DType::kFloat32;
  Dims shape;
  std::uint32_t crc = 0;  // CRC-32 of its payload
};

// Returns the bytes around the payloads of a file that torch.load reads as a dict of these tensors, in this order. Each
// payload is row-major and aligned to kAlignment. The number and the lengths of the texts do not depend on the
// checksums. The file must be smaller than 2^63 bytes.
zip::Builder::Around around_tensors(std::span<const NamedTensor> tensors);

// Writes a row-major tensor that fills the storage `key`.
void append_tensor(pickle::PickleWriter& w, DType dtype, const Dims& shape, std::string_view key);

// The content of a file that is not a dict of its tensors: a pickle that refers to the i-th tensor as storage "i", and
// further storages, numbered after the tensors.
struct Content {
  std::string pickle;
  std::vector<std::string> storages;
};
// Returns the bytes around the payloads of a file with this content.
zip::Builder::Around around_tensors(std::span<const NamedTensor> tensors, const Content& content);

// Writes a tensor of shape [0], the placeholder that ZeRO 3 leaves for a parameter.
void append_placeholder(pickle::PickleWriter& w, DType dtype);

// Returns a whole item around a pickle that refers to no tensors except placeholders. `placeholders` are their dtypes,
// each once.
std::string object_item(std::string_view pickle_bytes, std::span<const DType> placeholders = {});

}  // namespace reshard::torch_archive
