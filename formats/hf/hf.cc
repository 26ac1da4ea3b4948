#include "formats/hf/hf.h"

#include <algorithm>

#include "formats/hf/read.h"
#include "formats/hf/write.h"

namespace reshard {
namespace {

bool recognises(const std::string& path) {
  if (!is_directory(path)) return path_exists(path) && (is_safetensors_name(path) || is_index_name(path));
  const auto entries = list_directory(path);
  if (!entries) return false;
  bool found = false;
  for (const DirectoryEntry& entry : *entries) {
    if (entry.name == ".metadata") return false;  // a Distributed Checkpoint
    found = found || (!entry.is_directory && (is_safetensors_name(entry.name) || is_index_name(entry.name)));
  }
  return found;
}

}  // namespace

const Format kSafetensorsFormat = {
    .name = "hf",
    .title = "Hugging Face safetensors",
    .recognises = recognises,
    .open = open_safetensors,
    .lay_out = lay_out_safetensors,
    .holds_whole_tensors = true,
    .model_only = true,
    .hf_names = true,
};

}  // namespace reshard
