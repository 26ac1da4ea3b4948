// SPDX-License-Identifier: Apache-2.0
#include "formats/dcp/stored_rows.h"

#include <algorithm>
#include <utility>

#include "formats/dcp/dcp.h"
#include "lib/base/text.h"

namespace reshard::dcp {
namespace {

using pickle::RecordField;
using pickle::RecordFields;
using FieldKind = RecordField::Kind;

constexpr std::size_t kChunk = 0, kIndex = 1, kInfo = 2;
// The stack below the first chunk of a list: the list, "chunks", the size, "size", the properties, "properties", the
// fields, the TensorStorageMetadata, its name.
constexpr std::uint32_t kNameBelow = 9;

}  // namespace

std::span<const pickle::RecordClass> StoredRows::classes() const {
  static const std::array<pickle::RecordClass, 3> all = {{
      {kMetadataModule, "ChunkStorageMetadata", {"offsets", "sizes"}, std::nullopt},
      {kMetadataModule, "MetadataIndex", {"fqn", "index", "offset"}, kInfo},
      {kFilesystemModule, "_StorageInfo", {"relative_path", "offset", "length", "transform_descriptors"}, std::nullopt},
  }};
  return all;
}

std::optional<std::size_t> StoredRows::Numbers::find(const RecordField& text) {
  if (text.identity == last_identity_) return last_;
  auto known = text.is_shared ? by_identity_.find(text.identity) : by_identity_.end();
  if (known != by_identity_.end()) {
    last_ = known->second;
  } else {
    const auto it = by_text_.find(text.text);
    if (it == by_text_.end()) return std::nullopt;
    last_ = it->second;
    if (text.is_shared) by_identity_.emplace(text.identity, last_);
  }
  last_identity_ = text.identity;
  return last_;
}

bool StoredRows::begin(std::size_t cls, std::uint32_t identity, const TextBelow& below) {
  if (!runs_.empty() && runs_.back().identity >= identity) return false;
  std::size_t tensor = 0;
  if (cls == kChunk) {
    const auto name = below(kNameBelow);
    if (!name) return false;
    if (tensors_.empty() || tensors_.back().name != *name) {
      if (!tensor_numbers_.add(*name, tensors_.size())) return false;
      if (!tensors_.empty()) pool_.share(tensors_.back().boxes.fragments);
      tensors_.push_back({std::string(*name), chunks_});
    }
    tensor = tensors_.size() - 1;
  }
  last_run_[cls] = runs_.size();
  runs_.push_back({identity, cls, tensor, 0});
  return true;
}

bool StoredRows::take(std::size_t cls, const RecordFields& fields) {
  ++runs_[last_run_[cls]].objects;
  return cls == kChunk ? take_chunk(fields) : cls == kIndex ? take_index(fields) : take_info(fields);
}

bool StoredRows::take_chunk(const RecordFields& fields) {
  const RecordField &offsets = fields[0], &sizes = fields[1];
  if (offsets.kind != FieldKind::kSize || sizes.kind != FieldKind::kSize) return false;
  Boxes& boxes = tensors_.back().boxes;
  if (boxes.fragments.empty()) {
    boxes.fragments = FragmentList(offsets.size.rank());
    boxes.rank = offsets.size.rank();
  }
  if (offsets.size.rank() != boxes.rank || sizes.size.rank() != boxes.rank) return false;
  boxes.fragments.add(Box{offsets.size, sizes.size}, {});
  boxes.stored.push_back(0);
  ++chunks_;
  return true;
}

bool StoredRows::take_index(const RecordFields& fields) {
  const RecordField &fqn = fields[0], &index = fields[1], &offset = fields[2];
  if (indices_ != infos_ || fqn.kind != FieldKind::kText) return false;
  ++indices_;
  tensor_.reset();
  if (offset.kind == FieldKind::kNone || offset.kind == FieldKind::kAbsent) {
    blobs_.push_back({std::string(fqn.text), {}});
    return true;
  }
  if (offset.kind != FieldKind::kSize || index.kind != FieldKind::kInt || index.number < 0) return false;
  tensor_ = tensor_numbers_.find(fqn);
  if (!tensor_) return false;
  Boxes& boxes = tensors_[*tensor_].boxes;
  row_ = index.number;
  if (row_ >= boxes.stored.size() || boxes.stored[row_] != 0) return false;
  if (boxes.fragments.box(row_).origin != offset.size) return false;
  boxes.stored[row_] = 1;
  return true;
}

bool StoredRows::take_info(const RecordFields& fields) {
  const RecordField &path = fields[0], &offset = fields[1], &length = fields[2], &transforms = fields[3];
  if (++infos_ != indices_) return false;
  if (path.kind != FieldKind::kText || offset.kind != FieldKind::kInt || length.kind != FieldKind::kInt) return false;
  if (offset.number < 0 || length.number < 0 || !checked_add(offset.number, length.number)) return false;
  if (transforms.kind != FieldKind::kAbsent && transforms.kind != FieldKind::kNone &&
      transforms.kind != FieldKind::kEmptyList)
    return false;
  auto file = file_numbers_.find(path);
  if (!file) {
    if (!is_safe_relative_path(path.text)) return false;
    (void)file_numbers_.add(path.text, files_.size());
    file = files_.size();
    files_.emplace_back(path.text);
  }
  const Extent extent{static_cast<std::uint32_t>(*file), offset.number, length.number};
  if (tensor_)
    tensors_[*tensor_].boxes.fragments.set_extent(row_, extent);
  else
    blobs_.back().extent = extent;
  return true;
}

std::optional<Dims> StoredRows::size_of(std::size_t cls, std::size_t object, std::size_t field) const {
  if (cls != kChunk) return std::nullopt;
  const auto holds = [&](std::size_t i) {
    return tensors_[i].first_object <= object && object - tensors_[i].first_object < tensors_[i].boxes.stored.size();
  };
  if (last_asked_ >= tensors_.size() || !holds(last_asked_)) {
    const auto after = std::upper_bound(tensors_.begin(), tensors_.end(), object,
                                        [](std::size_t o, const TensorRows& t) { return o < t.first_object; });
    if (after == tensors_.begin()) return std::nullopt;
    last_asked_ = static_cast<std::size_t>(after - tensors_.begin()) - 1;
  }
  const TensorRows& t = tensors_[last_asked_];
  if (!holds(last_asked_)) return std::nullopt;
  const Box box = t.boxes.fragments.box(object - t.first_object);
  return field == 0 ? box.origin : box.shape;
}

const StoredRows::Run* StoredRows::run_of(const pickle::Value& value, std::size_t cls) const {
  const auto it = std::lower_bound(runs_.begin(), runs_.end(), value.identity(),
                                   [](const Run& run, std::uint32_t identity) { return run.identity < identity; });
  return it != runs_.end() && it->identity == value.identity() && it->cls == cls ? &*it : nullptr;
}

std::optional<StoredRows::Boxes> StoredRows::boxes_of(std::string_view name, const pickle::Value& chunks) {
  if (chunks.size() == 0) return Boxes{};
  const Run* first = run_of(chunks[0], kChunk);
  if (first == nullptr) return std::nullopt;
  TensorRows& tensor = tensors_[first->tensor];
  std::size_t objects = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const Run* run = run_of(chunks[i], kChunk);
    if (run != first + i || run->tensor != first->tensor) return std::nullopt;
    objects += run->objects;
  }
  if (tensor.is_taken || tensor.name != name || objects != tensor.boxes.stored.size()) return std::nullopt;
  tensor.is_taken = true;
  return std::exchange(tensor.boxes, Boxes{});
}

bool StoredRows::is_all_of(const pickle::Value& storage) const {
  std::size_t objects = 0;
  std::uint32_t last = 0;
  for (std::size_t i = 0; i < storage.size(); ++i) {
    const Run *key = run_of(storage.key(i), kIndex), *value = run_of(storage.value(i), kInfo);
    if (key == nullptr || value != key + 1 || value->objects != key->objects || key->identity <= last) return false;
    last = key->identity;
    objects += key->objects;
  }
  return objects == indices_ && indices_ == infos_;
}

}  // namespace reshard::dcp
