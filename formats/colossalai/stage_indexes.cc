// SPDX-License-Identifier: Apache-2.0
#include "formats/colossalai/stage_indexes.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_set>

#include "formats/colossalai/names.h"
#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/checkpoint/catalog.h"
#include "lib/layout/stages.h"

namespace reshard::colossalai {
namespace {

// Returns "1-3, 5" for {1, 2, 3, 5}.
std::string ranges_text(const std::set<Index>& numbers) {
  std::vector<std::string> out;
  for (auto it = numbers.begin(); it != numbers.end();) {
    const Index first = *it;
    Index last = first;
    while (++it != numbers.end() && *it == last + 1) ++last;
    out.push_back(first == last ? std::to_string(first) : std::to_string(first) + "-" + std::to_string(last));
  }
  return join(out, ", ");
}

std::string plural(std::string_view noun, const std::set<Index>& numbers) {
  return std::string(noun) + (numbers.size() == 1 ? " " : "s ") + ranges_text(numbers);
}

// Recognise the parameters before and after the layers. Every decoder has both.
bool is_embedding(std::string_view name) {
  for (const std::string_view word : {"embed_tokens.", "word_embeddings.", "embedding.", "wte.", "shared."})
    if (name.find(word) != std::string_view::npos) return true;
  return false;
}
bool is_last_norm(std::string_view name) {
  for (const std::string_view word : {"norm.", "ln_f.", "layernorm.", "layer_norm.", "LayerNorm."})
    if (name.find(word) != std::string_view::npos) return true;
  return false;
}

std::set<Index> gaps(const std::set<Index>& numbers, Index first) {
  std::set<Index> out;
  constexpr std::size_t kMost = 1000;
  for (Index i = first; !numbers.empty() && i < *numbers.rbegin() && out.size() < kMost; ++i)
    if (!numbers.contains(i)) out.insert(i);
  return out;
}

std::set<Index> layers_of(const std::vector<StageIndex>& indexes) {
  std::set<Index> out;
  for (const StageIndex& s : indexes)
    for (const WeightIndex::Entry& e : s.index.entries())
      if (const Index layer = layer_number(e.name); layer >= 0) out.insert(layer);
  return out;
}

std::set<Index> stages_of(const std::vector<StageIndex>& indexes) {
  std::set<Index> out;
  for (const StageIndex& s : indexes) out.insert(s.stage);
  return out;
}

}  // namespace

std::vector<ModelFile> model_files(const std::vector<StageIndex>& indexes) {
  // Sort by the numbers in the names: a joined index has its stages in the order of a directory listing.
  using Key = std::tuple<Index, Index, Index, std::string>;
  std::map<Key, ModelFile> files;
  std::unordered_set<std::string_view> seen;
  for (const StageIndex& s : indexes)
    for (const WeightIndex::Entry& e : s.index.entries()) {
      const ShardName name = parse_shard_name(e.file).value_or(ShardName{});
      ModelFile& file = files[{name.stage, name.expert, name.shard, e.file}];
      file.name = e.file;
      if (seen.insert(e.name).second) file.tensors.push_back(e.name);
    }
  std::vector<ModelFile> out;
  for (auto& [key, file] : files) out.push_back(std::move(file));
  return out;
}

std::optional<std::vector<std::string>> model_order(const std::vector<StageIndex>& indexes) {
  std::map<Index, std::vector<std::string>> by_stage;
  std::unordered_set<std::string_view> seen;
  for (const StageIndex& s : indexes) {
    const auto& entries = s.index.entries();
    const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
    const auto naturally = [](const auto& a, const auto& b) { return natural_less(a.name, b.name); };
    if (entries.size() > 2 && (std::is_sorted(entries.begin(), entries.end(), by_name) ||
                               std::is_sorted(entries.begin(), entries.end(), naturally)))
      return std::nullopt;
    for (const WeightIndex::Entry& e : entries)
      if (seen.insert(e.name).second) by_stage[parse_shard_name(e.file).value_or(ShardName{}).stage].push_back(e.name);
  }
  std::vector<std::string> out;
  for (auto& [stage, names] : by_stage) out.insert(out.end(), names.begin(), names.end());
  return out;
}

std::string StageIndexes::layers_text() const {
  const std::set<Index> layers = layers_of(indexes_);
  return layers.empty() ? "no layer" : plural("layer", layers);
}

std::string StageIndexes::text() const {
  const std::set<Index> stages = stages_of(indexes_);
  return (stages.size() == 1 ? "the index of " : "the indexes of ") + plural("stage", stages) + " with " +
         layers_text();
}

// Returns what is missing for the indexes to cover the whole model.
std::vector<std::string> StageIndexes::missing(const std::vector<std::string>& shards) const {
  std::vector<std::string> out;
  std::set<Index> stages = stages_of(indexes_);
  const std::set<Index> with_index = stages;
  for (const std::string& shard : shards)
    if (const auto name = parse_shard_name(shard)) stages.insert(std::max<Index>(name->stage, 1));
  std::set<Index> absent = gaps(stages, 1);
  for (const Index stage : stages)
    if (!with_index.contains(stage)) absent.insert(stage);
  if (!absent.empty())
    out.push_back((absent.size() == 1 ? "the index of " : "the indexes of ") + plural("stage", absent));

  std::map<Index, std::set<Index>> experts;
  std::set<Index> all_experts;
  for (const StageIndex& s : indexes_)
    if (s.expert > 0) {
      experts[s.stage].insert(s.expert);
      all_experts.insert(s.expert);
    }
  for (const auto& [stage, there] : experts) {
    std::set<Index> lacking = gaps(all_experts, 1);
    for (const Index e : all_experts)
      if (!there.contains(e)) lacking.insert(e);
    if (!lacking.empty())
      out.push_back("expert-parallel " + plural("rank", lacking) + " of stage " + std::to_string(stage));
  }
  if (const std::set<Index> lacking = gaps(layers_of(indexes_), 0); !lacking.empty())
    out.push_back(plural("layer", lacking));
  bool has_embedding = false, has_norm = false;
  for (const StageIndex& s : indexes_)
    for (const WeightIndex::Entry& e : s.index.entries()) {
      if (layer_number(e.name) >= 0) continue;
      has_embedding = has_embedding || is_embedding(e.name);
      has_norm = has_norm || is_last_norm(e.name);
    }
  if (!has_embedding) out.emplace_back("the embedding");
  if (!has_norm) out.emplace_back("the last norm");
  return out;
}

Result<StageIndexes> StageIndexes::read(const PathSnapshot& directory, const std::vector<std::string>& shards) {
  const PathSnapshot& temporary = *TRY(directory.inside(kTemporaryIndexes));
  StageIndexes out;
  double total = 0;
  bool has_totals = true;
  for (const DirectoryEntry& e : temporary.entries()) {
    const auto name = parse_index_name(e.name);
    if (e.is_directory || !name || name->part != Part::kModel || name->stage == 0) continue;
    WeightIndex index = TRY(WeightIndex::read(path_join(temporary.path(), e.name)));
    const auto size = index.total_size().as_double();
    has_totals = has_totals && size.has_value();
    total += size ? *size : 0;
    out.indexes_.push_back({std::move(index), name->stage, name->expert});
  }
  if (has_totals) out.total_size_ = total;
  const std::string interrupted = directory.path() + ": the save was interrupted before its index was written: ";
  if (out.indexes_.empty())
    return corrupt(interrupted + std::string(kTemporaryIndexes) + "/ is empty: no stage finished");
  const std::vector<std::string> lacking = out.missing(shards);
  if (!lacking.empty())
    return corrupt(interrupted + std::string(kTemporaryIndexes) + "/ has " + out.text() +
                   "; missing: " + join(lacking, ", "));
  return out;
}

}  // namespace reshard::colossalai
