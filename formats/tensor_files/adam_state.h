// SPDX-License-Identifier: Apache-2.0
// Adam's state in a request to a target that stores Adam and no other optimizer (StateSupport::kAdam). The moments and
// the float32 masters of parameters are tensors, the hyperparameters of the groups are objects. The names may be those
// of any framework.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "formats/encoding/pickle.h"
#include "lib/checkpoint/format.h"

namespace reshard {

// Returns whether the tensors include optimizer state. If they do, fails unless every parameter has the full state of
// Adam and nothing else; with Frozen::kAllowed a parameter may also have none. `title` is the framework named in
// errors.
enum class Frozen { kRefused, kAllowed };
Result<bool> has_adam(const LayoutRequest& request, std::string_view title, Frozen frozen = Frozen::kRefused);

// The hyperparameters and other objects of a request, parsed.
class AdamObjects {
 public:
  using Values = std::map<std::string, pickle::Value, std::less<>>;  // by name

  // Returns whether an object is a hyperparameter or a parameter's step count.
  static bool is_hyperparameter(std::string_view key);
  // Parses hyperparameters and objects named "extra_state.NAME". `step` is the step count that tensors gave, if any.
  // Fails with kUnsupported if neither says how many steps were done, or if a hyperparameter is missing although every
  // object could be read.
  static Result<AdamObjects> read(std::span<const TargetBlob> blobs, std::optional<Index> step, std::string_view title);

  Index step() const { return step_; }
  // Returns the groups by optimizer and number ("optimizer.param_groups.0") or by parameter.
  const std::map<std::string, Values>& groups() const { return groups_; }
  const Values& others() const { return others_; }  // "extra_state.NAME" by NAME
  // Returns a hyperparameter of the first group with weight decay, or of the first group if none has any.
  std::optional<pickle::Value> value(std::string_view word) const;
  std::optional<double> number(std::string_view word) const;
  // Returns a whole number among others().
  std::optional<Index> count(std::string_view name) const;

 private:
  Status add(const TargetBlob& blob);
  const Values* decaying() const;

  std::deque<pickle::Document> documents_;
  std::map<std::string, Values> groups_;
  Values others_;
  std::optional<Index> counted_;  // the step count that the parameters' objects gave
  bool is_unread_ = false;        // the bytes of an object are not available, as when only planning
  Index step_ = 0;
};

}  // namespace reshard
