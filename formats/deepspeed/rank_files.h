// SPDX-License-Identifier: Apache-2.0
// Reads the content of one of DeepSpeed's files: the model states that engine.py saves, or the state_dict() of an
// optimizer.
//
//   model states   {"module": {name: tensor}, "param_shapes": [{name: torch.Size}, ...] of each group,
//                   "buffer_names", "frozen_param_shapes", "frozen_param_fragments", "shared_params": {alias: name},
//                   "optimizer", "global_steps", "dp_world_size", "mp_world_size", "num_experts", ...}
//   optimizer states   {"optimizer_state_dict": X, "ds_config", "ds_version"}
//     ZeRO 1, 2, BF16_Optimizer   X = {"single_partition_of_fp32_groups": [tensor], "partition_count": [2, 2],
//                                      "base_optimizer_state": {"state": {0: {"exp_avg", "exp_avg_sq", "step"}},
//                                                               "param_groups": [{"lr", ...}]},
//                                      "param_alignment_paddings": [[0, 4, ...]],   numbers behind each parameter
//                                      "param_slice_mappings": [{name: fragment_address {"numel", "start"}}],
//                                      "zero_stage"}       BF16_Optimizer's has none
//     ZeRO 3                      X = {"fp32_flat_groups": [tensor], "partition_count": 2,
//                                      "optimizer_state_dict": {"state", "param_groups"}, "zero_stage"}
//
// Written by: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, deepspeed/runtime/bf16_optimizer.py.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "formats/deepspeed/tensor_parallel.h"
#include "formats/encoding/tensor_file.h"
#include "formats/tensor_files/parameter_ids.h"

namespace reshard::deepspeed {

struct NamedTensor {
  std::string name;
  StoredTensor tensor;  // the reader sets its file
};

using Group = std::vector<NamedShape>;  // parameters in the order in which they were flattened

// AutoEP's parameters that are a rank's experts, stacked on dimension 0, by name, with the number of experts on all
// ranks. If these are divided among n ranks, rank r has the (r % n)-th run of them.
using StackedExperts = std::map<std::string, Index>;

// The content of a file of model states.
struct ModelStates {
  std::vector<NamedTensor> module;
  bool has_module = false;                   // false for a pipeline, whose layers have files of their own
  std::optional<std::vector<Group>> groups;  // nothing without ZeRO
  std::map<std::string, Dims> frozen_shapes;
  std::vector<NamedTensor> frozen;            // with ZeRO 3, this rank's run of each, as a vector
  std::map<std::string, std::string> shared;  // names by their aliases; AutoEP's routers have two
  std::set<std::string> buffers;
  std::optional<Index> steps, dp_ranks, mp_ranks, stages;  // stages: of a pipeline
  std::vector<Index> experts;                              // their number in each layer with experts
  StackedExperts stacked_experts;                          // AutoEP's
  std::string version;
  std::optional<TensorParallelInfo> tensor_parallel;  // AutoTP's
};
// Fails with kCorrupt if a member is not what DeepSpeed writes, or a parameter is in two groups.
Result<ModelStates> read_model_states(const TensorFile& file, const std::string& path);

// The flat state of one group, on one rank.
struct GroupState {
  std::optional<StoredTensor> master;
  std::map<std::string, StoredTensor> tensors;  // "exp_avg"; "step" has no dimensions
  std::map<std::string, std::string> values;    // other values, as pickles
};

// A range of a rank's vector that is part of a parameter.
struct Slice {
  std::string name;
  Index start = 0, length = 0;
};

struct ParameterGroup {
  std::vector<std::pair<std::string, std::string>> options;  // "lr", as pickles
  std::vector<Index> ids;                                    // its flat groups
};

// The content of a file of optimizer states.
struct OptimizerStates {
  std::optional<Index> stage;           // of ZeRO; nothing for BF16_Optimizer
  bool cuts_parameters = false;         // each parameter is cut (ZeRO 3), not the whole vector
  std::vector<Index> partition_counts;  // for each group, or with ZeRO 3 one for all unless it has AutoEP's experts
  std::vector<GroupState> groups;
  std::vector<std::vector<Index>> paddings;  // for each group, elements after each parameter; may be missing
  std::vector<std::vector<Slice>> slices;    // for each group; empty unless `with_slices`
  std::vector<ParameterGroup> param_groups;
  std::set<std::string> left_out;  // options that are not plain data
};
// Returns "group 0", for messages.
inline std::string group_text(std::size_t g) { return "group " + std::to_string(g); }

// Reads optimizer states. Fails with kCorrupt unless vectors have one dimension and stride 1.
Result<OptimizerStates> read_optimizer_states(const TorchFile& file, const std::string& path, bool with_slices);

// Reads the groups {"lr": ..., "params": [0, 1]} of any torch optimizer. Adds the names of options that are not plain
// data to `left_out`.
Result<std::vector<ParameterGroup>> read_parameter_groups(pickle::Value list, std::set<std::string>& left_out);

// Reads a shape: a torch.Size, or a tuple.
Result<Dims> read_shape(pickle::Value value, const std::string& what);

}  // namespace reshard::deepspeed
