// What Megatron keeps of a training run that is no tensor, made of the objects of any source: the hyperparameters of
// Adam's groups, the schedule of the learning rate, and how far the run has come (megatron/core/optimizer,
// megatron/core/optimizer_param_scheduler.py).
#pragma once

#include <string_view>
#include <utility>

#include "formats/encoding/pickle_writer.h"
#include "formats/megatron/arguments.h"
#include "formats/tensor_files/adam_state.h"
#include "lib/checkpoint/format.h"

namespace reshard::megatron {

inline constexpr std::string_view kFullyReshardable = "fully_reshardable";

class RunState {
 public:
  static bool takes_object(std::string_view key);              // Format::takes_object
  static Result<RunState> read(const LayoutRequest& request);  // which has optimizer state

  Index iteration() const;
  void add_to(Arguments& args) const;
  // Entries of the common dict: "iteration", "optimizer", "opt_param_scheduler", ....
  Status write(pickle::PickleWriter& w) const;

 private:
  explicit RunState(AdamObjects objects) : objects_(std::move(objects)) {}
  bool has_own_groups() const;
  Status write_group(pickle::PickleWriter& w, const AdamObjects::Values& group) const;
  Status write_new_group(pickle::PickleWriter& w, double wd_mult) const;
  Status write_groups(pickle::PickleWriter& w) const;
  Status write_schedule(pickle::PickleWriter& w) const;

  AdamObjects objects_;
};

}  // namespace reshard::megatron
