// SPDX-License-Identifier: Apache-2.0
#include "formats/megatron/megatron.h"

#include <algorithm>

#include "formats/megatron/run_state.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard {
namespace megatron {
namespace {

constexpr Index kMaxMetadataBytes = Index{1} << 16;
constexpr std::string_view kRankDirectory = "mp_rank_";
constexpr std::string_view kSharded = "torch_dist";

Result<bool> is_iteration(const PathSnapshot& place) {
  if (has_rank_files(place)) return true;
  return has_sharded_files(place);
}

// Returns the directory that latest_checkpointed_iteration.txt names, "iter_0000010" or "release", or an empty text if
// there is no such file.
Result<std::string> latest_of(const PathSnapshot& place) {
  const auto text = TRY(place.text_of(kLatestFile, 64));
  const std::size_t end = text ? text->find_last_not_of(" \r\n") : std::string::npos;
  const std::string word = end == std::string::npos ? std::string() : text->substr(0, end + 1);
  if (word == kRelease) return word;
  if (word.size() > 18 || !is_digits(word)) return std::string();
  return iteration_directory(word);
}

Result<bool> recognises_rank_files(const PathSnapshot& place) {
  if (has_rank_files(place)) return true;
  const std::string latest = TRY(latest_of(place));
  return !latest.empty() && has_rank_files(*TRY(place.inside(latest)));
}

Result<bool> recognises(const PathSnapshot& place) {
  if (TRY(is_iteration(place))) return true;
  return !TRY(latest_of(place)).empty() && TRY(iteration_without_tensors(place)).empty();
}

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  const PathSnapshot* directory = &place;
  const bool is_run = !TRY(is_iteration(place));
  if (is_run) {
    const std::string latest = TRY(latest_of(place));
    directory = TRY(place.inside(latest));
    if (!TRY(is_iteration(*directory)))
      return io_error(path_join(place.path(), kLatestFile) + ": names " + latest + ", which is " +
                      (directory->is_there() ? "not a Megatron checkpoint" : "missing") +
                      "; another iteration can be opened by its own path");
  }
  auto reader = TRY(TRY(has_sharded_files(*directory)) ? open_sharded(*directory, options)
                                                       : open_rank_files(*directory, options));
  if (is_run) reader->catalog().latest_file = path_join("..", kLatestFile);
  return reader;
}

}  // namespace

std::string iteration_directory(const std::string& number) {
  return "iter_" + std::string(number.size() < 7 ? 7 - number.size() : 0, '0') + number;
}

bool is_rank_directory(std::string_view name) {
  if (!name.starts_with(kRankDirectory)) return false;
  name.remove_prefix(kRankDirectory.size());
  return !name.empty() && name.find_first_not_of("0123456789_") == std::string_view::npos && name.front() != '_';
}

bool has_rank_files(const PathSnapshot& place) {
  return std::any_of(place.entries().begin(), place.entries().end(),
                     [](const DirectoryEntry& e) { return e.is_directory && is_rank_directory(e.name); });
}

Result<bool> has_sharded_files(const PathSnapshot& place) {
  if (!TRY(place.has_hidden_file(".metadata"))) return false;
  if (place.has_file(kCommonFile)) return true;
  const auto text = TRY(place.text_of(kMetadataFile, kMaxMetadataBytes));
  const auto json = text ? parse_json(*text, kMetadataFile) : Result<Json>(Json());
  const Json* backend = json && json->is_object() ? json->find("sharded_backend") : nullptr;
  return backend && backend->is_string() && *backend->as_string() == kSharded;
}

Result<std::string> iteration_without_tensors(const PathSnapshot& place) {
  if (!place.has_file_like([](std::string_view name) { return name.ends_with(".safetensors"); })) return std::string();
  std::string latest = TRY(latest_of(place));
  if (latest.empty()) return latest;
  const PathSnapshot& iteration = *TRY(place.inside(latest));
  const auto may_have_tensors = [](const DirectoryEntry& e) { return e.is_directory || e.name != kCommonFile; };
  const auto& entries = iteration.entries();
  return std::any_of(entries.begin(), entries.end(), may_have_tensors) ? std::string() : std::move(latest);
}

namespace {

constexpr Format kRankFiles = {
    .name = "megatron-legacy",
    .title = "Megatron-LM's per-rank files",
    .recognises = recognises_rank_files,
    .open = open,
    .lay_out = [](LayoutRequest request) -> Result<std::unique_ptr<Target>> {
      return lay_out_rank_files(std::move(request), kTransformerEngine);
    },
    .holds = StateSupport::kAdam,
    .takes_object = RunState::takes_object,
    .sharding = Sharding::kOwnLocal,
    .has_masters = true,
    .own_names = "megatron",
    .vocab_divisible_by = 128,
    .stage_rule = StageRule::kEven,
    .shares_experts = true,
};

}  // namespace
}  // namespace megatron

const Format kMegatronFormat = {
    .name = "megatron",
    .title = "Megatron-LM",
    .recognises = megatron::recognises,
    .open = megatron::open,
    .lay_out = megatron::lay_out_sharded,
    .holds = StateSupport::kAdam,
    .takes_object = megatron::RunState::takes_object,
    .sharding = Sharding::kBoxes,
    .has_masters = true,
    .own_names = "megatron",
    .vocab_divisible_by = 128,
    .shares_experts = true,
};

constinit const Format kMegatronLegacyFormat = megatron::kRankFiles;

constinit const Format kMegatronLegacyLocalFormat = written_as(
    megatron::kRankFiles, "megatron-legacy-local", "Megatron-LM's per-rank files, without Transformer Engine",
    [](LayoutRequest request) -> Result<std::unique_ptr<Target>> {
      return megatron::lay_out_rank_files(std::move(request), megatron::kOwnModules);
    });

}  // namespace reshard
