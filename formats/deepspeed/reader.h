// SPDX-License-Identifier: Apache-2.0
// The reader of DeepSpeed's checkpoints. It reads the model (reader.cc), then the optimizer's states (optimizer.cc),
// and makes the catalog from both.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/deepspeed/file_set.h"
#include "formats/deepspeed/flat_groups.h"
#include "formats/tensor_files/reader.h"
#include "lib/model/families.h"

namespace reshard::deepspeed {

inline constexpr std::string_view kMasterState =
    "fp32_param";  // the master's name in the optimizer's state, as in Megatron's checkpoints

// A parameter or buffer of the model, and its states.
struct Weight {
  DType dtype = DType::kFloat32;  // in which the model computes, if `computes`
  bool computes = false;          // the module has it, or a placeholder for it
  std::optional<Tensor> stored;   // the module's values
  std::optional<Tensor> master;
  std::vector<Tensor> states;                               // named by the state
  std::vector<std::pair<std::string, std::string>> values;  // pickled
};

struct UniversalState;

// The groups of all parameters. The stages of a pipeline have groups with the same options, and the tensor-parallel
// ranks of a stage have the same parameters.
struct OptimizerGroups {
  std::vector<ParameterGroup> options;          // of the first stage that can be read
  std::vector<std::vector<std::string>> names;  // of the parameters in each group
  Index stages = 0;                             // earlier stages are not added again

  // Adds the groups of one tensor-parallel rank; call it in ascending order of stages. Returns false if another rank's
  // were added for this stage.
  bool add(Index stage, const std::vector<ParameterGroup>& groups, const std::vector<FlatParameter>& parameters);
};

class DeepspeedReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

 private:
  Status read(const PathSnapshot& place, const OpenOptions& options);
  Status read_models(const OpenOptions& options);
  Status find_parts();
  Status join_parts_of(const std::vector<std::map<std::string, Dims>>& shapes);
  Status add_module(const ModelStates& states, std::uint32_t file, Index part);
  Status read_module_files();
  Status join_frozen();
  Status count_ranks();
  Status read_optimizers();
  Status read_without_rank_files();
  Result<std::optional<std::vector<RankStates>>> read_ranks_of(Index part, const ModelStates& model);
  Status add_states_of_part(Index part, const ModelStates& model, const std::vector<RankStates>& ranks,
                            OptimizerGroups& groups);
  void take_dtype_of_module(Weight& weight);
  Status add_parameters(const std::vector<RankStates>& ranks, const std::vector<FlatParameter>& parameters, Index part);
  Status add_parameter_group(std::size_t g, const ParameterGroup& group, std::uint32_t file,
                             const std::vector<std::string>& names);
  Status read_plain_optimizer();
  Status read_universal();
  Result<std::vector<std::optional<UniversalState>>> read_universal_states();
  Status add_universal_state(const UniversalState& state, const std::map<std::string, Dims>& shapes);
  Status read_universal_options(const std::vector<std::vector<std::string>>& groups);
  Status resolve_shared();
  std::map<std::string, std::string> plain_names(Families families);
  Status finish_weights(Weights wanted, Families families);
  Status add_extra();
  void describe_run(Weights wanted);

  std::string universal_path(const std::string& parameter) const {
    return set_.directory + std::string(kUniversalDirectory) + "/" + parameter;
  }
  bool has_rank_models() const { return set_.has_rank_models(); }
  const ModelStates& first() const { return models_.begin()->second; }
  Index parts() const {
    const Index models = set_.models.rbegin()->first.first + 1;
    return set_.optimizers.empty() ? models : std::max(models, set_.optimizers.rbegin()->first.first + 1);
  }
  void warn(std::string text) { catalog_.warnings.push_back(std::move(text)); }

  FileSet set_;
  Families families_;
  const TensorFile* first_file_ = nullptr;
  std::map<std::pair<Index, Index>, ModelStates> models_;  // by part and rank
  std::map<std::pair<Index, Index>, std::uint32_t> model_files_;
  std::map<std::string, Weight> weights_;
  std::map<std::string, std::string> shared_;
  std::set<std::string> universal_;  // parameters with a directory in a universal checkpoint
  std::set<std::string> left_out_;
  std::string optimizer_;                      // for people: "ZeRO 3"
  Index ranks_ = 0;                            // data-parallel
  Index tensor_ranks_ = 1;                     // tensor-parallel; they count fastest among the parts
  std::map<std::string, JoinedParts> joined_;  // of each parameter, if there are several tensor-parallel ranks
  std::set<std::string> unplaced_;             // parameters whose shape only a file that cannot be read shows
  bool has_masters_ = false;
  std::optional<DType> rounded_to_;  // the model's dtype, if weights are stored only as masters (ZeRO 3)
};

}  // namespace reshard::deepspeed
