#include "formats/hf/hf.h"

#include <algorithm>

#include "formats/tensor_files/target.h"

namespace reshard {
namespace hf {

bool is_file_name(std::string_view path) { return path.ends_with(".safetensors"); }
bool is_index_name(std::string_view path) { return path.ends_with(".safetensors.index.json"); }

namespace {

bool recognises(const std::string& path) {
  if (!is_directory(path)) return path_exists(path) && (is_file_name(path) || is_index_name(path));
  const auto entries = list_directory(path);
  if (!entries) return false;
  bool found = false;
  for (const DirectoryEntry& entry : *entries) {
    if (entry.name == ".metadata") return false;  // a Distributed Checkpoint
    found = found || (!entry.is_directory && (is_file_name(entry.name) || is_index_name(entry.name)));
  }
  return found;
}

// As huggingface_hub's save_torch_state_dict cuts a model into files.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {  // NOLINT(performance-unnecessary-value-param)
  return lay_out_model(request, "model", Container::kSafetensors);
}

}  // namespace
}  // namespace hf

const Format kHfFormat = {
    .name = "hf",
    .title = "Hugging Face safetensors",
    .recognises = hf::recognises,
    .open = hf::open,
    .lay_out = hf::lay_out,
    .holds = Holds::kModel,
    .hf_names = true,
    .side_files = kModelSideFiles,
};

}  // namespace reshard
