// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/state_key.h"

#include <algorithm>
#include <array>

#include "lib/base/text.h"
#include "lib/checkpoint/average_words.h"

namespace reshard {
namespace {

std::string_view first_part(std::string_view key) { return key.substr(0, key.find('.')); }

}  // namespace

bool is_optimizer_word(std::string_view word) {
  if (const std::string_view number = optimizer_number(word); !number.empty()) word.remove_suffix(number.size() + 1);
  for (const std::string_view suffix : {"_state_dict", "_states", "_state"})
    if (word.ends_with(suffix)) {
      word.remove_suffix(suffix.size());
      break;
    }
  return word == "optimizers" || word == "optimizer" || word == "optim";
}

std::string_view optimizer_number(std::string_view word) {
  const std::size_t at = word.rfind('_');
  return at == std::string_view::npos || !is_digits(word.substr(at + 1)) ? "" : word.substr(at + 1);
}

bool is_training_word(std::string_view word) {
  // From torchtitan/components/checkpoint.py, and other frameworks' words.
  static constexpr std::array<std::string_view, 11> kWords = {
      "lr_scheduler", "lr_schedulers", "scheduler", "schedulers",  "train_state", "trainer_state",
      "dataloader",   "rng_state",     "rng",       "extra_state", "peft_adapter"};
  return std::find(kWords.begin(), kWords.end(), word) != kWords.end() || word.starts_with("rng_state") ||
         is_average_word(word);
}

bool is_average_word(std::string_view word) {
  // Also timm's, BasicSR's (params_ema), diffusers' (shadow_params) and those of torch's swa_utils.
  static constexpr std::array<std::string_view, 15> kModelWords = {
      "model", "module", "net",     "network", "state",  "states", "dict",      "params",
      "param", "weight", "weights", "helper",  "shadow", "copy",   "parameters"};
  if (word == "shadow_params" || word == "averaged_model") return true;
  if (word.find_first_of("aA") == std::string_view::npos) return false;  // fast: every name's first word comes here
  const std::vector<std::string> parts = words_in_name(word);
  const auto is_average = [](const std::string& part) { return part == "ema" || part == "swa"; };
  const auto is_allowed = [&](const std::string& part) {
    return is_average(part) || is_digits(part) ||
           std::find(kModelWords.begin(), kModelWords.end(), part) != kModelWords.end();
  };
  return std::any_of(parts.begin(), parts.end(), is_average) && std::all_of(parts.begin(), parts.end(), is_allowed);
}

StateKind state_kind(std::string_view key) {
  const std::string_view word = first_part(key);
  if (is_training_word(word)) return StateKind::kOther;
  return is_optimizer_word(word) ? StateKind::kOptimizer : StateKind::kModel;
}

StateKey split_state_key(std::string_view key) {
  const StateKind kind = state_kind(key);
  if (kind == StateKind::kOther) return {kind, {}, {}, {}};
  if (kind == StateKind::kModel) return {kind, {}, std::string(key), {}};
  const std::string_view word = first_part(key);
  for (const std::string_view section : {".state.", ".param_groups."}) {
    if (!key.substr(word.size()).starts_with(section)) continue;
    const std::string_view prefix = key.substr(0, word.size() + section.size()), rest = key.substr(prefix.size());
    const std::size_t dot = rest.rfind('.');
    if (dot == std::string_view::npos) break;
    return {StateKind::kOptimizer, std::string(prefix), std::string(rest.substr(0, dot)),
            std::string(rest.substr(dot))};
  }
  return {StateKind::kOptimizer, {}, {}, {}};
}

}  // namespace reshard
