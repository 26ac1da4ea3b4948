// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/torch_archive.h"

#include <cstring>
#include <utility>

#include "formats/encoding/torch_file.h"
#include "lib/base/text.h"

namespace reshard::torch_archive {
namespace {

constexpr std::string_view kPrefix = "archive/";

}  // namespace

void append_tensor(pickle::PickleWriter& w, DType dtype, const Dims& shape, std::string_view key) {
  const DTypeInfo& type = info(dtype);
  const bool typed = !type.storage_class.empty();
  w.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  w.mark();
  w.mark();
  w.text("storage");
  if (typed) {
    w.global("torch", type.storage_class);
  } else {
    w.global("torch.storage", "UntypedStorage");
  }
  w.text(key);
  w.text("cpu");
  w.integer(typed ? volume(shape) : volume(shape) * type.bytes);
  w.tuple_from_mark();
  w.persistent_id();
  w.integer(0);  // storage_offset
  w.integers(shape.span());
  w.integers(row_major_strides(shape).span());
  w.boolean(false);        // requires_grad
  w.empty_ordered_dict();  // backward_hooks
  if (!typed) w.global("torch", type.torch_name);
  w.tuple_from_mark();
  w.reduce();
}

namespace {

// Returns the storage key of a placeholder. A storage has the dtype of the first tensor that refers to it, so each
// dtype has a storage of its own.
std::string placeholder_key(DType dtype) { return std::to_string(static_cast<int>(dtype)); }

// Returns data.pkl of an item.
std::string tensor_pickle(DType dtype, const Dims& shape) {
  pickle::PickleWriter w;
  append_tensor(w, dtype, shape, "0");
  return std::move(w).finish();
}

// Returns data.pkl of a file with a dict of tensors, where tensor i has storage i.
std::string dict_pickle(std::span<const NamedTensor> tensors) {
  pickle::PickleWriter w;
  w.empty_dict();
  pickle::ElementRuns entries(w, &pickle::PickleWriter::set_items);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    entries.next();
    w.text(tensors[i].name);
    append_tensor(w, tensors[i].dtype, tensors[i].shape, std::to_string(i));
  }
  entries.end();
  return std::move(w).finish();
}

void add_common_members(zip::Builder& builder, std::string_view data_pickle) {
  const std::string prefix(kPrefix);
  builder.add(prefix + "data.pkl", data_pickle);
  builder.add(prefix + "byteorder", "little");
  builder.add(prefix + "version", "3\n");
}

}  // namespace

Result<StoredTensor> read_tensor_item(const File& file, Index offset, Index length) {
  const TorchFile item = TRY(TorchFile::open_zip(file, offset, length, kMaxTensorPickleBytes));
  if (item.root().kind() != pickle::Kind::kObject) return item.root().mismatch("tensor", "a tensor");
  return item.resolve(item.root());
}

Result<pickle::Document> read_object_item(const File& file, Index offset, Index length) {
  return TRY(TorchFile::open_zip(file, offset, length)).take_document();
}

Result<pickle::Document> read_object_item(std::string_view item) {
  const File file = TRY(File::create_in_memory());
  TRY(file.write_at(0, as_bytes(item)));
  return read_object_item(file, 0, std::ssize(item));
}

Status check_item(const File& file, Index offset, Index length) {
  TRY(TorchFile::open_zip(file, offset, length));
  const zip::Archive archive = TRY(zip::Archive::open(file, offset, length));
  for (const zip::Entry& entry : archive.entries()) TRY(archive.read(entry, length));
  return {};
}

// The payload is the last member, so only the end records can be beyond 4 GiB.
Item::Item(DType dtype, const Dims& shape, Index file_offset) : payload_bytes_(volume(shape) * byte_size(dtype)) {
  zip::Builder builder(file_offset);
  add_common_members(builder, tensor_pickle(dtype, shape));
  builder.add_hole(std::string(kPrefix) + "data/0", payload_bytes_, 0, kAlignment);
  zip::Builder::Around around = std::move(builder).finish();
  header_ = std::move(around.before);
  trailer_ = std::move(around.after.front());
  header_crc_ = around.local_crc;
  trailer_crc_ = around.directory_crc;
}

void Item::set_crc(std::uint32_t crc) {
  std::memcpy(header_.data() + header_crc_, &crc, sizeof crc);
  std::memcpy(trailer_.data() + trailer_crc_, &crc, sizeof crc);
}

zip::Builder::Around around_tensors(std::span<const NamedTensor> tensors) {
  return around_tensors(tensors, {dict_pickle(tensors), {}});
}

zip::Builder::Around around_tensors(std::span<const NamedTensor> tensors, const Content& content) {
  zip::Builder builder(0);
  add_common_members(builder, content.pickle);
  for (std::size_t i = 0; i < content.storages.size(); ++i)
    builder.add(std::string(kPrefix) + "data/" + std::to_string(tensors.size() + i), content.storages[i]);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    builder.add_hole(std::string(kPrefix) + "data/" + std::to_string(i),
                     volume(tensors[i].shape) * byte_size(tensors[i].dtype), tensors[i].crc, kAlignment);
  return std::move(builder).finish();
}

void append_placeholder(pickle::PickleWriter& w, DType dtype) { append_tensor(w, dtype, {0}, placeholder_key(dtype)); }

std::string object_item(std::string_view pickle_bytes, std::span<const DType> placeholders) {
  zip::Builder builder(0);
  add_common_members(builder, pickle_bytes);
  for (const DType dtype : placeholders) builder.add(std::string(kPrefix) + "data/" + placeholder_key(dtype), "");
  return std::move(builder).finish().before;
}

}  // namespace reshard::torch_archive
