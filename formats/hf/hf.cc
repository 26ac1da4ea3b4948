#include "formats/hf/hf.h"

#include <algorithm>
#include <utility>

#include "formats/tensor_files/target.h"

namespace reshard {
namespace hf {

bool is_file_name(std::string_view path) { return path.ends_with(".safetensors"); }
bool is_index_name(std::string_view path) { return path.ends_with(".safetensors.index.json"); }

namespace {

bool is_ours(std::string_view name) { return is_file_name(name) || is_index_name(name); }

Result<bool> recognises(const PathSnapshot& place) {
  if (place.is_file()) return is_ours(place.path());
  return place.has_file_like(is_ours) && !place.has_file(".metadata");  // which is of a Distributed Checkpoint
}

// As huggingface_hub's save_torch_state_dict cuts a model into files.
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
    .holds = Holds::kModel,
    .hf_names = true,
    .side_files = kModelSideFiles,
    .max_file_bytes = kUsualFileBytes,
};

}  // namespace reshard
