// The indexes that the pipeline stages of an interrupted save left in tmp_index_files/. Each was written when all
// shards of its stage were complete; the save is whole if they cover the model.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/encoding/weight_index.h"
#include "lib/base/result.h"
#include "lib/checkpoint/path_snapshot.h"

namespace reshard::colossalai {

// A file of the model, and the tensors that the index has in it, in the index's order.
struct ModelFile {
  std::string name;
  std::vector<std::string> tensors;
};

struct StageIndex {
  WeightIndex index;
  Index stage = 0;   // 0: of the whole
  Index expert = 0;  // 0: no expert parallelism
};

// The files that the indexes name, by stage and shard. A tensor that is in several indexes counts for the first.
std::vector<ModelFile> model_files(const std::vector<StageIndex>& indexes);

// The tensors that the indexes name, each once, in the model's order as far as they tell: by stage, and within one in
// the order of the indexes. Nothing where an index was sorted by name.
std::optional<std::vector<std::string>> model_order(const std::vector<StageIndex>& indexes);

class StageIndexes {
 public:
  // Reads those in `directory`/tmp_index_files. Corrupt, saying what is there and what is missing, unless the stages
  // are 1 to S with the same expert-parallel ranks each, no layer below the highest is missing, and the embedding and
  // the last norm are there. `shards` are the shard files of the directory.
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
