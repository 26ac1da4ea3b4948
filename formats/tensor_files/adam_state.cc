// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/adam_state.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "formats/encoding/torch_archive.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

using pickle::Value;

constexpr std::array<std::string_view, 3> kStates = {kMomentSuffix, kSecondMomentSuffix, kMasterSuffix};
constexpr std::string_view kExtraState = "extra_state.";
constexpr std::string_view kWithout = "; add --exclude 'optim*' to leave the optimizer out";

constexpr std::string_view kGroups = ".param_groups.";

// Returns whether a key is a parameter's own step count.
bool is_step(const StateKey& key) { return key.prefix.ends_with(".state.") && key.suffix == kStepSuffix; }

std::optional<double> number_of(const Value& value) {
  if (const auto n = value.as_int()) return static_cast<double>(*n);
  return value.as_float();
}

std::optional<Index> whole_number(const Value& value) {
  const auto n = number_of(value);
  return n && *n >= 0 && *n < 1e15 && *n == std::floor(*n) ? std::optional(static_cast<Index>(*n)) : std::nullopt;
}

}  // namespace

Result<bool> has_adam(const LayoutRequest& request, std::string_view title, Frozen frozen) {
  std::map<std::string, std::size_t> states;
  bool is_there = false;
  for (const TargetTensor& t : request.tensors) {
    const StateKey key = split_state_key(t.name);
    const bool is_state = key.kind == StateKind::kOptimizer;
    if (is_state && std::find(kStates.begin(), kStates.end(), key.suffix) == kStates.end())
      return unsupported(tensor_text(t.name) + ": " + std::string(title) + " has no such state of a parameter");
    states[key.parameter] += is_state;
    is_there = is_there || is_state;
  }
  std::vector<std::string> without;
  for (const auto& [name, count] : states)
    if (count != kStates.size() && (count > 0 || frozen == Frozen::kRefused))
      without.push_back("'" + printable(name) + "'");
  if (is_there && !without.empty())
    return unsupported("the optimizer has no moments, or no master, of " + some_of(without) + ": " +
                       std::string(title) + " loads either the state of all parameters or no state" +
                       std::string(kWithout));
  return is_there;
}

bool AdamObjects::is_hyperparameter(std::string_view key) {
  const StateKey parts = split_state_key(key);
  return parts.prefix.ends_with(kGroups) || is_step(parts);
}

Status AdamObjects::add(const TargetBlob& blob) {
  const StateKey key = split_state_key(blob.name);
  const bool is_of_group = key.prefix.ends_with(kGroups);
  std::string_view word = blob.name;
  if (is_of_group)
    word = std::string_view(key.suffix).substr(1);
  else if (!take(word, kExtraState) && !is_step(key))
    return {};
  if (word == "params") return {};
  if (blob.bytes.find_first_not_of('\0') == std::string::npos) {
    is_unread_ = true;
    return {};
  }
  documents_.push_back(
      TRY(torch_archive::read_object_item(blob.bytes).context("object '" + printable(blob.name) + "'")));
  if (!is_of_group && is_step(key)) {
    const auto counted = whole_number(documents_.back().root());
    documents_.pop_back();
    if (counted_ && counted != counted_)
      return unsupported("object '" + printable(blob.name) + "': expected " + count_of(*counted_, "step") +
                         ", as other parameters have, got another number" + std::string(kWithout));
    counted_ = counted;
    return {};
  }
  (is_of_group ? groups_[key.prefix + key.parameter] : others_)
      .insert_or_assign(std::string(word), documents_.back().root());
  return {};
}

Result<AdamObjects> AdamObjects::read(std::span<const TargetBlob> blobs, std::optional<Index> step,
                                      std::string_view title) {
  AdamObjects out;
  for (const TargetBlob& blob : blobs) TRY(out.add(blob));
  if (!step) step = out.counted_;
  for (const auto& [name, group] : out.groups_)
    if (const auto counted = group.find("step"); !step && counted != group.end()) step = whole_number(counted->second);
  if (!step && !out.is_unread_)
    return unsupported("the source does not record how many steps the optimizer has done, which " + std::string(title) +
                       " counts" + std::string(kWithout));
  std::vector<std::string> absent;
  for (const std::string_view word : {"lr", "betas", "eps", "weight_decay"})
    if (!out.value(word)) absent.emplace_back(word);
  if (!absent.empty() && !out.is_unread_)
    return unsupported("the optimizer's groups have no " + join(absent, ", ") + ", which " + std::string(title) +
                       " takes from the checkpoint when a run resumes" + std::string(kWithout));
  out.step_ = step.value_or(0);
  return out;
}

const AdamObjects::Values* AdamObjects::decaying() const {
  for (const auto& [name, group] : groups_)
    if (const auto decay = group.find("weight_decay");
        decay != group.end() && number_of(decay->second).value_or(0) != 0)
      return &group;
  return groups_.empty() ? nullptr : &groups_.begin()->second;
}

std::optional<Value> AdamObjects::value(std::string_view word) const {
  const Values* group = decaying();
  if (!group) return std::nullopt;
  const auto found = group->find(word);
  return found == group->end() ? std::nullopt : std::optional(found->second);
}

std::optional<double> AdamObjects::number(std::string_view word) const {
  const auto found = value(word);
  return found ? number_of(*found) : std::nullopt;
}

std::optional<Index> AdamObjects::count(std::string_view name) const {
  const auto found = others_.find(name);
  return found == others_.end() ? std::nullopt : whole_number(found->second);
}

}  // namespace reshard
