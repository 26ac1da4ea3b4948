// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/orbax.h"

#include <algorithm>

#include "formats/orbax/item_metadata.h"
#include "formats/orbax/ocdbt.h"

namespace reshard {
namespace orbax {
namespace {

constexpr std::string_view kJsonFile = "metadata";  // the file of a JSON item
constexpr std::string_view kV1Marker = "orbax.checkpoint";
// Names that CheckpointManager, MaxText, Flax and v1 use for an item of arrays: needed to recognise a step without
// metadata of its own.
constexpr std::string_view kUsualItems[] = {"default", "items",       "state",          "params",
                                            "pytree",  "train_state", "training_state", "model"};

bool is_unfinished(std::string_view name) { return name.find(kUnfinished) != std::string_view::npos; }

bool has_processes(const PathSnapshot& place) {
  return std::any_of(place.entries().begin(), place.entries().end(),
                     [](const DirectoryEntry& e) { return e.is_directory && e.name.starts_with(kProcessPrefix); });
}

// Returns whether the subdirectories are arrays. Without a database and metadata, only the first few are checked.
Result<bool> has_array_directories(const PathSnapshot& place) {
  int looked_at = 0;
  for (const DirectoryEntry& entry : place.entries()) {
    if (!entry.is_directory || ++looked_at > 4) continue;
    const PathSnapshot& array = *TRY(place.inside(entry.name));
    if (TRY(array.has_hidden_file(".zarray"))) return true;
    if (const auto text = TRY(array.text_of("zarr.json", Index{1} << 20));
        text && text->find("\"array\"") != text->npos)
      return true;
  }
  return false;
}

// Returns whether arrays are in directories of directories, as Levanter and EasyDeL save a tree:
// `model/layers/w/.zarray`. Follows the first directory of each level.
Result<bool> has_nested_arrays(const PathSnapshot& place) {
  constexpr int kMaxDepth = 12;
  const bool is_usual =
      std::find(std::begin(kUsualItems), std::end(kUsualItems), place.name()) != std::end(kUsualItems);
  if (!has_step_files(place) && !is_usual) return false;
  const PathSnapshot* at = &place;
  for (int depth = 0; depth < kMaxDepth; ++depth) {
    const auto& entries = at->entries();
    const auto first =
        std::find_if(entries.begin(), entries.end(), [](const DirectoryEntry& e) { return e.is_directory; });
    if (first == entries.end()) return false;
    at = TRY(at->inside(first->name));
    if (TRY(has_array_directories(*at))) return true;
  }
  return false;
}

bool is_item(const PathSnapshot& place) {
  return place.has_file(kManifest) || place.has_file(kItemMetadata) || has_processes(place);
}

bool has_step_metadata(const PathSnapshot& place) {
  return place.has_file(kCheckpointMetadata) || place.has_file(kV1Marker);
}

Status sort_out(const PathSnapshot& directory, const DirectoryEntry& entry, Parts& out) {
  const PathSnapshot& inside = *TRY(directory.inside(entry.name));
  if (is_item(inside) || is_unfinished(entry.name) ||
      (has_step_metadata(directory) && TRY(has_array_directories(inside))))
    out.items.push_back({entry.name, &inside});
  else if (inside.has_file(kJsonFile))
    out.json.push_back(entry.name);
  else
    out.others.push_back(entry.name);
  return {};
}

// Returns whether a path is a file that belongs to an item and may be opened in its place.
Result<bool> is_file_of_item(const PathSnapshot& place) {
  const std::string name = place.name();
  if (!place.is_file() || (name != kManifest && name != kItemMetadata && name != kCheckpointMetadata)) return false;
  return !TRY(find_parts_of(*TRY(place.parent()))).items.empty();
}

Result<bool> recognises(const PathSnapshot& place) {
  if (!place.is_directory()) return is_file_of_item(place);
  return !TRY(find_parts_of(place)).items.empty();
}

}  // namespace

bool has_step_files(const PathSnapshot& place) {
  constexpr std::string_view kFiles[] = {"metadata.json", "tensorstore_index.json", "checkpoint_metadata.json"};
  return std::any_of(std::begin(kFiles), std::end(kFiles), [&](std::string_view name) { return place.has_file(name); });
}

Result<Parts> find_parts_of(const PathSnapshot& place) {
  Parts out;
  out.directory = &place;
  if (is_item(place)) {
    out.items.push_back({"", &place});
    return out;
  }
  const bool is_step = has_step_metadata(place);
  for (const DirectoryEntry& entry : place.entries()) {
    if (!entry.is_directory) continue;
    std::string_view name = entry.name;
    name = name.substr(0, name.find(kUnfinished));
    const bool is_usual = std::find(std::begin(kUsualItems), std::end(kUsualItems), name) != std::end(kUsualItems);
    if (is_step || is_usual) TRY(sort_out(place, entry, out));
  }
  if (!out.items.empty()) return out;
  if (is_step || is_unfinished(place.name()) || TRY(has_array_directories(place))) {
    out.items.push_back({"", &place});
  } else if (TRY(has_nested_arrays(place))) {
    out.items.push_back({"", &place});
    out.others.clear();
  }
  return out;
}

}  // namespace orbax

namespace orbax {
namespace {

constexpr Format kRow = {
    .name = "orbax",
    .title = "Orbax",
    .recognises = recognises,
    .open = open,
    .lay_out = lay_out,
    .sharding = Sharding::kBoxes,
    .takes_compression = true,
    .max_file_bytes = Index{2} << 30,  // ocdbt_target_data_file_size
};

}  // namespace
}  // namespace orbax

constinit const Format kOrbaxFormat = orbax::kRow;

constinit const Format kOrbaxZarr2Format =
    written_as(orbax::kRow, "orbax-zarr2", "Orbax with arrays of zarr 2", orbax::lay_out_zarr2);

}  // namespace reshard
