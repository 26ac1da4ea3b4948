#include "lib/checkpoint/state_key.h"

#include <array>

namespace reshard {

StateKey split_state_key(std::string_view key) {
  // torchtitan/components/checkpoint.py; "scheduler" and "extra_state" are what others call the same things.
  static constexpr std::array<std::string_view, 6> kOther = {"lr_scheduler.", "train_state.", "dataloader.",
                                                             "scheduler.",    "rng_state",    "extra_state."};
  for (const std::string_view prefix : kOther)
    if (key.starts_with(prefix)) return {StateKind::kOther, {}, {}, {}};
  for (const std::string_view name : {"lr_scheduler", "train_state", "dataloader", "scheduler", "extra_state"})
    if (key == name) return {StateKind::kOther, {}, {}, {}};
  for (const std::string_view prefix : {"optimizer.state.", "optimizer.param_groups."}) {
    if (!key.starts_with(prefix)) continue;
    const std::string_view rest = key.substr(prefix.size());
    const std::size_t dot = rest.rfind('.');
    if (dot == std::string_view::npos) break;
    return {StateKind::kOptimizer, std::string(prefix), std::string(rest.substr(0, dot)),
            std::string(rest.substr(dot))};
  }
  if (key == "optimizer" || key.starts_with("optimizer.") || key.starts_with("optim."))
    return {StateKind::kOptimizer, {}, {}, {}};
  return {StateKind::kModel, {}, std::string(key), {}};
}

}  // namespace reshard
