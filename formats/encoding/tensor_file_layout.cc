#include "formats/encoding/tensor_file_layout.h"

#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

// Room for an archive's own bytes, far more than its directory may have.
constexpr Index kMaxArchiveBytes = Index{1} << 40;

Error too_large(const FileTensor& tensor) {
  return unsupported("tensor '" + printable(tensor.name) + "': the file's data would be 2^63 bytes or more");
}

std::vector<torch_archive::NamedTensor> archived(const std::vector<FileTensor>& tensors,
                                                 const TensorFileLayout::TensorCrc& crc) {
  std::vector<torch_archive::NamedTensor> out;
  out.reserve(tensors.size());
  for (const FileTensor& t : tensors) out.push_back({t.name, t.dtype, t.shape, crc ? crc(t) : 0});
  return out;
}

}  // namespace

Result<TensorFileLayout> TensorFileLayout::make(TensorFileKind kind, std::vector<FileTensor> tensors) {
  TensorFileLayout out;
  out.kind_ = kind;
  out.tensors_ = std::move(tensors);
  TRY(kind == TensorFileKind::kSafetensors ? out.lay_out_safetensors() : out.lay_out_torch_save());
  return out;
}

Status TensorFileLayout::lay_out_safetensors() {
  std::vector<SafetensorsEntry> entries;
  entries.reserve(tensors_.size());
  for (const FileTensor& t : tensors_) entries.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape});
  header_ = TRY(safetensors_header(entries, {{"format", "pt"}}));
  size_ = static_cast<Index>(header_.size());
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].offset = entries[i].offset;
    tensors_[i].length = entries[i].length;
    size_ = entries[i].offset + entries[i].length;
  }
  return {};
}

Status TensorFileLayout::lay_out_torch_save() {
  Index total = kMaxArchiveBytes;
  for (FileTensor& t : tensors_) {
    if (!is_utf8(t.name)) return unsupported("tensor '" + printable(t.name) + "': the name is not UTF-8");
    const auto elements = checked_volume(t.shape);
    const auto bytes = elements ? checked_mul(*elements, byte_size(t.dtype)) : std::nullopt;
    const auto sum = bytes ? checked_add(total, *bytes) : std::nullopt;
    if (!sum) return too_large(t);
    t.length = *bytes;
    total = *sum;
  }
  const zip::Builder::Around around = torch_archive::around_tensors(archived(tensors_, nullptr));
  size_ = static_cast<Index>(around.before.size());
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].offset = size_;
    size_ += tensors_[i].length + static_cast<Index>(around.after[i].size());
  }
  return {};
}

Status TensorFileLayout::seal(const TensorCrc& crc, const Emit& emit) const {
  if (kind_ == TensorFileKind::kSafetensors) return emit(0, as_bytes(header_));
  const zip::Builder::Around around = torch_archive::around_tensors(archived(tensors_, crc));
  TRY(emit(0, as_bytes(around.before)));
  for (std::size_t i = 0; i < tensors_.size(); ++i)
    TRY(emit(tensors_[i].offset + tensors_[i].length, as_bytes(around.after[i])));
  return {};
}

}  // namespace reshard
