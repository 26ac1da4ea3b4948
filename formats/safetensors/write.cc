#include "formats/safetensors/write.h"

#include <algorithm>
#include <cstdio>

#include "formats/encoding/safetensors_header.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

class SafetensorsTarget : public Target {
 public:
  static Result<std::unique_ptr<Target>> make(const LayoutRequest& request);

  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc&, const EmitBytes& emit) const override {
    for (std::size_t file = 0; file < texts_.size(); ++file)
      TRY(emit(static_cast<std::uint32_t>(file), 0, as_bytes(texts_[file])));
    return {};
  }

 private:
  Status add_file(std::string name, std::vector<SafetensorsEntry> entries);
  void add_index(Index total_size);

  std::vector<std::string> texts_;  // of each of the catalog's files, the bytes before its tensor data
};

// The entries of each file: as many in a row as fit.
Result<std::vector<std::vector<SafetensorsEntry>>> cut(const std::vector<TargetTensor>& tensors, Index max_file_bytes,
                                                       Index& total) {
  std::vector<std::vector<SafetensorsEntry>> files(1);
  total = 0;
  Index in_file = 0;
  for (const TargetTensor& tensor : tensors) {
    const auto elements = checked_volume(tensor.shape);
    const auto bytes = elements ? checked_mul(*elements, byte_size(tensor.dtype)) : std::nullopt;
    const auto sum = bytes ? checked_add(total, *bytes) : std::nullopt;
    if (!sum) return unsupported("tensor '" + printable(tensor.name) + "': 2^63 bytes or more");
    if (!files.back().empty() && *bytes > max_file_bytes - in_file) {
      files.emplace_back();
      in_file = 0;
    }
    files.back().push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    in_file += *bytes;
    total = *sum;
  }
  return files;
}

std::string file_name(std::size_t i, std::size_t n) {
  if (n == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, n);
  return name;
}

Status SafetensorsTarget::add_file(std::string name, std::vector<SafetensorsEntry> entries) {
  texts_.push_back(TRY(safetensors_header(entries, {{"format", "pt"}})));
  const auto file = static_cast<std::uint32_t>(catalog_.files.size());
  const auto header_bytes = static_cast<Index>(texts_.back().size());
  const Index end = entries.empty() ? header_bytes : entries.back().offset + entries.back().length;
  catalog_.files.push_back({std::move(name), end});
  for (SafetensorsEntry& entry : entries) {
    Tensor tensor;
    tensor.name = std::move(entry.name);
    tensor.dtype = entry.dtype;
    tensor.shape = entry.shape;
    tensor.fragments = FragmentList(entry.shape.rank());
    Fragment fragment;
    fragment.box = whole(entry.shape);
    fragment.strides = row_major_strides(entry.shape);
    fragment.extent = {file, entry.offset, entry.length};
    tensor.fragments.add(fragment);
    TRY(catalog_.add(std::move(tensor)));
  }
  return {};
}

// With its keys sorted, as huggingface_hub writes it.
void SafetensorsTarget::add_index(Index total_size) {
  std::vector<const Tensor*> tensors;
  for (const Tensor& tensor : catalog_.tensors()) tensors.push_back(&tensor);
  std::sort(tensors.begin(), tensors.end(), [](const Tensor* a, const Tensor* b) { return a->name < b->name; });
  Json weight_map = Json::object();
  for (const Tensor* tensor : tensors)
    weight_map.set(tensor->name, catalog_.files[tensor->fragments.extent(0).file].path);
  Json index = Json::object();
  index.set("metadata", Json::object().set("total_size", total_size)).set("weight_map", std::move(weight_map));
  texts_.push_back(to_text(index, 2) + "\n");
  catalog_.files.push_back({"model.safetensors.index.json", static_cast<Index>(texts_.back().size())});
}

Result<std::unique_ptr<Target>> SafetensorsTarget::make(const LayoutRequest& request) {
  Index total = 0;
  auto files = TRY(cut(request.tensors, request.max_file_bytes, total));
  auto target = std::make_unique<SafetensorsTarget>();
  for (std::size_t i = 0; i < files.size(); ++i) TRY(target->add_file(file_name(i, files.size()), std::move(files[i])));
  if (files.size() > 1) target->add_index(total);
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out_safetensors(LayoutRequest request) {
  if (request.mesh.ranks() != 1)
    return unsupported("Hugging Face safetensors hold whole tensors: expected a mesh of one rank, got " +
                       request.mesh.to_string());
  if (!request.blobs.empty())
    return internal_error("Hugging Face safetensors hold tensors only: got object '" +
                          printable(request.blobs.front().name) + "'");
  return SafetensorsTarget::make(request);
}

}  // namespace reshard
