// SPDX-License-Identifier: Apache-2.0
#include "formats/torch_checkpointing/torch_checkpointing.h"

#include <algorithm>
#include <array>

#include "formats/torch_checkpointing/metadata.h"
#include "lib/base/file.h"
#include "lib/base/text.h"

namespace reshard {
namespace torch_checkpointing {

std::optional<RankFile> parse_rank_file(std::string_view name) {
  static constexpr std::array<std::string_view, 3> kExtensions = {".pt", ".safetensors", ".json"};
  for (const std::string_view extension : kExtensions) {
    if (!name.ends_with(extension)) continue;
    const std::string_view stem = name.substr(0, name.size() - extension.size());
    const std::size_t mark = stem.rfind('_');
    if (mark == std::string_view::npos || mark == 0) return std::nullopt;
    const auto rank = parse_number(stem.substr(mark + 1));
    if (!rank || *rank >= kMaxMeshRanks) return std::nullopt;
    return RankFile{std::string(stem.substr(0, mark)), std::string(extension), *rank};
  }
  return std::nullopt;
}

namespace {

bool is_pickle(const PathSnapshot& place) { return place.head().starts_with('\x80'); }

// Returns whether there is metadata, or, for a save without it, whether its name and files look like one.
Result<bool> recognises(const PathSnapshot& place) {
  const std::string name = place.name();
  if (!place.is_directory()) return name == kMetadataFile && is_pickle(place);
  if (place.has_file(kMetadataFile)) return is_pickle(*TRY(place.inside(kMetadataFile)));
  if (!name.starts_with("tmp_") && !name.starts_with("step-")) return false;
  const auto is_of_model = [](std::string_view file) {
    const auto parsed = parse_rank_file(file);
    return parsed && parsed->item == kModelItem;
  };
  return place.has_file_like(is_of_model) &&
         !place.has_file_like([](std::string_view file) { return file.ends_with(".index.json"); });
}

}  // namespace
}  // namespace torch_checkpointing

const Format kTorchCheckpointingFormat = {
    .name = "torch_checkpointing",
    .title = "torch_checkpointing",
    .recognises = torch_checkpointing::recognises,
    .open = torch_checkpointing::open,
    .lay_out = torch_checkpointing::lay_out,
    .holds = StateSupport::kTensors,
    .sharding = Sharding::kBoxes,
};

}  // namespace reshard
