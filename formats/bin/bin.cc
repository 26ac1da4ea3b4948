// SPDX-License-Identifier: Apache-2.0
#include "formats/bin/bin.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "formats/encoding/torch_file.h"
#include "formats/encoding/weight_index.h"
#include "formats/tensor_files/reader.h"
#include "formats/tensor_files/target.h"

namespace reshard {
namespace bin {

namespace {

constexpr std::string_view kEnd = ".bin";
constexpr std::string_view kStems[] = {"pytorch_model", "diffusion_pytorch_model"};

bool is_of_model(std::string_view name) {
  const auto begins = [&](std::string_view stem) { return name.starts_with(stem); };
  return std::any_of(std::begin(kStems), std::end(kStems), begins) && name.ends_with(kEnd);
}

}  // namespace

bool is_single_name(std::string_view name) {
  return name == "pytorch_model.bin" || name == "diffusion_pytorch_model.bin";
}

bool is_index_name(std::string_view name) { return parse_weight_index_name(name, kEnd).has_value(); }

bool is_variant(std::string_view name) {
  return std::any_of(std::begin(kStems), std::end(kStems),
                     [&](std::string_view stem) { return is_variant_name(name, stem, kEnd); });
}

bool is_numbered_name(std::string_view name) {
  const bool is_of_torchtune = name.starts_with("model-") && name.ends_with(".bin");
  return (is_of_model(name) || is_of_torchtune) && name.find("-of-") != std::string_view::npos;
}

namespace {

// Files that are read if no model is next to them: LitGPT's adapters ("lit_model.pth.lora", which merging replaces by
// lit_model.pth), and Composer's optimizer, alone in its directory (composer/checkpoint/save.py).
constexpr std::string_view kLitAdapter = "lit_model.pth.", kComposerOptimizer = "optim.pt";

bool is_usual(std::string_view name) {
  constexpr std::string_view kUsual[] = {"ckpt.pt",   "model.pt",       "checkpoint.pt",
                                         "model.pth", "checkpoint.pth", "lit_model.pth"};
  return std::find(std::begin(kUsual), std::end(kUsual), name) != std::end(kUsual);
}

}  // namespace

std::vector<std::string> usual_names(const PathSnapshot& directory) {
  std::vector<std::string> models, others;
  for (const DirectoryEntry& e : directory.entries()) {
    if (e.is_directory) continue;
    if (is_usual(e.name) || e.name.ends_with(".ckpt")) models.push_back(e.name);
    if (e.name.starts_with(kLitAdapter) || (e.name == kComposerOptimizer && directory.entries().size() == 1))
      others.push_back(e.name);
  }
  return models.empty() ? others : models;
}

namespace {

// Returns whether an index names the file, or a program gives such names to models. Names in .ckpt and .pt may be any.
bool is_own_file(const Catalog& catalog, std::string_view path) {
  const std::string_view name = path.substr(path.rfind('/') + 1);  // npos + 1 is 0
  return !catalog.metadata_files.empty() || is_of_model(name) || is_numbered_name(name) || is_usual(name) ||
         name.starts_with(kLitAdapter) || name == kComposerOptimizer || name == kAdapterFile ||
         name == "optimizer.pt" || name == "optimizer.bin";
}

Result<bool> recognises(const PathSnapshot& place) {
  if (!place.is_directory()) return is_index_name(place.path()) || TorchFile::recognises(place.head());
  if (place.has_file_like(is_single_name) || place.has_file_like(is_index_name) ||
      place.has_file_like(is_numbered_name) || place.has_file_like(is_variant) || place.has_file(kAdapterFile))
    return true;
  const std::vector<std::string> usual = usual_names(place);
  return usual.size() == 1 && TorchFile::recognises(TRY(place.inside(usual.front()))->head());
}

// Lays out files that each hold a dict of tensors, which torch.load(weights_only=True, mmap=True) reads
// (transformers/modeling_utils.py, save_pretrained(safe_serialization=False)).
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
    .holds = StateSupport::kModel,
    .is_own_file = bin::is_own_file,
    .hf_names = true,
    .side_files = kModelSideFiles,
    .max_file_bytes = kUsualFileBytes,
};

}  // namespace reshard
