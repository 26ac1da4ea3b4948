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

bool is_pickle(const std::string& path) {
  const auto file = File::open(path);
  std::array<std::byte, 1> first{};
  return file && file->read_at(0, first) && first[0] == std::byte{0x80};
}

// Its metadata; or that of a save which is known by where it lies.
bool recognises(const std::string& path) {
  if (!is_directory(path)) return base_name(path) == kMetadataFile && is_pickle(path);
  if (path_exists(path_join(path, kMetadataFile))) return is_pickle(path_join(path, kMetadataFile));
  const std::string name = base_name(path);
  const auto entries = list_directory(path);
  if (!entries || !(name.starts_with("tmp_") || name.starts_with("step-"))) return false;
  return std::any_of(entries->begin(), entries->end(),
                     [&](const DirectoryEntry& e) {
                       const auto file = e.is_directory ? std::nullopt : parse_rank_file(e.name);
                       return file && file->item == kModelItem;
                     }) &&
         std::none_of(entries->begin(), entries->end(),
                      [](const DirectoryEntry& e) { return e.name.ends_with(".index.json"); });
}

}  // namespace
}  // namespace torch_checkpointing

const Format kTorchCheckpointingFormat = {
    .name = "torch_checkpointing",
    .title = "torch_checkpointing",
    .recognises = torch_checkpointing::recognises,
    .open = torch_checkpointing::open,
    .lay_out = torch_checkpointing::lay_out,
    .holds = Holds::kTensors,
    .sharding = Sharding::kBoxes,
};

}  // namespace reshard
