// SPDX-License-Identifier: Apache-2.0
#include "lib/layout/stages.h"

#include <algorithm>
#include <array>
#include <utility>

#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::array<std::pair<StageRule, std::string_view>, 4> kRuleNames = {{
    {StageRule::kTorchtitan, "torchtitan"},
    {StageRule::kColossalai, "colossalai"},
    {StageRule::kEven, "even"},
    {StageRule::kVllm, "vllm"},
}};

// Each stage has `each` layers, and `extra` stages from `first_extra` on have one more.
Index stage_where_some_have_one_more(Index layer, Index each, Index extra, Index first_extra, Index stages) {
  const Index before = first_extra * each, through = before + extra * (each + 1);
  if (layer < before) return layer / each;
  if (layer < through) return first_extra + (layer - before) / (each + 1);
  return std::min(stages - 1, first_extra + extra + (layer - through) / std::max<Index>(1, each));
}

}  // namespace

std::string_view stage_rule_name(StageRule rule) {
  for (const auto& [value, name] : kRuleNames)
    if (value == rule) return name;
  return "";
}

std::optional<StageRule> stage_rule_from_name(std::string_view name) {
  for (const auto& [value, known] : kRuleNames)
    if (known == name) return value;
  return std::nullopt;
}

Status check_stages(StageRule rule, Index layers, Index stages) {
  const bool counts_ends = rule == StageRule::kTorchtitan;
  if (stages > layers + (counts_ends ? 2 : 0))
    return usage_error("pp=" + std::to_string(stages) + " exceeds the parts of the model: " +
                       count_of(layers, "layer") + (counts_ends ? ", the embedding and the head" : ""));
  if (rule == StageRule::kEven && layers % stages != 0)
    return usage_error("pp=" + std::to_string(stages) + " does not divide " + count_of(layers, "layer") +
                       ", but rule 'even' requires equal stages");
  return {};
}

Index stage_of_layer(StageRule rule, Index layer, Index layers, Index stages) {
  if (rule == StageRule::kTorchtitan) {
    const Index total = layers + 2;
    return stage_where_some_have_one_more(layer + 1, total / stages, total % stages, 0, stages);
  }
  const Index extra = layers % stages;
  const Index first_extra = rule == StageRule::kVllm ? stages - 1 - extra : stages / 2 - extra / 2;
  return stage_where_some_have_one_more(layer, layers / stages, extra, first_extra, stages);
}

Index layer_number(std::string_view name) {
  for (const std::string& part : split(name, '.')) {
    if (const auto n = parse_number(part); n && *n < kMaxLayers) return *n;
  }
  return -1;
}

}  // namespace reshard
