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
// Hugging Face's "-00001-of-00004" are none.
struct ShardName {
  Part part = Part::kModel;
  Index stage = 0;   // from 1 on; 0: the run had no pipeline
  Index expert = 0;  // likewise
  Index shard = 0;   // from 1 on
};
std::optional<ShardName> parse_shard_name(std::string_view name);

// What an index is of: "model.safetensors.index.json", "pytorch_optim.bin.index.actor.json", and in tmp_index_files
// "pytorch_model.bin.index-stage-00001.json".
struct IndexName {
  Part part = Part::kModel;
  Index stage = 0;  // 0: of the whole
  Index expert = 0;
};
std::optional<IndexName> parse_index_name(std::string_view name);

// Whether a training application names the directory of a step so: "epoch-0_step-7".
bool is_step_name(std::string_view name);

inline constexpr std::string_view kModeling = "modeling", kOptimizer = "optimizer";  // directories
inline constexpr std::string_view kScheduler = "lr_scheduler", kRunningStates = "running_states.json";
inline constexpr std::string_view kTemporaryIndexes = "tmp_index_files";
inline constexpr std::string_view kGroupFile = "pytorch_optim_group.bin";  // where an index names no other

}  // namespace reshard::colossalai
