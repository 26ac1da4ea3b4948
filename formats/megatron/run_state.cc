// SPDX-License-Identifier: Apache-2.0
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
// The members that identify a group when a run resumes (param_group_identifier_keys).
constexpr std::array<std::string_view, 2> kDecay = {"wd_mult", "pre_wd_mult"};
constexpr std::string_view kOfExperts = "is_expert_parallel", kStep = "step";

// Returns whether a group that Megatron wrote has weight decay.
bool decays(const AdamObjects::Values& group) {
  for (const std::string_view word : kDecay)
    if (const auto found = group.find(word); found != group.end())
      return found->second.as_float().value_or(static_cast<double>(found->second.as_int().value_or(0))) != 0;
  return false;
}

// Matches "opt_param_scheduler.max_lr": in files of ranks each number is an object.
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
  args.set("no_save_optim", false);
}

// Returns the groups that Megatron wrote for this optimizer. A group for all parameters belongs to both.
std::vector<const RunState::Values*> RunState::own_groups(OptimizerScope of) const {
  std::vector<const Values*> experts, others;
  for (const auto& [name, group] : objects_.groups()) {
    const auto found = group.find(kOfExperts);
    const bool is_theirs = found != group.end() && found->second.as_bool().value_or(false);
    (is_theirs ? experts : others).push_back(&group);
  }
  if (of != OptimizerScope::kExperts) return others;
  if (!experts.empty()) return experts;
  std::erase_if(others, [](const Values* group) { return !decays(*group); });
  return others;
}

Status RunState::write_group(PickleWriter& w, const Values& group, const Own& own) const {
  const auto step = group.find(kStep);  // kept unchanged if it equals the parameters' step: Megatron's may be 1.0
  const bool keeps_step = own.with_step && step != group.end() &&
                          step->second.as_float().value_or(static_cast<double>(step->second.as_int().value_or(-1))) ==
                              static_cast<double>(objects_.step());
  pickle::Dict out(w);
  for (const auto& [word, value] : group)
    if ((word != kStep || keeps_step) && word != kOfExperts) TRY(out.value(word, value));
  Own others = own;
  others.with_step = own.with_step && !keeps_step;
  write_own(out, others);
  return {};
}

void RunState::write_own(pickle::Dict& group, const Own& own) const {
  group.flag(kOfExperts, own.of_experts);
  if (own.with_step) group.integer(kStep, objects_.step());
  if (!own.params) return;
  PickleWriter& w = group.key("params");
  w.empty_list();
  pickle::ElementRuns elements(w, &PickleWriter::append_items);
  for (const Index id : *own.params) {
    elements.next();
    w.integer(id);
  }
  elements.end();
}

// Writes a group as Megatron makes it: matrices have weight decay (`wd_mult` 1), norms and biases have none.
Status RunState::write_new_group(PickleWriter& w, double wd_mult, const Own& own) const {
  const double lr = objects_.number("lr").value_or(0);
  pickle::Dict group(w);
  group.flag("default_config", true);
  group.number("wd_mult", wd_mult);
  group.number("lr_mult", 1.0);
  group.flag("is_decoupled_lr", false);
  group.number("max_lr", objects_.number("initial_lr").value_or(lr));
  group.number("min_lr", 0.0);
  group.number("lr", lr);
  if (const auto betas = objects_.value("betas"))
    TRY(group.value("betas", *betas));
  else
    group.none("betas");
  group.number("eps", objects_.number("eps").value_or(0));
  group.number("weight_decay", objects_.number("weight_decay").value_or(0) * wd_mult);
  for (const std::string_view word : {"bias_correction", "decoupled_weight_decay"}) group.flag(word, true);
  for (const std::string_view word : {"amsgrad", "maximize", "capturable", "differentiable"}) group.flag(word, false);
  for (const std::string_view word : {"foreach", "fused"}) group.none(word);
  write_own(group, own);
  return {};
}

Status RunState::write_groups(pickle::Dict& optimizer, OptimizerScope of) const {
  const bool of_experts = of == OptimizerScope::kExperts;
  PickleWriter& w = optimizer.key("param_groups");
  const pickle::List groups(w);
  if (has_own_groups())
    for (const Values* group : own_groups(of)) TRY(write_group(w, *group, {of_experts}));
  else
    for (const double wd_mult : {1.0, 0.0})
      if (wd_mult > 0 || !of_experts) TRY(write_new_group(w, wd_mult, {of_experts}));
  return {};
}

Status RunState::write_groups(pickle::Dict& optimizer, OptimizerScope of, const std::vector<std::vector<Index>>& params,
                              bool with_step) const {
  std::vector<const Values*> own = has_own_groups() ? own_groups(of) : std::vector<const Values*>();
  std::stable_partition(own.begin(), own.end(), [](const Values* group) { return decays(*group); });
  const bool fits = own.size() == params.size() && decays(*own.front()) && (own.size() < 2 || !decays(*own.back()));
  if (has_own_groups() && !fits)
    return unsupported("the optimizer has " + count_of(std::ssize(own), "group") +
                       "; supported are two, one of matrices and one of norms and biases; "
                       "add --exclude 'optim*' to leave the optimizer out");
  PickleWriter& w = optimizer.key("param_groups");
  const pickle::List groups(w);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Own with{of == OptimizerScope::kExperts, params[i], with_step};
    TRY(has_own_groups() ? write_group(w, *own[i], with) : write_new_group(w, i == 0 ? 1.0 : 0.0, with));
  }
  return {};
}

Status RunState::write_schedule(PickleWriter& w) const {
  if (const auto own = objects_.others().find(kSchedule); own != objects_.others().end())
    return pickle::write_value(w, own->second);
  pickle::Dict schedule(w);
  bool is_known = false;
  for (const auto& [name, value] : objects_.others()) {
    std::string_view word = name;
    if (!take(word, kSchedule) || !take(word, ".")) continue;
    TRY(schedule.value(word, value));
    is_known = true;
  }
  if (is_known) return {};
  schedule.number("max_lr", objects_.number("initial_lr").value_or(objects_.number("lr").value_or(0)));
  schedule.number("min_lr", 0.0);
  schedule.integer("lr_warmup_steps", 0);
  schedule.integer("num_steps", 0);
  schedule.text("lr_decay_style", "constant");
  schedule.integer("lr_decay_steps", 1);
  for (const std::string_view word : {"start_wd", "end_wd"})
    schedule.number(word, objects_.number("weight_decay").value_or(0));
  schedule.text("wd_incr_style", "constant");
  schedule.integer("wd_incr_steps", 1);
  return {};
}

Status RunState::write_progress(pickle::Dict& state) const {
  state.integer(kIteration, iteration());
  if (const auto flops = objects_.others().find("num_floating_point_operations_so_far");
      flops != objects_.others().end())
    TRY(state.value(flops->first, flops->second));
  return write_schedule(state.key(kSchedule));
}

}  // namespace reshard::megatron
