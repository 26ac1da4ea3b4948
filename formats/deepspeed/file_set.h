// The files of one of DeepSpeed's checkpoints, by what their names say (deepspeed.h draws them).
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

// A file name taken apart.
struct FileName {
  enum class Kind { kModel, kOptimizer, kLayer, kExpert } kind = Kind::kModel;
  Index part = 0;             // the XX of mp_rank_XX: of tensor parallelism, or a pipeline's stage
  std::optional<Index> rank;  // among the data-parallel ones; nothing: the file is of all of them
  Index layer = 0;            // of a pipeline, or counted among the layers that have experts
  Index expert = 0;
};
std::optional<FileName> parse_file_name(std::string_view name);

// The files of one checkpoint, relative to `root`.
struct FileSet {
  std::string root;       // as it was named
  std::string directory;  // "global_step1/", the tag's; empty: the root itself
  std::string latest;     // the file that names the tag, where one did
  bool is_universal = false;
  std::map<std::pair<Index, Index>, std::string> models;      // by part and rank; rank -1: of all
  std::map<std::pair<Index, Index>, std::string> optimizers;  // by part and rank
  std::map<std::pair<Index, Index>, std::string> layers;      // by layer and tensor-parallel rank
  std::map<std::pair<Index, Index>, std::string> experts;     // by layer and expert
  std::vector<std::string> unread;  // optimizer states of another kind: an expert's without ZeRO, "expp_rank_..."

  // Of a pipeline, by the files of its layers.
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

// What the place is: the directory with the file `latest`, or that of a tag. An I/O error where the tag is not there or
// holds no model states.
Result<FileSet> find_files(const PathSnapshot& place);

// Whether the place is such a directory, or holds the file `latest` of one.
Result<bool> is_checkpoint(const PathSnapshot& place);

// Each an I/O error that names what is missing, or corrupt where files are of two saves:
// that there are model states of each part, all ranks' or each one's;
Status check_models(const FileSet& set, Index parts);
// optimizer states of each data-parallel rank of one part, and ZeRO 3's model states;
Status check_ranks(const FileSet& set, Index part, Index ranks);
// that a layer's files are there of each tensor-parallel rank;
Status check_layers(const FileSet& set);
// the experts of each layer that has some.
Status check_experts(const FileSet& set, const std::vector<Index>& experts);

}  // namespace reshard::deepspeed
