// Adam's state as targets get it that hold nothing else of an optimizer (Holds::kAdam): the parameters' moments and
// masters among the tensors, and the hyperparameters of its groups among the objects, whichever framework named them.
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

// Whether there is optimizer state among the tensors: then each parameter has to have all of it, and no other; with
// Frozen::kAllowed some have none. `title` is of the framework that loads all or nothing.
enum class Frozen { kRefused, kAllowed };
Result<bool> has_adam(const LayoutRequest& request, std::string_view title, Frozen frozen = Frozen::kRefused);

class AdamObjects {
 public:
  using Values = std::map<std::string, pickle::Value, std::less<>>;  // by name

  static bool is_hyperparameter(std::string_view key);  // or a parameter's number of steps
  // Of hyperparameters, and of "extra_state.NAME". `step` is what tensors say. Unsupported where nothing says how many
  // steps were done, or a hyperparameter is missing and all objects could be read.
  static Result<AdamObjects> read(std::span<const TargetBlob> blobs, std::optional<Index> step, std::string_view title);

  Index step() const { return step_; }
  // By optimizer and number, "optimizer.param_groups.0", or by parameter.
  const std::map<std::string, Values>& groups() const { return groups_; }
  const Values& others() const { return others_; }  // "extra_state.NAME" by NAME
  // Of the first group that decays weights; of the first where none does.
  std::optional<pickle::Value> value(std::string_view word) const;
  std::optional<double> number(std::string_view word) const;
  // A whole number among others().
  std::optional<Index> count(std::string_view name) const;

 private:
  Status add(const TargetBlob& blob);
  const Values* decaying() const;

  std::deque<pickle::Document> documents_;
  std::map<std::string, Values> groups_;
  Values others_;
  std::optional<Index> counted_;  // steps, of parameters' objects
  bool is_unread_ = false;        // an object's bytes are not there, as in a plan
  Index step_ = 0;
};

}  // namespace reshard
