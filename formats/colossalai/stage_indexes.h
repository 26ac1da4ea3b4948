// SPDX-License-Identifier: Apache-2.0
// The indexes that the pipeline stages of an interrupted save left in tmp_index_files/. A stage writes its index after
// all of its shards, so the save is complete if the indexes cover the model.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/encoding/weight_index.h"
#include "lib/base/result.h"
#include "lib/checkpoint/path_snapshot.h"

namespace reshard::colossalai {

// A file of the model and its tensors, in the order of the index.
struct ModelFile {
  std::string name;
  std::vector<std::string> tensors;
};

// The index of one stage and expert-parallel rank.
struct StageIndex {
  WeightIndex index;
  Index stage = 0;   // 0: all stages
  Index expert = 0;  // 0: no expert parallelism
};

// Returns the files that the indexes name, by stage and shard. A tensor in several indexes belongs to the first.
std::vector<ModelFile> model_files(const std::vector<StageIndex>& indexes);

// Returns the tensors that the indexes name, each once, by stage and in the order of the indexes, which is the model's.
// Returns nothing if an index was sorted by name.
std::optional<std::vector<std::string>> model_order(const std::vector<StageIndex>& indexes);

// The indexes of all stages of a complete save.
class StageIndexes {
 public:
  // Reads `directory`/tmp_index_files. Fails with kCorrupt, listing what was found and what is missing, unless the
  // stages are 1 to S with the same expert-parallel ranks each, no layer below the highest is missing, and the
  // embedding and the last norm exist. `shards` are the shard files of the directory.
  static Result<StageIndexes> read(const PathSnapshot& directory, const std::vector<std::string>& shards);

  std::vector<ModelFile> files() const { return model_files(indexes_); }
  std::optional<std::vector<std::string>> order() const { return model_order(indexes_); }
  std::optional<double> total_size() const { return total_size_; }  // MiB
  std::string text() const;                                         // "the indexes of stages 1 and 2"

 private:
  std::vector<std::string> missing(const std::vector<std::string>& shards) const;
  std::string layers_text() const;

  std::vector<StageIndex> indexes_;  // by stage and expert
  std::optional<double> total_size_;
};

}  // namespace reshard::colossalai
