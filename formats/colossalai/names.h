// SPDX-License-Identifier: Apache-2.0
// The names of the files in ColossalAI's checkpoints (colossalai/checkpoint_io/utils.py).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lib/base/checked.h"

namespace reshard::colossalai {

enum class Part { kModel, kOptimizer };

// A shard:
//   pytorch_model-00001.bin                             model, shard 1
//   model-stage-00002-shard-00001.safetensors           of pipeline stage 2
//   pytorch_optim-stage-00001-00003-shard-00001.bin     of stage 1 and expert-parallel rank 3, of an optimizer
//   pytorch_model.actor-00001.bin                       with the user's prefix "actor"
// Hugging Face's "-00001-of-00004" is not a shard name.
struct ShardName {
  Part part = Part::kModel;
  Index stage = 0;   // 1 or more; 0 if the run had no pipeline
  Index expert = 0;  // 1 or more; 0 if the run had no expert parallelism
  Index shard = 0;   // 1 or more
};
std::optional<ShardName> parse_shard_name(std::string_view name);

// The name of an index: "model.safetensors.index.json", "pytorch_optim.bin.index.actor.json", and in tmp_index_files
// "pytorch_model.bin.index-stage-00001.json".
struct IndexName {
  Part part = Part::kModel;
  Index stage = 0;  // 0: the index of all stages
  Index expert = 0;
};
std::optional<IndexName> parse_index_name(std::string_view name);

// Returns whether this is the name of a training application's step directory: "epoch-0_step-7".
bool is_step_name(std::string_view name);

inline constexpr std::string_view kModeling = "modeling", kOptimizer = "optimizer";  // directories
inline constexpr std::string_view kScheduler = "lr_scheduler", kRunningStates = "running_states.json";
inline constexpr std::string_view kTemporaryIndexes = "tmp_index_files";
inline constexpr std::string_view kGroupFile = "pytorch_optim_group.bin";  // unless an index names another

}  // namespace reshard::colossalai
