// SPDX-License-Identifier: Apache-2.0
#include "formats/meta/meta.h"

#include <algorithm>

#include "lib/base/file.h"
#include "lib/base/text.h"

namespace reshard {
namespace meta {

std::optional<Index> rank_of_file(std::string_view name) {
  if (name == "consolidated.pth") return 0;
  const auto rank = take(name, "consolidated.") ? take_number(name) : std::nullopt;
  return name == ".pth" ? rank : std::nullopt;
}

bool is_safetensors_name(std::string_view name) {
  return name.starts_with("consolidated") && name.ends_with(".safetensors");
}

namespace {

bool is_index_name(std::string_view name) { return name == "consolidated.safetensors.index.json"; }

// Next to Hugging Face's files, Mistral's files are a second copy of the model.
bool is_hugging_face(std::string_view name) {
  return name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
}

bool is_ours(std::string_view name) { return rank_of_file(name) || is_safetensors_name(name) || is_index_name(name); }

Result<bool> recognises(const PathSnapshot& place) {
  if (place.is_file()) return is_ours(place.name());
  return place.has_file_like(is_ours) && !place.has_file_like(is_hugging_face);
}

}  // namespace
}  // namespace meta

const Format kMetaFormat = {
    .name = "meta",
    .title = "Meta and Mistral consolidated",
    .recognises = meta::recognises,
    .open = meta::open,
    .lay_out = nullptr,
    .holds = StateSupport::kModel,
};

}  // namespace reshard
