// Which pipeline stage holds a layer: the rules by which trainers deal layers out.
#pragma once

#include <optional>
#include <string_view>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

enum class StageRule {
  // As evenly as it goes, the embedding and the head counting as one layer each, the first stages one more.
  // (torchtitan/distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part)
  kTorchtitan,
  // layers / stages each; of the r that are left, one each to the middle stages from stages/2 - r/2 on.
  // (colossalai/pipeline/stage_manager.py, distribute_layers)
  kColossalai,
  // layers / stages each, which has to come out even (Megatron-LM without virtual stages).
  kEven,
  // layers / stages each; of the r that are left, one each to the r stages before the last.
  // (vllm/distributed/utils.py, get_pp_indices)
  kVllm,
};
std::string_view stage_rule_name(StageRule rule);  // "torchtitan"
std::optional<StageRule> stage_rule_from_name(std::string_view name);

// Whether the rule can deal this many layers out (0 to kMaxLayers) over `stages` (at least 1): a usage error where
// stages would be left without a part of the model, or the rule does not come out even.
Status check_stages(StageRule rule, Index layers, Index stages);

// The stage of a layer, for numbers that check_stages lets pass.
Index stage_of_layer(StageRule rule, Index layer, Index layers, Index stages);

// The layer a parameter belongs to: the first component of its name that is a number below kMaxLayers, 7 in
// "layers.7.attention"; -1 where there is none.
inline constexpr Index kMaxLayers = 1'000'000;
Index layer_number(std::string_view name);

}  // namespace reshard
