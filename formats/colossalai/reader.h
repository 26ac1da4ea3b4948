// SPDX-License-Identifier: Apache-2.0
// The reader of ColossalAI's checkpoints: the model (reader.cc), the optimizer's states (optimizer.cc), and the files
// next to them.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "formats/colossalai/colossalai.h"
#include "formats/colossalai/names.h"
#include "formats/colossalai/stage_indexes.h"
#include "formats/tensor_files/parameter_ids.h"
#include "formats/tensor_files/reader.h"
#include "lib/base/file.h"

namespace reshard::colossalai {

class ColossalaiReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

 private:
  // A tensor that is in another file than the index says.
  struct Copy {
    std::string name;
    std::uint32_t file;
    StoredTensor stored;
  };
  // One state of one parameter id in the optimizer's files.
  struct State {
    std::string key;  // "exp_avg"
    std::uint32_t file = 0;
    const StoredTensor* tensor = nullptr;
    std::optional<pickle::Value> value;  // set if it is not a tensor
    bool is_copy = false;                // the index has the id in another file
  };
  struct Group {
    std::vector<Index> ids;
    std::vector<std::pair<std::string, pickle::Value>> options;
    std::uint32_t file = 0;
  };

  // An index: the file of each parameter's name, or of each id.
  using FileOf = std::unordered_map<std::string, std::string>;
  Result<std::vector<std::string>> counted_shards(const std::string& directory, const std::vector<std::string>& unnamed,
                                                  const std::function<bool(const std::string&)>& is_indexed,
                                                  double bytes_named, std::optional<double> total_size);
  Error no_index_error(const std::string& directory, const std::vector<std::string>& shards);

  Status open_model();
  Result<std::vector<ModelFile>> list_model();
  Result<std::vector<ModelFile>> files_of_index(const std::string& name);
  Status read_model_file(const ModelFile& file);
  Status add_copies();
  void check_total_size();
  void note_order(const TensorFile& content, const std::string& file);
  void list_parameters();

  Status open_optimizer();
  Status read_optimizer_file(const std::string& name);
  Status add_groups(pickle::Value list, std::uint32_t file);
  Status add_optimizer();
  ParameterNames names_of(const std::vector<ParameterId>& ids, const std::vector<std::vector<Index>>& groups) const;
  Status add_states(std::map<Index, std::string>& name_of);
  void note_fused(const std::map<Index, std::string>& name_of);
  Status read_neighbour(const PathSnapshot& opened);
  Status read_config(const std::string& directory);
  Status open_scheduler();
  Status open_running_states();
  std::string at_root(const std::string& directory) const {
    return directory.empty() ? tree_.root : path_join(tree_.root, directory);
  }
  Result<const PathSnapshot*> place_at(const std::string& directory) const {
    return directory.empty() ? Result<const PathSnapshot*>(tree_.place) : tree_.place->inside(directory);
  }
  void warn(std::string text) { catalog_.warnings.push_back(std::move(text)); }

  Tree tree_;
  OpenOptions options_;

  FileOf mapped_;  // the model's index
  bool has_index_ = false;
  std::vector<std::string> unnamed_;                     // shards of the model that the index does not name
  std::optional<std::vector<std::string>> index_order_;  // of the tensors; nothing without an index, or if it is sorted
  // The order of the tensors in each shard.
  std::map<std::tuple<Index, Index, Index, std::string>, std::vector<std::string>> file_order_;
  std::vector<std::string> unindexed_;
  std::vector<Copy> copies_;
  std::optional<double> total_size_;
  double stored_bytes_ = 0;  // including copies
  std::vector<NamedShape> parameters_;
  bool is_ordered_ = true;  // whether parameters_ has the model's order
  std::set<Index> stages_;
  bool is_safetensors_ = false;
  Index model_files_ = 0;
  bool is_untied_ = false;  // the config says that the head is not the embedding
  std::string neighbour_;   // the model next to an optimizer that was opened alone

  std::map<Index, std::vector<State>> states_;  // by id
  FileOf mapped_ids_;                           // the optimizer's index
  double state_bytes_ = 0;
  std::vector<Group> groups_;
  std::set<Index> grouped_ids_;
  Index values_of_groups_ = 0;  // number of options, counted for each id of each group
};

inline std::string below(std::string_view directory, const std::string& name) {
  return directory.empty() ? name : path_join(directory, name);
}

inline double bytes_of(const StoredTensor& tensor) {
  return static_cast<double>(volume(tensor.shape())) * static_cast<double>(byte_size(tensor.dtype));
}

}  // namespace reshard::colossalai
