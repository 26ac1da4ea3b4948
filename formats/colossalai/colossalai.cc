#include "formats/colossalai/colossalai.h"

#include <array>

#include "formats/colossalai/rank_files.h"
#include "formats/encoding/torch_file.h"
#include "formats/tensor_files/reader.h"
#include "formats/tensor_files/target.h"

namespace reshard {
namespace colossalai {

bool has_file(const std::string& path) { return path_exists(path) && !is_directory(path); }

Result<PartFiles> files_of(const std::string& directory, Part part) {
  PartFiles out;
  for (const DirectoryEntry& e : TRY(list_directory(directory))) {
    if (e.is_directory) continue;
    if (const auto index = parse_index_name(e.name); index && index->part == part && index->stage == 0)
      out.indexes.push_back(e.name);
    if (const auto shard = parse_shard_name(e.name); shard && shard->part == part) out.shards.push_back(e.name);
  }
  return out;
}

std::string single_file(const std::string& directory, Part part) {
  constexpr std::array<std::string_view, 2> kModels = {"pytorch_model.bin", "model.safetensors"};
  constexpr std::array<std::string_view, 2> kOptimizers = {"pytorch_optim.bin", "optimizer.safetensors"};
  for (const std::string_view name : part == Part::kModel ? kModels : kOptimizers)
    if (has_file(path_join(directory, name))) return std::string(name);
  return {};
}

namespace {

bool looks_like_model(const std::string& directory) {
  if (is_directory(path_join(directory, kTemporaryIndexes))) return true;
  const auto files = files_of(directory, Part::kModel);
  return files && !files->shards.empty();
}

// Whether a directory, of which the name already promises one, holds a model in some form.
bool has_model(const std::string& directory) {
  if (!is_directory(directory)) return false;
  const auto files = files_of(directory, Part::kModel);
  return looks_like_model(directory) || (files && !files->indexes.empty()) ||
         !single_file(directory, Part::kModel).empty();
}

bool looks_like_optimizer(const std::string& directory) {
  const auto files = files_of(directory, Part::kOptimizer);
  return files && (!files->shards.empty() || !files->indexes.empty() || has_file(path_join(directory, kGroupFile)));
}

}  // namespace

bool is_optimizer_file(const std::string& path) {
  const std::string head = head_of(path);
  const auto has = [&](std::string_view text) { return head.find(text) != std::string::npos; };
  using namespace std::string_view_literals;
  if (TorchFile::recognises(head)) return has("}q\0(X\x0c\0\0\0param_groups"sv);
  constexpr std::string_view kState = "\"state.";
  const std::size_t state = head.find(kState);
  const std::size_t digit = state + kState.size();
  const bool has_state = state != std::string::npos && digit < head.size() && head[digit] >= '0' && head[digit] <= '9';
  return path.ends_with(".safetensors") && (has("\"non_tensor_keys\"") || has_state);
}

Tree tree_of(const std::string& path) {
  Tree tree;
  tree.root = is_directory(path) ? path : parent_path(path);
  if (tree.root != path && is_optimizer_file(path)) {
    tree.optimizer_file = base_name(path);
    tree.has_optimizer = true;
    return tree;
  }
  if (tree.root != path) tree.index = base_name(path);
  if (has_model(path_join(path, kModeling))) {
    tree.is_application = tree.has_model = true;
    tree.model = kModeling;
    tree.optimizer = kOptimizer;
    tree.has_optimizer = is_directory(path_join(path, kOptimizer));
    return tree;
  }
  tree.has_model = looks_like_model(tree.root);
  tree.has_optimizer = looks_like_optimizer(tree.root);
  return tree;
}

namespace {

bool recognises(const std::string& path) {
  if (!is_directory(path)) {
    if (is_optimizer_file(path)) return true;
    const auto index = parse_index_name(base_name(path));
    return path_exists(path) && index && index->part == Part::kModel && looks_like_model(parent_path(path));
  }
  if (is_rank_directory(path)) return true;
  const Tree tree = tree_of(path);
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
    .holds = Holds::kModel,
    .sharding = Sharding::kStages,
    .takes_container = true,
    .hf_names = true,
    .side_files = kModelSideFiles,
    .stage_rule = StageRule::kColossalai,
    .max_file_bytes = Index{1} << 30,
};

}  // namespace reshard
