// SPDX-License-Identifier: Apache-2.0
// Splits the keys of a training state_dict: model, optimizer, or other state.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reshard {

enum class StateKind { kModel, kOptimizer, kOther };

// A plain key (lib/model/parts.h makes them), split around the parameter that it belongs to:
//   "layers.0.attention.wq.weight"                           the parameter itself
//   "optimizer.state.layers.0.attention.wq.weight.exp_avg"   prefix "optimizer.state.", suffix ".exp_avg"
//   "optimizer.param_groups.<parameter>.lr"                  likewise (torchtitan flattens both)
//   "optimizer_1.state.<parameter>.exp_avg"                  second of several optimizers
//   "train_state.step"                                       kOther, no parameter
struct StateKey {
  StateKind kind = StateKind::kModel;
  std::string prefix;
  std::string parameter;  // empty if the key belongs to no parameter
  std::string suffix;
};
StateKey split_state_key(std::string_view key);
// Returns split_state_key(key).kind.
StateKind state_kind(std::string_view key);

// The suffixes of Adam's state of a parameter, for all frameworks.
inline constexpr std::string_view kMomentSuffix = ".exp_avg", kSecondMomentSuffix = ".exp_avg_sq";
inline constexpr std::string_view kMasterSuffix = ".fp32_param";  // the float32 master weight
inline constexpr std::string_view kStepSuffix = ".step";

// The user's instructions for names that no rule covers.
struct KeyChanges {
  std::string model_prefix;  // prefix of the model's names; empty: found automatically
  std::string part;          // name of the only part to use; empty: all, "model" for the model
  std::vector<std::pair<std::string, std::string>> renames;  // replacements in names, "transformer.h" to "model.layers"
  bool as_stored = false;  // keep the model's names, unless a model_prefix or one of several models is given
};

bool is_optimizer_word(std::string_view word);  // "optimizer", "optim", "optimizer_0", "optimizer_state_dict"
std::string_view optimizer_number(std::string_view word);  // "0" of "optimizer_0"; may be empty
// "lr_scheduler", "train_state", ...: neither model nor optimizer.
bool is_training_word(std::string_view word);
// "ema", "model_ema", ...: a second model, averaged from the first. These are training words too.
bool is_average_word(std::string_view word);

}  // namespace reshard
