#include "formats/megatron/run_state.h"

#include <algorithm>
#include <array>

#include "lib/base/text.h"

namespace reshard::megatron {
namespace {

using pickle::PickleWriter;

constexpr std::string_view kExtraState = "extra_state.";
constexpr std::string_view kSchedule = "opt_param_scheduler";
constexpr std::string_view kIteration = "iteration";
constexpr std::array<std::string_view, 3> kCommon = {kIteration, kSchedule, "num_floating_point_operations_so_far"};
// What names a group where a run looks for its own (param_group_identifier_keys).
constexpr std::array<std::string_view, 2> kDecay = {"wd_mult", "pre_wd_mult"};
constexpr std::string_view kOfExperts = "is_expert_parallel";

// "opt_param_scheduler.max_lr": of files of ranks each number is an object.
bool is_common(std::string_view word) {
  word = word.substr(0, word.find('.'));
  return std::find(kCommon.begin(), kCommon.end(), word) != kCommon.end() ||
         std::find(kSampleCounts.begin(), kSampleCounts.end(), word) != kSampleCounts.end();
}

}  // namespace

bool RunState::takes_object(std::string_view key) {
  return AdamObjects::is_hyperparameter(key) || (take(key, kExtraState) && is_common(key));
}

Result<RunState> RunState::read(const LayoutRequest& request) {
  return RunState(TRY(AdamObjects::read(request.blobs, request.step, "Megatron")));
}

Index RunState::iteration() const { return objects_.count(kIteration).value_or(objects_.step()); }

bool RunState::has_own_groups() const {
  return std::any_of(objects_.groups().begin(), objects_.groups().end(), [](const auto& group) {
    return std::any_of(kDecay.begin(), kDecay.end(), [&](auto word) { return group.second.contains(word); });
  });
}

void RunState::add_to(Arguments& args) const {
  for (const std::string_view word : kSampleCounts)
    if (const auto n = objects_.count(word)) args.set(std::string(word), *n);
  args.set(std::string(kIteration), iteration());
  args.set("optimizer", "adam");
  args.set("use_distributed_optimizer", true);
  args.set("dist_ckpt_optim_fully_reshardable", true);
  args.set("no_save_optim", false);
}

// One of Megatron's own.
Status RunState::write_group(PickleWriter& w, const AdamObjects::Values& group) const {
  w.empty_dict();
  w.mark();
  for (const auto& [word, value] : group) {
    w.text(word);
    TRY(pickle::write_value(w, value));
  }
  if (!group.contains("step")) {
    w.text("step");
    w.integer(objects_.step());
  }
  w.set_items();
  return {};
}

// One such as Megatron makes: matrices decay (`wd_mult` 1), norms and biases do not.
Status RunState::write_new_group(PickleWriter& w, double wd_mult) const {
  const double lr = objects_.number("lr").value_or(0);
  w.empty_dict();
  w.mark();
  const auto flag = [&](std::string_view word, bool is) {
    w.text(word);
    w.boolean(is);
  };
  const auto real = [&](std::string_view word, double x) {
    w.text(word);
    w.number(x);
  };
  flag(kOfExperts, false);
  flag("default_config", true);
  real("wd_mult", wd_mult);
  real("lr_mult", 1.0);
  flag("is_decoupled_lr", false);
  real("max_lr", objects_.number("initial_lr").value_or(lr));
  real("min_lr", 0.0);
  real("lr", lr);
  w.text("betas");
  if (const auto betas = objects_.value("betas"))
    TRY(pickle::write_value(w, *betas));
  else
    w.none();
  real("eps", objects_.number("eps").value_or(0));
  real("weight_decay", objects_.number("weight_decay").value_or(0) * wd_mult);
  for (const std::string_view word : {"bias_correction", "decoupled_weight_decay"}) flag(word, true);
  for (const std::string_view word : {"amsgrad", "maximize", "capturable", "differentiable"}) flag(word, false);
  for (const std::string_view word : {"foreach", "fused"}) {
    w.text(word);
    w.none();
  }
  w.text("step");
  w.integer(objects_.step());
  w.set_items();
  return {};
}

Status RunState::write_groups(PickleWriter& w) const {
  w.empty_list();
  w.mark();
  for (const auto& [name, group] : objects_.groups()) {
    const auto of_experts = group.find(kOfExperts);  // of those that ranks share out, which are another optimizer's
    if (has_own_groups() && (of_experts == group.end() || !of_experts->second.as_bool().value_or(false)))
      TRY(write_group(w, group));
  }
  if (!has_own_groups())
    for (const double wd_mult : {1.0, 0.0}) TRY(write_new_group(w, wd_mult));
  w.append_items();
  return {};
}

Status RunState::write_schedule(PickleWriter& w) const {
  if (const auto own = objects_.others().find(kSchedule); own != objects_.others().end())
    return pickle::write_value(w, own->second);
  w.empty_dict();
  w.mark();
  bool is_known = false;
  for (const auto& [name, value] : objects_.others()) {
    std::string_view word = name;
    if (!take(word, kSchedule) || !take(word, ".")) continue;
    w.text(word);
    TRY(pickle::write_value(w, value));
    is_known = true;
  }
  if (is_known) {
    w.set_items();
    return {};
  }
  const auto real = [&](std::string_view word, double x) {
    w.text(word);
    w.number(x);
  };
  const auto integer = [&](std::string_view word, Index n) {
    w.text(word);
    w.integer(n);
  };
  const auto text = [&](std::string_view word, std::string_view what) {
    w.text(word);
    w.text(what);
  };
  real("max_lr", objects_.number("initial_lr").value_or(objects_.number("lr").value_or(0)));
  real("min_lr", 0.0);
  integer("lr_warmup_steps", 0);
  integer("num_steps", 0);
  text("lr_decay_style", "constant");
  integer("lr_decay_steps", 1);
  for (const std::string_view word : {"start_wd", "end_wd"}) real(word, objects_.number("weight_decay").value_or(0));
  text("wd_incr_style", "constant");
  integer("wd_incr_steps", 1);
  w.set_items();
  return {};
}

Status RunState::write(PickleWriter& w) const {
  w.text(kIteration);
  w.integer(iteration());
  if (const auto flops = objects_.others().find("num_floating_point_operations_so_far");
      flops != objects_.others().end()) {
    w.text(flops->first);
    TRY(pickle::write_value(w, flops->second));
  }
  w.text("optimizer");
  w.empty_dict();
  w.mark();
  w.text("optimizer");
  w.empty_dict();
  w.mark();
  w.text("param_groups");
  TRY(write_groups(w));
  w.set_items();
  w.text("param_state_sharding_type");
  w.text(kFullyReshardable);
  w.set_items();
  w.text(kSchedule);
  return write_schedule(w);
}

}  // namespace reshard::megatron
