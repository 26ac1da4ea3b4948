// SPDX-License-Identifier: Apache-2.0
#include "formats/hf/hf.h"

#include <algorithm>
#include <utility>

#include "formats/encoding/weight_index.h"
#include "formats/tensor_files/target.h"
#include "lib/base/file.h"
#include "lib/base/text.h"

namespace reshard {
namespace hf {

bool is_file_name(std::string_view path) { return path.ends_with(".safetensors"); }
bool is_index_name(std::string_view path) { return parse_weight_index_name(path, ".safetensors").has_value(); }

namespace {

bool is_ours(std::string_view name) { return is_file_name(name) || is_index_name(name); }

// Returns whether the name of a model's file may end like this: ".safetensors", "-00001-of-00004.safetensors" or, for
// accelerate's second model, "_1.safetensors"; in published variants after a word such as ".fp16".
bool ends_name(std::string_view rest) {
  static constexpr std::string_view kVariants[] = {".fp16", ".bf16", ".fp32", ".non_ema"};
  for (const std::string_view variant : kVariants)
    if (take(rest, variant)) break;
  const auto take_number = [&](std::string_view before) {
    const std::size_t end = take(rest, before) ? rest.find_first_not_of("0123456789") : 0;
    if (end == 0 || end == std::string_view::npos) return false;
    rest.remove_prefix(end);
    return true;
  };
  if (rest.starts_with('_') && !take_number("_")) return false;
  if (rest.starts_with('-') && (!take_number("-") || !take_number("-of-"))) return false;
  return rest == ".safetensors";
}

// Returns whether a file is a model's: an index next to it names it, or it has a name that loaders look for:
// model.safetensors, model-00001-of-00004.safetensors, shard-00001-model-00001-of-00001.safetensors, and those of
// diffusers, Mistral and adapters.
bool is_own_file(const Catalog& catalog, std::string_view path) {
  if (!is_file_name(path)) return true;  // of another format, in the directory of a training run
  const auto is_index = [&](const std::string& name) {
    return is_index_name(name) && parent_path(name) == parent_path(std::string(path));
  };
  if (std::any_of(catalog.metadata_files.begin(), catalog.metadata_files.end(), is_index)) return true;
  std::string_view name = path.substr(path.rfind('/') + 1);  // npos + 1 is 0
  if (take(name, "shard-")) {
    name.remove_prefix(std::min(name.size(), name.find_first_not_of("0123456789")));
    if (!take(name, "-")) return false;
  }
  static constexpr std::string_view kStems[] = {"model", "diffusion_pytorch_model", "consolidated", "adapter_model"};
  return std::any_of(std::begin(kStems), std::end(kStems), [&](std::string_view stem) {
    return name.starts_with(stem) && ends_name(name.substr(stem.size()));
  });
}

Result<bool> recognises(const PathSnapshot& place) {
  if (place.is_file()) return is_ours(place.path());
  return place.has_file_like(is_ours) && !TRY(place.has_hidden_file(".metadata"));  // of a Distributed Checkpoint
}

// Distributes a model over files as huggingface_hub's save_torch_state_dict does.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  return lay_out_model(std::move(request), "model", Container::kSafetensors);
}

}  // namespace
}  // namespace hf

const Format kHfFormat = {
    .name = "hf",
    .title = "Hugging Face safetensors",
    .recognises = hf::recognises,
    .open = hf::open,
    .lay_out = hf::lay_out,
    .holds = StateSupport::kModel,
    .is_own_file = hf::is_own_file,
    .hf_names = true,
    .side_files = kModelSideFiles,
    .max_file_bytes = kUsualFileBytes,
};

}  // namespace reshard
