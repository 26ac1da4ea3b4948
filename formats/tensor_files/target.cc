// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/target.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/text.h"
#include "lib/model/parts.h"

namespace reshard {
namespace {

// An upper bound for an archive's own bytes.
constexpr Index kMaxArchiveBytes = Index{1} << 40;

// Fills in the lengths of the tensors. Fails if the size of the archive overflows.
Status check_archive(std::vector<FileTensor>& tensors) {
  Index total = kMaxArchiveBytes;
  for (FileTensor& t : tensors) {
    if (!is_utf8(t.name)) return unsupported(tensor_text(t.name) + ": the name is not UTF-8");
    const auto elements = checked_volume(t.shape);
    const auto bytes = elements ? checked_mul(*elements, byte_size(t.dtype)) : std::nullopt;
    const auto sum = bytes ? checked_add(total, *bytes) : std::nullopt;
    if (!sum) return unsupported(tensor_text(t.name) + ": the file's data would be 2^63 bytes or more");
    t.extent.length = *bytes;
    total = *sum;
  }
  return {};
}

Index end_of(const Extent& e) { return e.offset + e.length; }

std::string numbered(std::string_view stem, std::size_t i, std::size_t n, Container container) {
  const std::string extension(container_extension(container));
  if (n == 1) return std::string(stem) + extension;
  char number[64];
  std::snprintf(number, sizeof number, "-%05zu-of-%05zu", i + 1, n);
  return std::string(stem) + number + extension;
}

}  // namespace

std::string_view container_extension(Container container) {
  return container == Container::kSafetensors ? ".safetensors" : ".bin";
}

TensorFilesTarget::TensorFilesTarget(const SafetensorsMetadata& metadata) {
  SafetensorsMetadata all = *metadata_;
  all.insert(all.end(), metadata.begin(), metadata.end());
  metadata_ = std::make_shared<const SafetensorsMetadata>(std::move(all));
}

bool TensorFilesTarget::holds_header_metadata() const {
  return std::all_of(files_.begin(), files_.end(),
                     [](const TensorsFile& f) { return f.container == Container::kSafetensors; });
}

// The header is emitted in stretches. Tensors of whole pages come first: they begin on pages then, and are written past
// the page cache and mapped as they are.
Result<Index> TensorFilesTarget::lay_out_safetensors(const TensorsFile& file, std::vector<FileTensor>& tensors,
                                                     const EmitText& emit) {
  constexpr Index kStretch = Index{1} << 20;
  const auto fills_pages = [](const FileTensor& t) {
    const auto elements = checked_volume(t.shape);
    return elements && *elements > 0 && *elements % (File::kDirectUnit / byte_size(t.dtype)) == 0;
  };
  SafetensorsHeaderWriter writer(*file.metadata);
  Index at = SafetensorsHeaderWriter::kBegin, end = 0;
  const auto hand_on = [&]() -> Status {
    const std::string text = writer.take();
    const Index begin = std::exchange(at, at + std::ssize(text));
    return emit ? emit(begin, text) : Status();
  };
  for (const bool of_pages : {true, false}) {
    for (FileTensor& t : tensors) {
      if (fills_pages(t) != of_pages) continue;
      const Index length = TRY(writer.add(t.name, t.dtype, t.shape));
      t.extent = {file.file, end, length};
      end += t.extent.length;
      if (writer.held() >= kStretch) TRY(hand_on());
    }
  }
  const Index data_start = TRY(writer.finish());
  TRY(hand_on());
  if (emit) TRY(emit(0, SafetensorsHeaderWriter::length_field(data_start)));
  for (FileTensor& t : tensors) t.extent.offset += data_start;
  return data_start + end;
}

// Emits the bytes around the tensors that overlap `place` (null: all of them), with checksums from `crc` (null: zeros).
// A tensor's checksum is just before it, and again in the directory at the end of the archive.
Result<Index> TensorFilesTarget::lay_out_archive(const TensorsFile& file, std::vector<FileTensor>& tensors,
                                                 const PayloadCrc& crc, const Extent* place, const EmitText& emit) {
  TRY(check_archive(tensors));
  std::vector<torch_archive::NamedTensor> named;
  named.reserve(tensors.size());
  for (const FileTensor& t : tensors) named.push_back({t.name, t.dtype, t.shape, 0});
  const auto around = [&] {
    return file.content ? torch_archive::around_tensors(named, *file.content) : torch_archive::around_tensors(named);
  };
  zip::Builder::Around parts = around();
  Index size = std::ssize(parts.before);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].extent = {file.file, size, tensors[i].extent.length};
    size += tensors[i].extent.length + std::ssize(parts.after[i]);
  }
  if (crc) {
    const Index end = place ? end_of(*place) : 0;
    const bool all = !place || tensors.empty() || end > end_of(tensors.back().extent);
    Index before = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Extent& e = tensors[i].extent;
      if (all || (place->offset < e.offset && before < end)) named[i].crc = crc(e);
      before = end_of(e);
    }
    parts = around();
  }
  if (!emit) return size;
  TRY(emit(0, parts.before));
  for (std::size_t i = 0; i < tensors.size(); ++i) TRY(emit(end_of(tensors[i].extent), parts.after[i]));
  return size;
}

Result<Index> TensorFilesTarget::lay_out(const TensorsFile& file, std::vector<FileTensor>& tensors,
                                         const PayloadCrc& crc, const Extent* place, const EmitText& emit) {
  return file.container == Container::kTorchSave ? lay_out_archive(file, tensors, crc, place, emit)
                                                 : lay_out_safetensors(file, tensors, emit);
}

bool TensorFilesTarget::wants_crcs() const {
  return std::any_of(files_.begin(), files_.end(),
                     [](const TensorsFile& f) { return f.container == Container::kTorchSave && !f.is_empty; });
}

// Emits the bytes of a file that overlap `place` (null: all of them).
Status TensorFilesTarget::seal_file(const TensorsFile& file, const PayloadCrc& crc, const Extent* place,
                                    const EmitBytes& emit) {
  std::vector<FileTensor> tensors = file.list();
  TRY(lay_out(file, tensors, crc, place, [&](Index offset, std::string_view text) -> Status {
    if (place && (offset >= end_of(*place) || place->offset >= offset + std::ssize(text))) return {};
    return emit(file.file, offset, as_bytes(text));
  }));
  return {};
}

Status TensorFilesTarget::seal(const PayloadCrc& crc, const EmitBytes& emit) const {
  for (const TensorsFile& f : files_) TRY(seal_file(f, crc, nullptr, emit));
  for (const TextFile& f : texts_) TRY(emit(f.file, f.offset, as_bytes(f.text)));
  return {};
}

Status TensorFilesTarget::seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const {
  for (const TensorsFile& f : files_)
    if (f.file == place.file) TRY(seal_file(f, crc, &place, emit));
  for (const TextFile& f : texts_)
    if (f.file == place.file) TRY(emit(f.file, f.offset, as_bytes(f.text)));
  return {};
}

std::uint32_t TensorFilesTarget::append(std::string name, Index size) {
  catalog_.files.push_back({std::move(name), size});
  return static_cast<std::uint32_t>(catalog_.files.size() - 1);
}

Result<std::vector<Extent>> TensorFilesTarget::append(std::string name, TensorsFile file,
                                                      std::vector<FileTensor> tensors) {
  file.file = static_cast<std::uint32_t>(catalog_.files.size());
  file.metadata = metadata_;
  append(std::move(name), TRY(lay_out(file, tensors, nullptr, nullptr, nullptr)));
  file.is_empty = tensors.empty();
  files_.push_back(std::move(file));
  std::vector<Extent> extents;
  extents.reserve(tensors.size());
  for (const FileTensor& t : tensors) extents.push_back(t.extent);
  return extents;
}

Result<std::vector<Extent>> TensorFilesTarget::add_archive(std::string name, const std::vector<FileTensor>& tensors,
                                                           torch_archive::Content content) {
  return append(std::move(name), {0, Container::kTorchSave, [tensors] { return tensors; }, std::move(content)},
                tensors);
}

Result<std::vector<Extent>> TensorFilesTarget::add_file(std::string name, Container container,
                                                        const std::vector<FileTensor>& tensors) {
  return append(std::move(name), {0, container, [tensors] { return tensors; }, std::nullopt}, tensors);
}

Result<std::vector<Extent>> TensorFilesTarget::add_file(std::string name, Container container,
                                                        std::vector<FileTensor> now, ListTensors list) {
  return append(std::move(name), {0, container, std::move(list), std::nullopt}, std::move(now));
}

Status TensorFilesTarget::add_whole(std::string name, Container container, std::span<TargetTensor> tensors,
                                    std::string_view prefix) {
  std::vector<FileTensor> stored;
  stored.reserve(tensors.size());
  const auto add = [skipped = prefix.size()](std::vector<FileTensor>& to, const auto& t) {
    to.push_back({t.name.substr(skipped), t.dtype, t.shape, {}});
  };
  for (const TargetTensor& t : tensors) add(stored, t);
  const auto list = [this, add, first = catalog_.tensors().size(), n = tensors.size()] {
    std::vector<FileTensor> out;
    out.reserve(n);
    for (std::size_t i = first; i < first + n; ++i) add(out, catalog_.tensors()[i]);
    return out;
  };
  const auto extents = TRY(add_file(std::move(name), container, std::move(stored), list));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Tensor tensor;
    tensor.name = std::move(tensors[i].name);
    tensor.dtype = tensors[i].dtype;
    tensor.shape = tensors[i].shape;
    tensor.fragments = FragmentList(tensor.shape.rank());
    tensor.fragments.add(whole(tensor.shape), extents[i]);
    TRY(catalog_.add(std::move(tensor)));
  }
  return {};
}

void TensorFilesTarget::add_constant(const Extent& place, std::string bytes) {
  texts_.push_back({place.file, std::move(bytes), place.offset});
}

void TensorFilesTarget::add_text(std::string name, std::string text) {
  const std::uint32_t file = append(std::move(name), std::ssize(text));
  texts_.push_back({file, std::move(text), 0});
}

Result<std::vector<std::span<TargetTensor>>> cut_by_size(std::span<TargetTensor> tensors, Index max_file_bytes,
                                                         Index& total) {
  std::vector<std::span<TargetTensor>> files(1);
  total = 0;
  Index in_file = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TargetTensor& tensor = tensors[i];
    const auto elements = checked_volume(tensor.shape);
    const auto bytes = elements ? checked_mul(*elements, byte_size(tensor.dtype)) : std::nullopt;
    const auto sum = bytes ? checked_add(total, *bytes) : std::nullopt;
    if (!sum) return unsupported(tensor_text(tensor.name) + ": 2^63 bytes or more");
    if (!files.back().empty() && *bytes > max_file_bytes - in_file) {
      files.emplace_back();
      in_file = 0;
    }
    files.back() = tensors.subspan(i - files.back().size(), files.back().size() + 1);
    in_file += *bytes;
    total = *sum;
  }
  return files;
}

Json weight_map(const Catalog& catalog, IndexOrder order) {
  std::vector<const Tensor*> tensors;
  for (const Tensor& tensor : catalog.tensors()) tensors.push_back(&tensor);
  if (order == IndexOrder::kByName)
    std::sort(tensors.begin(), tensors.end(), [](const Tensor* a, const Tensor* b) { return a->name < b->name; });
  Json map = Json::object();
  for (const Tensor* tensor : tensors) map.set(tensor->name, catalog.files[tensor->fragments.extent(0).file].path);
  return map;
}

namespace {

// diffusers' ConfigMixin writes this member. Its loaders look for files with a name of their own
// (diffusers/utils/constants.py).
bool is_of_diffusers(const std::optional<Json>& config) {
  return config && config->contains("_class_name") && !config->contains("model_type");
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out_model(LayoutRequest request, std::string_view stem, Container container) {
  if (is_of_diffusers(request.config)) stem = "diffusion_pytorch_model";
  if (request.mesh.ranks() != 1)
    return unsupported("a Hugging Face model's files hold whole tensors: expected a mesh of one rank, got " +
                       request.mesh.to_string());
  if (!request.blobs.empty())
    return internal_error("a Hugging Face model's files hold tensors only: got object '" +
                          printable(request.blobs.front().name) + "'");
  auto target = std::make_unique<TensorFilesTarget>(request.header_metadata);
  Index total = 0;
  std::vector<TargetTensor> adapter;
  const auto is_adapters = [](const TargetTensor& t) { return t.name.starts_with(kAdapterPrefix); };
  std::copy_if(request.tensors.begin(), request.tensors.end(), std::back_inserter(adapter), is_adapters);
  std::erase_if(request.tensors, is_adapters);
  TRY(target->catalog().reserve(request.tensors.size() + adapter.size()));
  const auto files = TRY(cut_by_size(request.tensors, request.max_file_bytes, total));
  for (std::size_t i = 0; i < files.size(); ++i)
    TRY(target->add_whole(numbered(stem, i, files.size(), container), container, files[i]));
  if (files.size() > 1) {
    Json index = Json::object();
    index.set("metadata", Json::object().set("total_size", total))
        .set("weight_map", weight_map(target->catalog(), IndexOrder::kByName));  // huggingface_hub sorts it by name
    target->add_text(numbered(stem, 0, 1, container) + ".index.json", to_text(index, 2) + "\n");
  }
  if (!adapter.empty()) {
    std::string file = "adapter/adapter_model" + std::string(container_extension(container));
    TRY(target->add_whole(std::move(file), container, adapter, kAdapterPrefix));
  }
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace reshard
