// SPDX-License-Identifier: Apache-2.0
#include "formats/fsdp/fsdp.h"

#include <algorithm>
#include <vector>

#include "formats/tensor_files/reader.h"
#include "lib/base/json.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard {
namespace fsdp {
namespace {

constexpr Index kMaxSettingsBytes = Index{1} << 20;

struct Stem {
  std::string_view text;
  Role role;
};
constexpr std::array<Stem, 3> kVerlStems = {{{"model_world_size_", Role::kModel},
                                             {"optim_world_size_", Role::kOptimizer},
                                             {"extra_state_world_size_", Role::kExtra}}};
constexpr std::array<Stem, 2> kAccelerateStems = {
    {{"pytorch_model_fsdp", Role::kModel}, {"optimizer", Role::kOptimizer}}};

std::optional<FileName> finish_name(FileName out, std::string_view name, std::string_view rest,
                                    std::string_view extension) {
  out.before = name.substr(0, name.size() - rest.size());
  const auto rank = take_number(rest);
  if (!rank || rest != extension || *rank >= out.ranks.value_or(kMaxMeshRanks)) return std::nullopt;
  out.rank = *rank;
  out.after = extension;
  return out;
}

}  // namespace

std::optional<FileName> parse_file_name(std::string_view name) {
  for (const Stem& stem : kVerlStems) {
    std::string_view rest = name;
    if (!take(rest, stem.text)) continue;
    FileName out;
    out.role = stem.role;
    out.ranks = take_number(rest);
    if (!out.ranks || *out.ranks > kMaxMeshRanks || !take(rest, "_rank_")) return std::nullopt;
    out.save = "world_size_" + std::to_string(*out.ranks);
    return finish_name(std::move(out), name, rest, ".pt");
  }
  for (const Stem& stem : kAccelerateStems) {
    std::string_view rest = name;
    if (!take(rest, stem.text)) continue;
    FileName out;
    out.role = stem.role;
    if (!take(rest, "_rank")) {
      const auto number = take(rest, "_") ? take_number(rest) : std::nullopt;
      if (!number || !take(rest, "_rank")) return std::nullopt;
      out.save = std::to_string(*number);
    }
    return finish_name(std::move(out), name, rest, ".bin");
  }
  return std::nullopt;
}

namespace {

// Returns the number of ranks in verl's settings file, if there is one.
Result<std::optional<Index>> ranks_of_settings(const PathSnapshot& directory) {
  if (!directory.has_file(kSettingsFile)) return std::optional<Index>();
  const std::string path = path_join(directory.path(), kSettingsFile);
  const Json json = TRY(parse_json(TRY(read_whole_file(path, kMaxSettingsBytes)), path));
  if (!json.contains("world_size")) return std::optional<Index>();
  return std::optional<Index>(TRY(json.get_index("world_size").context(path)));
}

}  // namespace

std::string missing_text(const FileSet& set, Index ranks) {
  constexpr std::size_t kShown = 3;
  std::vector<std::string> names;
  Index count = 0;
  for (const auto& of_role : set.files) {
    if (of_role.empty()) continue;
    count += ranks - std::ssize(of_role);
    const FileName like = *parse_file_name(of_role.begin()->second);
    std::size_t shown = 0;
    for (Index rank = 0; rank < ranks && shown < kShown; ++rank)
      if (!of_role.contains(rank) && ++shown > 0) names.push_back(like.before + std::to_string(rank) + like.after);
  }
  return count == 0 ? std::string() : files_text(names, count);
}

Result<FileSet> find_files(const PathSnapshot& place) {
  const std::string& path = place.path();
  const PathSnapshot& there = *TRY(place.directory());
  const std::string& directory = there.path();
  const auto wanted = place.is_directory() ? std::nullopt : parse_file_name(place.name());
  std::map<std::string, FileSet> sets;
  for (const DirectoryEntry& e : there.entries()) {
    const auto name = e.is_directory ? std::nullopt : parse_file_name(e.name);
    if (!name || (wanted && wanted->save != name->save)) continue;
    FileSet& set = sets[name->save];
    set.directory = directory;
    set.is_verl = name->ranks.has_value();
    set.ranks = std::max(set.ranks, name->ranks.value_or(name->rank + 1));
    set.files[static_cast<std::size_t>(name->role)].emplace(name->rank, e.name);
  }
  if (sets.empty()) return io_error(path + ": expected a file for each rank, got none");
  if (sets.size() > 1) {
    std::vector<std::string> kinds;
    for (const auto& [save, set] : sets) {
      const std::string missing = missing_text(set, set.ranks);
      kinds.push_back(set.is_verl    ? "of " + count_of(set.ranks, "rank")
                      : save.empty() ? "of a model"
                                     : "of model " + save);
      if (!missing.empty()) kinds.back() += ", missing " + missing;
    }
    return unsupported(path + ": files of " + std::to_string(sets.size()) + " saves: " + join(kinds, "; ") +
                       ". Open one of the files by its path: the others of its save are read with it");
  }
  FileSet& set = sets.begin()->second;
  if (const std::string missing = missing_text(set, set.ranks); !missing.empty())
    return io_error(directory + ": missing " + missing + " of " + count_of(set.ranks, "rank") +
                    ": every rank has a part of each tensor");
  if (set.is_verl)
    if (const auto told = TRY(ranks_of_settings(there)); told && *told != set.ranks)
      return corrupt(directory + ": expected files of " + count_of(*told, "rank") + ", as " +
                     std::string(kSettingsFile) + " gives, got those of " + count_of(set.ranks, "rank"));
  return std::move(set);
}

namespace {

Result<bool> recognises(const PathSnapshot& place) {
  if (!place.is_directory()) return parse_file_name(place.name()) && TorchFile::recognises(place.head());
  return place.has_file_like([](std::string_view name) { return parse_file_name(name).has_value(); });
}

}  // namespace
}  // namespace fsdp

const Format kFsdpFormat = {
    .name = "fsdp",
    .title = "files of FSDP's ranks",
    .recognises = fsdp::recognises,
    .open = fsdp::open,
    .lay_out = nullptr,
};

}  // namespace reshard
