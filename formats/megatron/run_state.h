// SPDX-License-Identifier: Apache-2.0
// The values of a training run in Megatron's checkpoints: the hyperparameters of Adam's groups, the learning-rate
// schedule and the progress of the run (megatron/core/optimizer, megatron/core/optimizer_param_scheduler.py). They are
// made from the objects of any source.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/encoding/pickle_writer.h"
#include "formats/megatron/arguments.h"
#include "formats/tensor_files/adam_state.h"
#include "lib/checkpoint/format.h"

namespace reshard::megatron {

inline constexpr std::string_view kFullyReshardable = "fully_reshardable";

// The parameters of an optimizer. With expert parallelism Megatron has one optimizer for experts and one for the rest.
enum class OptimizerScope { kAll, kDense, kExperts };

// The values of one run.
class RunState {
 public:
  static bool takes_object(std::string_view key);              // Format::takes_object
  static Result<RunState> read(const LayoutRequest& request);  // the request must have optimizer state

  Index iteration() const;
  Index step() const { return objects_.step(); }
  void add_to(Arguments& args) const;
  // Writes the progress into the checkpoint's dict: "iteration", "opt_param_scheduler", ...
  Status write_progress(pickle::Dict& state) const;
  // Writes "param_groups" into an optimizer's dict.
  Status write_groups(pickle::Dict& optimizer, OptimizerScope of) const;
  // Writes two groups, parameters with weight decay (matrices) and without, or one group for experts. `params` has the
  // ids of each group's parameters; the step is written if `with_step`. Fails with kUnsupported if the source has other
  // groups.
  Status write_groups(pickle::Dict& optimizer, OptimizerScope of, const std::vector<std::vector<Index>>& params,
                      bool with_step) const;

 private:
  explicit RunState(AdamObjects objects) : objects_(std::move(objects)) {}
  using Values = AdamObjects::Values;
  // The members of a group besides its hyperparameters.
  struct Own {
    bool of_experts = false;
    std::optional<std::vector<Index>> params = {};
    bool with_step = true;
  };
  bool has_own_groups() const;
  std::vector<const Values*> own_groups(OptimizerScope of) const;
  Status write_group(pickle::PickleWriter& w, const Values& group, const Own& own) const;
  void write_own(pickle::Dict& group, const Own& own) const;
  Status write_new_group(pickle::PickleWriter& w, double wd_mult, const Own& own) const;
  Status write_schedule(pickle::PickleWriter& w) const;

  AdamObjects objects_;
};

}  // namespace reshard::megatron
