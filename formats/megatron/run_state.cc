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

// Items of a dict.
void put_flag(PickleWriter& w, std::string_view key, bool value) {
  w.text(key);
  w.boolean(value);
}
void put_real(PickleWriter& w, std::string_view key, double value) {
  w.text(key);
  w.number(value);
}
void put_integer(PickleWriter& w, std::string_view key, Index value) {
  w.text(key);
  w.integer(value);
}
void put_text(PickleWriter& w, std::string_view key, std::string_view value) {
  w.text(key);
  w.text(value);
}

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
    put_integer(w, "step", objects_.step());
  }
  w.set_items();
  return {};
}

// One such as Megatron makes: matrices decay (`wd_mult` 1), norms and biases do not.
Status RunState::write_new_group(PickleWriter& w, double wd_mult) const {
  const double lr = objects_.number("lr").value_or(0);
  w.empty_dict();
  w.mark();
  put_flag(w, kOfExperts, false);
  put_flag(w, "default_config", true);
  put_real(w, "wd_mult", wd_mult);
  put_real(w, "lr_mult", 1.0);
  put_flag(w, "is_decoupled_lr", false);
  put_real(w, "max_lr", objects_.number("initial_lr").value_or(lr));
  put_real(w, "min_lr", 0.0);
  put_real(w, "lr", lr);
  w.text("betas");
  if (const auto betas = objects_.value("betas"))
    TRY(pickle::write_value(w, *betas));
  else
    w.none();
  put_real(w, "eps", objects_.number("eps").value_or(0));
  put_real(w, "weight_decay", objects_.number("weight_decay").value_or(0) * wd_mult);
  for (const std::string_view word : {"bias_correction", "decoupled_weight_decay"}) put_flag(w, word, true);
  for (const std::string_view word : {"amsgrad", "maximize", "capturable", "differentiable"}) put_flag(w, word, false);
  for (const std::string_view word : {"foreach", "fused"}) {
    w.text(word);
    w.none();
  }
  put_integer(w, "step", objects_.step());
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
  put_real(w, "max_lr", objects_.number("initial_lr").value_or(objects_.number("lr").value_or(0)));
  put_real(w, "min_lr", 0.0);
  put_integer(w, "lr_warmup_steps", 0);
  put_integer(w, "num_steps", 0);
  put_text(w, "lr_decay_style", "constant");
  put_integer(w, "lr_decay_steps", 1);
  for (const std::string_view word : {"start_wd", "end_wd"})
    put_real(w, word, objects_.number("weight_decay").value_or(0));
  put_text(w, "wd_incr_style", "constant");
  put_integer(w, "wd_incr_steps", 1);
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
