#include "formats/megatron/megatron.h"

#include <algorithm>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard {
namespace megatron {
namespace {

constexpr Index kMaxMetadataBytes = Index{1} << 16;
constexpr std::string_view kRankDirectory = "mp_rank_";
constexpr std::string_view kSharded = "torch_dist";

bool is_iteration(const std::string& path) { return has_sharded_files(path) || has_rank_files(path); }

// What latest_checkpointed_iteration.txt in `path` names: "iter_0000010", "release"; empty where there is none.
std::string latest_of(const std::string& path) {
  const auto text = read_whole_file(path_join(path, kLatestFile), 64);
  if (!text) return {};
  const std::size_t end = text->find_last_not_of(" \r\n");
  const std::string word = end == std::string::npos ? std::string() : text->substr(0, end + 1);
  if (word == kRelease) return word;
  if (word.size() > 18 || !is_digits(word)) return {};
  return "iter_" + std::string(word.size() < 7 ? 7 - word.size() : 0, '0') + word;
}

bool recognises(const std::string& path) {
  return is_directory(path) && (is_iteration(path) || !latest_of(path).empty());
}

Result<std::unique_ptr<Reader>> open(const std::string& path, const OpenOptions& options) {
  std::string directory = path;
  if (!is_iteration(path)) {
    const std::string latest = latest_of(path);
    directory = path_join(path, latest);
    if (!is_iteration(directory))
      return io_error(path_join(path, kLatestFile) + ": names " + latest + ", which is " +
                      (path_exists(directory) ? "no checkpoint of Megatron" : "missing") +
                      "; another iteration can be opened by its own path");
  }
  auto reader =
      TRY(has_sharded_files(directory) ? open_sharded(directory, options) : open_rank_files(directory, options));
  if (directory != path) reader->catalog().metadata_files.push_back(path_join("..", kLatestFile));
  return reader;
}

}  // namespace

bool is_rank_directory(std::string_view name) {
  if (!name.starts_with(kRankDirectory)) return false;
  name.remove_prefix(kRankDirectory.size());
  return !name.empty() && name.find_first_not_of("0123456789_") == std::string_view::npos && name.front() != '_';
}

bool has_rank_files(const std::string& path) {
  const auto entries = list_directory(path);
  return entries && std::any_of(entries->begin(), entries->end(),
                                [](const DirectoryEntry& e) { return e.is_directory && is_rank_directory(e.name); });
}

bool has_sharded_files(const std::string& path) {
  if (!path_exists(path_join(path, ".metadata"))) return false;
  if (path_exists(path_join(path, kCommonFile))) return true;
  const auto text = read_whole_file(path_join(path, kMetadataFile), kMaxMetadataBytes);
  const auto json = text ? parse_json(*text, kMetadataFile) : Result<Json>(text.error());
  const Json* backend = json ? json->find("sharded_backend") : nullptr;
  return backend && backend->is_string() && *backend->as_string() == kSharded;
}

}  // namespace megatron

const Format kMegatronFormat = {
    .name = "megatron",
    .title = "Megatron-LM",
    .recognises = megatron::recognises,
    .open = megatron::open,
    .lay_out = megatron::lay_out_sharded,
    .holds = Holds::kModel,
    .sharding = Sharding::kBoxes,
    .has_masters = true,
    .own_names = "megatron",
    .vocab_divisible_by = 128,
};

}  // namespace reshard
