// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/file_set.h"

#include <algorithm>

#include "formats/tensor_files/reader.h"
#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/layout/layout.h"

namespace reshard::deepspeed {
namespace {

constexpr Index kMaxTagBytes = 256;

bool take_rank(std::string_view& text, std::string_view before, Index& n) {
  const auto taken = take(text, before) ? take_number(text) : std::nullopt;
  n = taken.value_or(0);
  return taken && n < kMaxMeshRanks;
}

constexpr std::string_view kModel = "_model_states.pt", kOptimizer = "_optim_states.pt";

}  // namespace

std::optional<FileName> parse_file_name(std::string_view name) {
  FileName out;
  if (take_rank(name, "layer_", out.layer)) {
    out.kind = name.starts_with("_expert_") ? FileName::Kind::kExpert : FileName::Kind::kLayer;
    if (out.kind == FileName::Kind::kExpert
            ? !take_rank(name, "_expert_", out.expert) || !take_rank(name, "_mp_rank_", out.part)
            : name.starts_with("-model_") && !name.starts_with("-model_states") &&
                  !take_rank(name, "-model_", out.part))
      return std::nullopt;
    if (name == (out.kind == FileName::Kind::kExpert ? kModel : std::string_view("-model_states.pt"))) return out;
    return std::nullopt;
  }
  take(name, "bf16_");
  Index rank = 0;
  if (take_rank(name, "zero_pp_rank_", rank)) {
    out.rank = rank;
    if (!take(name, "_")) return std::nullopt;
  }
  if (!take_rank(name, "mp_rank_", out.part)) return std::nullopt;
  if (name == kModel) return out;
  out.kind = FileName::Kind::kOptimizer;
  if (name == kOptimizer && out.rank) return out;
  return std::nullopt;
}

namespace {

bool is_model_states(const DirectoryEntry& e) {
  const auto name = e.is_directory ? std::nullopt : parse_file_name(e.name);
  return name && (name->kind == FileName::Kind::kModel || name->kind == FileName::Kind::kOptimizer);
}

bool is_tag_directory(const PathSnapshot& place) {
  return std::any_of(place.entries().begin(), place.entries().end(), is_model_states);
}

// Returns the text of a file if it can be the name of a directory next to it.
Result<std::optional<std::string>> tag_of(const PathSnapshot& place, std::string_view file) {
  auto text = TRY(place.text_of(file, kMaxTagBytes));
  if (!text) return text;
  while (!text->empty() && (text->back() == '\n' || text->back() == '\r' || text->back() == ' ')) text->pop_back();
  if (text->empty() || *text == "." || *text == ".." || text->find('/') != std::string::npos ||
      text->find('\0') != std::string::npos)
    return std::optional<std::string>();
  return text;
}

Result<bool> is_ours(const PathSnapshot& place, const std::string& tag) {
  const PathSnapshot& directory = *TRY(place.inside(tag));
  return directory.is_directory() ? is_tag_directory(directory) : tag.starts_with("global_step");
}

// Returns whether a tag is that of one of the models of Accelerate's save_state(): "pytorch_model", "pytorch_model_1".
bool is_tag_of_accelerate(std::string_view tag) {
  return take(tag, "pytorch_model") && (tag.empty() || (take(tag, "_") && is_digits(tag)));
}

}  // namespace

Result<bool> is_checkpoint(const PathSnapshot& place) {
  for (const std::string_view file : {kLatestFile, kLatestUniversalFile})
    if (const auto tag = TRY(tag_of(place, file)); tag && TRY(is_ours(place, *tag))) return true;
  return is_tag_directory(place);
}

Result<FileSet> find_files(const PathSnapshot& place) {
  FileSet set;
  const std::string& path = place.path();
  set.root = path;
  const PathSnapshot* there = &place;
  for (const std::string_view file : {kLatestFile, kLatestUniversalFile}) {
    const auto tag = TRY(tag_of(place, file));
    if (!tag || !TRY(is_ours(place, *tag))) continue;
    set.latest = file;
    set.directory = *tag + "/";
    there = TRY(place.inside(*tag));
    if (!is_tag_of_accelerate(*tag)) break;
    for (const DirectoryEntry& e : place.entries())
      if (e.is_directory && e.name != *tag && is_tag_of_accelerate(e.name)) set.other_models.push_back(e.name);
    break;
  }
  if (!set.directory.empty() && !there->is_directory())
    return io_error(path_join(path, set.latest) + ": names '" + printable(there->name()) +
                    "', which is missing; open the directory of another step by its path");
  for (const DirectoryEntry& e : there->entries()) {
    set.is_universal = set.is_universal || (e.is_directory && e.name == kUniversalDirectory);
    const auto name = e.is_directory ? std::nullopt : parse_file_name(e.name);
    const std::string file = set.directory + e.name;
    if (!name && !e.is_directory && e.name.ends_with(kOptimizer)) set.unread.push_back(file);
    if (!name) continue;
    bool is_new = true;
    switch (name->kind) {
      case FileName::Kind::kModel:
        is_new = set.models.emplace(std::pair(name->part, name->rank.value_or(-1)), file).second;
        break;
      case FileName::Kind::kOptimizer:
        is_new = set.optimizers.emplace(std::pair(name->part, *name->rank), file).second;
        break;
      case FileName::Kind::kLayer:
        is_new = set.layers.emplace(std::pair(name->layer, name->part), file).second;
        break;
      case FileName::Kind::kExpert:
        is_new = set.experts.emplace(std::pair(name->layer, name->expert), file).second;
        break;
    }
    if (!is_new)
      return corrupt(path_join(path, file) +
                     ": expected one file of its rank, got two: files of two "
                     "saves are in one directory");
  }
  if (set.is_universal && set.layer_ranks() > 1) set.layers.clear();  // each parameter has a file with the whole
  if (set.models.empty())
    return io_error(there->path() +
                    ": expected the file mp_rank_00_model_states.pt, got optimizer "
                    "states only: the names of the parameters are in it");
  return set;
}

// ---- What is missing

Status check_models(const FileSet& set, Index parts) {
  constexpr Index kShown = 3;
  std::vector<std::string> missing;
  Index count = 0;
  for (Index part = 0; part < parts; ++part) {
    const auto begin = set.models.lower_bound({part, -1});
    const bool is_there = begin != set.models.end() && begin->first.first == part;
    if (is_there && (begin->first.second < 0) == set.has_rank_models())
      return corrupt(path_join(set.root, begin->second) + ": the model states of ZeRO 3's ranks, and those of all " +
                     "ranks, are in one directory: files of two saves");
    if (is_there) continue;
    const std::string number = std::to_string(part);
    if (++count <= kShown)
      missing.push_back(set.directory + "mp_rank_" + (part < 10 ? "0" : "") + number + "_model_states.pt");
  }
  if (count == 0) return {};
  return io_error(set.root + ": missing " + files_text(missing, count) + ": each has a part of the model");
}

Status check_ranks(const FileSet& set, Index part, Index ranks) {
  constexpr std::size_t kShown = 3;
  const auto check = [&](const auto& files, std::string_view kind) -> Status {
    std::vector<std::string> missing;
    Index there = 0;
    for (auto it = files.lower_bound({part, 0}); it != files.end() && it->first.first == part; ++it, ++there)
      if (it->first.second >= ranks)
        return corrupt(path_join(set.root, it->second) + ": expected files of " + count_of(ranks, "rank") +
                       " as in dp_world_size, got that of rank " + std::to_string(it->first.second) +
                       ": files of two saves are in one directory");
    const bool is_bf16 = kind == "optim" && std::any_of(files.begin(), files.end(), [](const auto& f) {
                           return base_name(f.second).starts_with("bf16_");
                         });
    for (Index rank = 0; rank < ranks && there < ranks && missing.size() < kShown; ++rank)
      if (!files.contains({part, rank}))
        missing.push_back(set.directory + (is_bf16 ? "bf16_" : "") + "zero_pp_rank_" + std::to_string(rank) +
                          "_mp_rank_" + (part < 10 ? "0" : "") + std::to_string(part) + "_" + std::string(kind) +
                          "_states.pt");
    if (there == ranks) return {};
    return io_error(set.root + ": missing " + files_text(missing, ranks - there) + " of " + count_of(ranks, "rank") +
                    ": every rank has a part of each parameter. Copy them from the machines " + "that wrote them");
  };
  if (set.has_rank_models()) TRY(check(set.models, "model"));
  return set.is_universal ? Status() : check(set.optimizers, "optim");
}

Status check_layers(const FileSet& set) {
  constexpr Index kShown = 3;
  std::vector<std::string> missing;
  Index count = 0;
  const Index ranks = set.layer_ranks();
  for (auto it = set.layers.begin(); it != set.layers.end(); it = set.layers.lower_bound({it->first.first + 1, 0})) {
    const Index layer = it->first.first;
    for (Index rank = 0; ranks > 1 && rank < ranks; ++rank) {
      if (set.layers.contains({layer, rank}) || ++count > kShown) continue;
      const auto two = [](Index n) { return (n < 10 ? "0" : "") + std::to_string(n); };
      missing.push_back(set.directory + "layer_" + two(layer) + "-model_" + two(rank) + "-model_states.pt");
    }
  }
  if (count == 0) return {};
  return io_error(set.root + ": missing " + files_text(missing, count) +
                  ": each tensor-parallel rank has a part of a " + "layer");
}

Status check_experts(const FileSet& set, const std::vector<Index>& experts) {
  constexpr std::size_t kShown = 3;
  std::vector<std::string> missing;
  Index want = 0, there = 0;
  for (std::size_t layer = 0; layer < experts.size(); ++layer) {
    want = checked_add(want, experts[layer]).value_or(INT64_MAX);
    for (Index e = 0; e < experts[layer] && missing.size() < kShown; ++e)
      if (!set.experts.contains({static_cast<Index>(layer), e}))
        missing.push_back(set.directory + "layer_" + std::to_string(layer) + "_expert_" + std::to_string(e) +
                          "_mp_rank_00_model_states.pt");
  }
  for (const auto& [number, name] : set.experts) {
    const auto [layer, e] = number;
    if (layer >= std::ssize(experts) || e >= experts[layer])
      return corrupt(path_join(set.root, name) + ": an expert that num_experts of the model states does not " +
                     "count: files of two saves in one directory");
    ++there;
  }
  if (missing.empty()) return {};
  return io_error(set.root + ": missing " + files_text(missing, want - there) + " of " + count_of(want, "expert"));
}

}  // namespace reshard::deepspeed
