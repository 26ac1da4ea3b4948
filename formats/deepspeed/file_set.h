// SPDX-License-Identifier: Apache-2.0
// The files of a DeepSpeed checkpoint, classified by their names (drawn in deepspeed.h).
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard::deepspeed {

inline constexpr std::string_view kLatestFile = "latest";
inline constexpr std::string_view kLatestUniversalFile = "latest_universal";
inline constexpr std::string_view kUniversalDirectory = "zero";

// A parsed file name.
struct FileName {
  enum class Kind { kModel, kOptimizer, kLayer, kExpert } kind = Kind::kModel;
  Index part = 0;             // the XX of mp_rank_XX: the tensor-parallel rank, or the stage of a pipeline
  std::optional<Index> rank;  // data-parallel rank; nothing if the file is of all of them
  Index layer = 0;            // of a pipeline, or counted among the layers with experts
  Index expert = 0;
};
std::optional<FileName> parse_file_name(std::string_view name);

// The files of one checkpoint, relative to `root`.
struct FileSet {
  std::string root;                       // as the caller gave it
  std::string directory;                  // the tag's, "global_step1/"; empty for the root itself
  std::string latest;                     // the file that names the tag, if one does
  std::vector<std::string> other_models;  // directories of Accelerate's other models; `latest` names one
  bool is_universal = false;
  std::map<std::pair<Index, Index>, std::string> models;      // by part and rank; rank -1: all ranks
  std::map<std::pair<Index, Index>, std::string> optimizers;  // by part and rank
  std::map<std::pair<Index, Index>, std::string> layers;      // by layer and tensor-parallel rank
  std::map<std::pair<Index, Index>, std::string> experts;     // by layer and expert
  std::vector<std::string> unread;  // unsupported optimizer states: experts' without ZeRO, "expp_rank_..."

  // Returns the tensor-parallel ranks of a pipeline, counted from the files of its layers.
  Index layer_ranks() const {
    Index ranks = 0;
    for (const auto& [number, file] : layers) ranks = std::max(ranks, number.second + 1);
    return ranks;
  }
  bool has_layer(Index layer) const {
    const auto found = layers.lower_bound({layer, 0});
    return found != layers.end() && found->first.first == layer;
  }
  bool has_rank_models() const { return !models.empty() && models.begin()->first.second >= 0; }  // as ZeRO 3 has them
};

// Finds the files of `place`, which is the directory with the file `latest` or that of a tag. Fails with kIo if the tag
// is missing or holds no model states.
Result<FileSet> find_files(const PathSnapshot& place);

// Returns whether `place` is the directory of a tag, or has a file `latest` that names one.
Result<bool> is_checkpoint(const PathSnapshot& place);

// The checks below fail with kIo, naming the missing files, or with kCorrupt if the files are of two saves.
// Checks that every part has model states, of all ranks together or of each one.
Status check_models(const FileSet& set, Index parts);
// Checks that every data-parallel rank of a part has optimizer states and, with ZeRO 3, model states.
Status check_ranks(const FileSet& set, Index part, Index ranks);
// Checks that every layer has a file of each tensor-parallel rank.
Status check_layers(const FileSet& set);
// Checks that every layer with experts has the file of each expert.
Status check_experts(const FileSet& set, const std::vector<Index>& experts);

}  // namespace reshard::deepspeed
