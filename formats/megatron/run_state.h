// What Megatron keeps of a training run that is no tensor, made of the objects of any source: the hyperparameters of
// Adam's groups, the schedule of the learning rate, and how far the run has come (megatron/core/optimizer,
// megatron/core/optimizer_param_scheduler.py).
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

// Where ranks share experts out, Megatron has an optimizer for them and one for the rest.
enum class Of { kAll, kDense, kExperts };

class RunState {
 public:
  static bool takes_object(std::string_view key);              // Format::takes_object
  static Result<RunState> read(const LayoutRequest& request);  // which has optimizer state

  Index iteration() const;
  Index step() const { return objects_.step(); }
  void add_to(Arguments& args) const;
  // Items of the dict of a run: "iteration", "opt_param_scheduler", ...
  Status write_progress(pickle::Dict& state) const;
  // "param_groups", an item of an optimizer's dict.
  Status write_groups(pickle::Dict& optimizer, Of of) const;
  // Likewise, of two groups, or of experts one: what decays, which is matrices, and what does not. Each with the
  // numbers of its parameters, and with the step where told. Unsupported where the source's own are others.
  Status write_groups(pickle::Dict& optimizer, Of of, const std::vector<std::vector<Index>>& params,
                      bool with_step) const;

 private:
  explicit RunState(AdamObjects objects) : objects_(std::move(objects)) {}
  using Values = AdamObjects::Values;
  // What a group has beside its hyperparameters.
  struct Own {
    bool of_experts = false;
    std::optional<std::vector<Index>> params = {};
    bool with_step = true;
  };
  bool has_own_groups() const;
  std::vector<const Values*> own_groups(Of of) const;
  Status write_group(pickle::PickleWriter& w, const Values& group, const Own& own) const;
  void write_own(pickle::Dict& group, const Own& own) const;
  Status write_new_group(pickle::PickleWriter& w, double wd_mult, const Own& own) const;
  Status write_schedule(pickle::PickleWriter& w) const;

  AdamObjects objects_;
};

}  // namespace reshard::megatron
