// SPDX-License-Identifier: Apache-2.0
// Which pipeline stage holds a layer: the rules by which trainers distribute layers.
#pragma once

#include <optional>
#include <string_view>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

enum class StageRule {
  // As even as possible. The embedding and the head count as one layer each, and the first stages get the remainder.
  // (torchtitan/distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part)
  kTorchtitan,
  // layers / stages each. The remainder r goes to the middle stages, one each, from stages/2 - r/2 on.
  // (colossalai/pipeline/stage_manager.py, distribute_layers)
  kColossalai,
  // layers / stages each, without a remainder (Megatron-LM without virtual stages).
  kEven,
  // layers / stages each. The remainder r goes to the r stages before the last, one each.
  // (vllm/distributed/utils.py, get_pp_indices)
  kVllm,
};
std::string_view stage_rule_name(StageRule rule);  // "torchtitan"
std::optional<StageRule> stage_rule_from_name(std::string_view name);

// Returns a usage error if the rule cannot distribute this many layers (0 to kMaxLayers) over `stages` (at least 1): if
// a stage would be empty, or the rule requires divisibility.
Status check_stages(StageRule rule, Index layers, Index stages);

// Returns the stage of a layer, for numbers accepted by check_stages().
Index stage_of_layer(StageRule rule, Index layer, Index layers, Index stages);

// Returns the layer of a parameter: the first component of its name that is a number below kMaxLayers, 7 in
// "layers.7.attention", or -1 if there is none.
inline constexpr Index kMaxLayers = 1'000'000;
Index layer_number(std::string_view name);

}  // namespace reshard
