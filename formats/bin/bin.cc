#include "formats/bin/bin.h"

#include <algorithm>
#include <utility>

#include "formats/encoding/torch_file.h"
#include "formats/tensor_files/reader.h"
#include "formats/tensor_files/target.h"

namespace reshard {
namespace bin {

namespace {

bool is_of_model(std::string_view name) {
  return (name.starts_with("pytorch_model") || name.starts_with("diffusion_pytorch_model")) && name.ends_with(".bin");
}

}  // namespace

bool is_single_name(std::string_view name) {
  return name == "pytorch_model.bin" || name == "diffusion_pytorch_model.bin";
}

bool is_index_name(std::string_view name) { return name.ends_with(".bin.index.json"); }

bool is_numbered_name(std::string_view name) {
  return is_of_model(name) && name.find("-of-") != std::string_view::npos;
}

namespace {

Result<bool> recognises(const Place& place) {
  if (!place.is_directory()) return is_index_name(place.path()) || TorchFile::recognises(place.head());
  return place.has_file_like(is_single_name) || place.has_file_like(is_index_name) ||
         place.has_file_like(is_numbered_name) || place.has_file(kAdapterFile);
}

// Each file is a dict of its tensors that torch.load(weights_only=True, mmap=True) takes.
// (transformers/modeling_utils.py, save_pretrained(safe_serialization=False))
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  return lay_out_model(std::move(request), "pytorch_model", Container::kTorchSave);
}

}  // namespace
}  // namespace bin

const Format kBinFormat = {
    .name = "bin",
    .title = "torch.save",
    .recognises = bin::recognises,
    .open = bin::open,
    .lay_out = bin::lay_out,
    .holds = Holds::kModel,
    .hf_names = true,
    .side_files = kModelSideFiles,
    .max_file_bytes = kUsualFileBytes,
};

}  // namespace reshard
