// SPDX-License-Identifier: Apache-2.0
#include "formats/colossalai/colossalai.h"

#include <algorithm>
#include <array>

#include "formats/colossalai/rank_files.h"
#include "formats/encoding/torch_file.h"
#include "formats/tensor_files/reader.h"
#include "formats/tensor_files/target.h"
#include "lib/base/text.h"

namespace reshard {
namespace colossalai {

Result<bool> has_file(const std::string& path) { return TRY(path_exists(path)) && !TRY(is_directory(path)); }

PartFiles files_of(const PathSnapshot& directory, Part part) {
  PartFiles out;
  for (const DirectoryEntry& e : directory.entries()) {
    if (e.is_directory) continue;
    if (const auto index = parse_index_name(e.name); index && index->part == part && index->stage == 0)
      out.indexes.push_back(e.name);
    if (const auto shard = parse_shard_name(e.name); shard && shard->part == part) out.shards.push_back(e.name);
  }
  return out;
}

std::string single_file(const PathSnapshot& directory, Part part) {
  constexpr std::array<std::string_view, 2> kModels = {"pytorch_model.bin", "model.safetensors"};
  constexpr std::array<std::string_view, 2> kOptimizers = {"pytorch_optim.bin", "optimizer.safetensors"};
  for (const std::string_view name : part == Part::kModel ? kModels : kOptimizers)
    if (directory.has_file(name)) return std::string(name);
  return {};
}

namespace {

bool looks_like_model(const PathSnapshot& directory) {
  return directory.has_directory(kTemporaryIndexes) || !files_of(directory, Part::kModel).shards.empty();
}

// Returns whether a directory with the usual name holds a model in any form.
bool has_model(const PathSnapshot& directory) {
  return looks_like_model(directory) || !files_of(directory, Part::kModel).indexes.empty() ||
         !single_file(directory, Part::kModel).empty();
}

bool looks_like_optimizer(const PathSnapshot& directory) {
  const PartFiles files = files_of(directory, Part::kOptimizer);
  return !files.shards.empty() || !files.indexes.empty() || directory.has_file(kGroupFile);
}

}  // namespace

bool is_optimizer_file(const PathSnapshot& place) {
  const auto has = [&](std::string_view text) { return place.head().find(text) != std::string::npos; };
  using namespace std::string_view_literals;
  if (TorchFile::recognises(place.head())) return has("}q\0(X\x0c\0\0\0param_groups"sv);
  std::string_view state = place.head();
  state.remove_prefix(std::min(state.find("\"state."), state.size()));
  const bool has_state = take(state, "\"state.") && take_number(state);
  return place.path().ends_with(".safetensors") && (has("\"non_tensor_keys\"") || has_state);
}

Result<Tree> tree_of(const PathSnapshot& place) {
  Tree tree;
  if (!place.is_directory()) {
    tree.root = parent_path(place.path());
    if (is_optimizer_file(place)) {
      tree.optimizer_file = place.name();
      tree.has_optimizer = true;
      return tree;
    }
    tree.index = place.name();
    tree.place = TRY(place.parent());
    tree.has_model = looks_like_model(*tree.place);
    tree.has_optimizer = looks_like_optimizer(*tree.place);
    return tree;
  }
  tree.root = place.path();
  tree.place = &place;
  if (place.has_directory(kModeling) && has_model(*TRY(place.inside(kModeling)))) {
    tree.is_application = tree.has_model = true;
    tree.model = kModeling;
    tree.optimizer = kOptimizer;
    tree.has_optimizer = place.has_directory(kOptimizer);
    return tree;
  }
  tree.has_model = looks_like_model(place);
  tree.has_optimizer = looks_like_optimizer(place);
  return tree;
}

namespace {

Result<bool> recognises(const PathSnapshot& place) {
  if (!place.is_directory()) {
    if (is_optimizer_file(place)) return true;
    const auto index = parse_index_name(place.name());
    if (!place.is_file() || !index || index->part != Part::kModel) return false;
    return looks_like_model(*TRY(place.parent()));
  }
  if (is_rank_directory(place)) return true;
  const Tree tree = TRY(tree_of(place));
  return tree.has_model || tree.has_optimizer;
}

}  // namespace
}  // namespace colossalai

const Format kColossalaiFormat = {
    .name = "colossalai",
    .title = "ColossalAI",
    .recognises = colossalai::recognises,
    .open = colossalai::open,
    .lay_out = colossalai::lay_out,
    .holds = StateSupport::kModel,
    .sharding = Sharding::kStages,
    .takes_container = true,
    .hf_names = true,
    .side_files = kModelSideFiles,
    .stage_rule = StageRule::kColossalai,
    .max_file_bytes = Index{1} << 30,
};

}  // namespace reshard
