// SPDX-License-Identifier: Apache-2.0
#include "formats/ranks/ranks.h"

#include <algorithm>
#include <array>
#include <set>

#include "formats/tensor_files/target.h"
#include "lib/base/text.h"
#include "lib/infer/rank_layout.h"

namespace reshard {
namespace ranks {
namespace {

constexpr std::array<std::string_view, 5> kExtensions = {".safetensors", ".bin", ".pt", ".pth", ".ckpt"};
// The words before the number of a rank.
constexpr std::array<std::string_view, 5> kMarks = {"rank_", "rank-", "rank", "tp_", "sdp_"};

// A file name, split at the number of its rank.
struct RankName {
  std::string before, after;
  Index rank = 0;
};

std::optional<RankName> parse_rank_name(std::string_view name) {
  std::size_t best = std::string_view::npos;  // position of the digits after the last mark
  for (const std::string_view mark : kMarks)
    for (std::size_t at = name.find(mark); at != std::string_view::npos; at = name.find(mark, at + 1)) {
      const std::size_t digits = at + mark.size();
      const bool is_number = digits < name.size() && name[digits] >= '0' && name[digits] <= '9';
      if (is_number && (best == std::string_view::npos || digits > best)) best = digits;
    }
  if (best == std::string_view::npos) return std::nullopt;
  RankName out;
  out.before = name.substr(0, best);
  name.remove_prefix(best);
  const auto rank = take_number(name);
  if (!rank || *rank >= kMaxMeshRanks) return std::nullopt;
  out.rank = *rank;
  out.after = name;
  return out;
}

bool may_be_rank_file(std::string_view name) {
  return std::any_of(kExtensions.begin(), kExtensions.end(), [&](auto e) { return name.ends_with(e); });
}

// Returns another entry of a directory, of the same kind, whose name differs from `name` only in the rank's number.
std::optional<std::string> other_number(const PathSnapshot& directory, const std::string& name, bool is_directory) {
  const auto own = parse_rank_name(name);
  if (!own) return std::nullopt;
  for (const DirectoryEntry& e : directory.entries()) {
    const auto other = e.is_directory == is_directory ? parse_rank_name(e.name) : std::nullopt;
    if (other && other->rank != own->rank && other->before == own->before && other->after == own->after) return e.name;
  }
  return std::nullopt;
}

}  // namespace

Result<std::string> other_rank_of(const PathSnapshot& file) {
  if (!file.is_file() || !may_be_rank_file(file.name())) return std::string();
  const bool is_of_directory = parse_rank_name(base_name(parent_path(file.path()))).has_value();
  if (!is_of_directory && !parse_rank_name(file.name())) return std::string();
  const PathSnapshot* const directory = TRY(file.parent());
  if (const auto other = other_number(*directory, file.name(), false)) return path_join(directory->path(), *other);
  if (!is_of_directory) return std::string();
  const PathSnapshot* const above = TRY(directory->parent());
  const auto other = other_number(*above, directory->name(), true);
  if (!other || !TRY(above->inside(*other))->has_file(file.name())) return std::string();
  return path_join(path_join(above->path(), *other), file.name());
}

RankFiles find_files(const PathSnapshot& directory) {
  RankFiles out;
  std::set<std::pair<std::string, std::string>> patterns;
  for (const DirectoryEntry& e : directory.entries()) {
    if (e.is_directory) continue;
    out.has_layout = out.has_layout || e.name == kLayoutFile;
    out.has_index = out.has_index || e.name.ends_with(".index.json");
    if (!may_be_rank_file(e.name)) continue;
    if (const auto parsed = parse_rank_name(e.name)) {
      out.is_ambiguous = out.is_ambiguous || !out.by_rank.emplace(parsed->rank, e.name).second;
      patterns.emplace(parsed->before, parsed->after);
    } else {
      out.others.push_back(e.name);
    }
  }
  out.is_ambiguous = out.is_ambiguous || patterns.size() > 1;
  return out;
}

namespace {

// Returns whether there is a descriptor, or at least two per-rank files and no index.
Result<bool> recognises(const PathSnapshot& place) {
  const RankFiles files = find_files(place);
  if (files.has_layout) return !files.by_rank.empty();
  return files.by_rank.size() > 1 && !files.is_ambiguous && !files.has_index && files.others.empty();
}

}  // namespace
}  // namespace ranks

const Format kRanksFormat = {
    .name = "ranks",
    .title = "per-rank files",
    .recognises = ranks::recognises,
    .open = ranks::open,
    .lay_out = ranks::lay_out,
    .holds = StateSupport::kModel,
    .sharding = Sharding::kLocal,
    .takes_container = true,
    .hf_names = true,
    .side_files = kModelSideFiles,
};

}  // namespace reshard
