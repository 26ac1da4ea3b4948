// What a key of a training state_dict is about: the model, its optimizer, or something else.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reshard {

enum class StateKind { kModel, kOptimizer, kOther };

// A plain key (lib/model/parts.h makes a name one) taken apart around the parameter it belongs to:
//   "layers.0.attention.wq.weight"                           the parameter itself
//   "optimizer.state.layers.0.attention.wq.weight.exp_avg"   prefix "optimizer.state.", suffix ".exp_avg"
//   "optimizer.param_groups.<parameter>.lr"                  likewise (torchtitan flattens both)
//   "optimizer_1.state.<parameter>.exp_avg"                  of the second of several optimizers
//   "train_state.step"                                       kOther, no parameter
struct StateKey {
  StateKind kind = StateKind::kModel;
  std::string prefix;
  std::string parameter;  // empty where the key belongs to none
  std::string suffix;
};
StateKey split_state_key(std::string_view key);
StateKind state_kind(std::string_view key);  // of that

// What Adam keeps of a parameter, as suffixes of keys, whatever framework saved it.
inline constexpr std::string_view kMomentSuffix = ".exp_avg", kSecondMomentSuffix = ".exp_avg_sq";
inline constexpr std::string_view kMasterSuffix = ".fp32_param";  // the weight in float32
inline constexpr std::string_view kStepSuffix = ".step";

// What the user says of names that no rule knows.
struct KeyChanges {
  std::string model_prefix;  // what wraps the model; empty: it is found
  std::string part;          // that is taken, by its name; empty: all, "model" for the model
  std::vector<std::pair<std::string, std::string>> renames;  // parts of names, "transformer.h" to "model.layers"
  bool as_stored = false;  // nothing is taken off the model's names but a prefix that is given
};

bool is_optimizer_word(std::string_view word);  // "optimizer", "optim", "optimizer_0", "optimizer_state_dict"
std::string_view optimizer_number(std::string_view word);  // of that, "0" of "optimizer_0", or empty
bool is_training_word(std::string_view word);  // "lr_scheduler", "train_state", ...: of neither model nor optimizer
bool is_average_word(
    std::string_view word);  // "ema", "model_ema", ...: of those, a second model averaged from the first

}  // namespace reshard
