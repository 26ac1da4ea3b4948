// SPDX-License-Identifier: Apache-2.0
// A universal checkpoint, written as ds_to_universal.py makes one (deepspeed/checkpoint/ds_to_universal.py), for an
// engine of any number of ranks and of ZeRO 1, 2 or 3 ("load_universal": true):
//
//   latest_universal                                "global_step10_universal"
//   global_step10_universal/
//     zero/NAME/{fp32, exp_avg, exp_avg_sq}.pt      {"param": tensor}
//     zero/NAME/step.pt                             ZeRO 1 and 2 take the step from here
//     zero/optimizer_state.pt                       the groups; ZeRO 3 takes the step from here
//     mp_rank_00_model_states.pt                    names, shapes, counters, and what was not trained; a placeholder
//                                                   for every other weight, as the engine takes the masters
//     zero_pp_rank_0_mp_rank_00_model_states.pt     the same, for ZeRO 3
#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "formats/deepspeed/deepspeed.h"
#include "formats/deepspeed/file_set.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "formats/tensor_files/adam_state.h"
#include "formats/tensor_files/target.h"
#include "lib/base/text.h"
#include "lib/device/crc32.h"

namespace reshard::deepspeed {
namespace {

using pickle::PickleWriter;

constexpr std::string_view kVersion = "0.16.9";  // the release of DeepSpeed whose files these resemble
constexpr std::string_view kGlobalSteps = "global_steps", kGlobalSamples = "global_samples";

// The counters of an engine, and the options of its groups.
struct Training {
  std::optional<AdamObjects> adam;  // nothing if only weights are written
  Index steps() const { return adam ? adam->count(kGlobalSteps).value_or(adam->step()) : 0; }
  Index samples() const { return adam ? adam->count(kGlobalSamples).value_or(0) : 0; }
};

// The trained parameters, which have optimizer states, and the frozen ones. Without optimizer states none is frozen.
struct Parameters {
  std::vector<TargetTensor> trained, frozen;
};

// Returns a file with a tensor of one number.
std::string number_file(float value) {
  const Bytes bytes = std::as_bytes(std::span(&value, 1));
  torch_archive::Item item(DType::kFloat32, {}, 0);
  item.set_crc(crc32(0, bytes));
  return item.header() + std::string(reinterpret_cast<const char*>(&value), sizeof value) + item.trailer();
}

// Writes a group of the optimizer: the source's options under torch's names.
Status write_group(PickleWriter& w, const AdamObjects& adam, const AdamObjects::Values& group, bool decays, Index g) {
  pickle::Dict out(w);
  constexpr std::array<std::string_view, 4> kWords = {"lr", "betas", "eps", "weight_decay"};
  for (const auto& [word, value] : group) {  // other options of the source's optimizer: amsgrad, bias_correction
    if (word == "step" || word == "params" || std::find(kWords.begin(), kWords.end(), word) != kWords.end()) continue;
    TRY(out.value(word, value));
  }
  for (const std::string_view word : kWords) {
    const auto own = group.find(word);
    const auto value = own != group.end() ? std::optional(own->second) : adam.value(word);
    if (word == "weight_decay" && !decays)
      out.number(word, 0.0);
    else if (value)
      TRY(out.value(word, *value));
    else
      out.none(word);
  }
  const pickle::List params(out.key("params"));
  w.integer(g);
  return {};
}

// Writes the groups. An engine takes them one by one, so there are at least two, for a run that separates parameters
// with and without weight decay.
Status write_groups(pickle::Dict& optimizer, const Training& run) {
  std::vector<const AdamObjects::Values*> groups;
  for (const auto& [name, group] : run.adam->groups())
    if (is_digits(name.substr(name.rfind('.') + 1))) groups.push_back(&group);
  const bool has_split = groups.size() > 1;
  static const AdamObjects::Values kNone;
  groups.resize(std::max<std::size_t>(groups.size(), 2), &kNone);
  PickleWriter& w = optimizer.key("param_groups");
  const pickle::List list(w);
  for (std::size_t g = 0; g < groups.size(); ++g) TRY(write_group(w, *run.adam, *groups[g], has_split || g == 0, g));
  return {};
}

Status write_optimizer(PickleWriter& w, const Training& run) {
  pickle::Dict out(w);
  out.text("ds_version", kVersion);
  out.number("clip_grad", 0.0);
  if (!run.adam) return {};
  TRY(write_groups(out, run));
  pickle::Dict optimizer(out.key("optimizer_state_dict"));
  {
    pickle::Dict states(optimizer.key("state"));
    pickle::Dict(states.key(0)).integer("step", run.adam->step());
  }
  return write_groups(optimizer, run);
}

Result<std::string> optimizer_file(const Training& run) {
  PickleWriter w;
  TRY(write_optimizer(w, run));
  return torch_archive::object_item(std::move(w).finish());
}

void write_shapes(pickle::Dict shapes, const std::vector<TargetTensor>& parameters) {
  for (const TargetTensor& t : parameters) {
    PickleWriter& w = shapes.key(t.name);
    w.global("torch", "Size");
    w.integers(t.shape.span());
    w.tuple_of_last(1);
    w.reduce();
  }
}

// Writes the module. A trained parameter is a placeholder; `write_frozen` writes frozen parameter i (null: frozen ones
// are left out).
void write_model(PickleWriter& w, const Training& run, const Parameters& parameters,
                 const std::function<void(PickleWriter& w, const TargetTensor& t)>& write_placeholder,
                 const std::function<void(PickleWriter& w, std::size_t i)>& write_frozen) {
  pickle::Dict out(w);
  {
    pickle::Dict module = pickle::Dict::ordered(out.key("module"));
    for (const TargetTensor& t : parameters.trained) write_placeholder(module.key(t.name), t);
    for (std::size_t i = 0; write_frozen && i < parameters.frozen.size(); ++i)
      write_frozen(module.key(parameters.frozen[i].name), i);
  }
  {
    PickleWriter& groups = out.key("param_shapes");
    const pickle::List list(groups);
    write_shapes(pickle::Dict::ordered(groups), parameters.trained);
  }
  out.key("buffer_names").empty_list();
  write_shapes(pickle::Dict(out.key("frozen_param_shapes")), parameters.frozen);
  for (const std::string_view name : {"shared_params", "frozen_param_fragments", "ds_config"})
    out.key(name).empty_dict();
  for (const std::string_view name : {"optimizer", "lr_scheduler", "data_sampler", "random_ltd"}) out.none(name);
  out.integer("skipped_steps", 0);
  out.integer(kGlobalSteps, run.steps());
  out.integer(kGlobalSamples, run.samples());
  out.integer("dp_world_size", 1);
  out.integer("mp_world_size", 1);
  out.text("ds_version", kVersion);
}

// Returns the model states without frozen parameters.
std::string model_file(const Training& run, const Parameters& parameters) {
  PickleWriter w;
  write_model(
      w, run, parameters,
      [](PickleWriter& to, const TargetTensor& t) { torch_archive::append_placeholder(to, t.dtype); }, nullptr);
  std::set<DType> dtypes;
  for (const TargetTensor& t : parameters.trained) dtypes.insert(t.dtype);
  return torch_archive::object_item(std::move(w).finish(), std::vector<DType>(dtypes.begin(), dtypes.end()));
}

Status add_to_catalog(TensorFilesTarget& target, const TargetTensor& t, const Extent& extent) {
  Tensor tensor;
  tensor.name = t.name;
  tensor.dtype = t.dtype;
  tensor.shape = t.shape;
  tensor.fragments = FragmentList(t.shape.rank());
  tensor.fragments.add(whole(t.shape), extent);
  return target.catalog().add(std::move(tensor));
}

// Returns the model states with frozen parameters, which have no optimizer states. An engine that resumes from a
// universal checkpoint takes them from the base model; other programs take them from here.
Status add_model_file(TensorFilesTarget& target, const std::string& name, const Training& run,
                      const Parameters& parameters) {
  std::vector<FileTensor> stored;
  for (const TargetTensor& t : parameters.frozen) stored.push_back({t.name, t.dtype, t.shape, {}});
  torch_archive::Content content;
  PickleWriter w;
  write_model(
      w, run, parameters,
      [&](PickleWriter& to, const TargetTensor& t) {
        torch_archive::append_tensor(to, t.dtype, {0}, std::to_string(stored.size() + content.storages.size()));
        content.storages.emplace_back();
      },
      [&](PickleWriter& to, std::size_t i) {
        torch_archive::append_tensor(to, stored[i].dtype, stored[i].shape, std::to_string(i));
      });
  content.pickle = std::move(w).finish();
  const auto extents = TRY(target.add_archive(name, stored, std::move(content)));
  for (std::size_t i = 0; i < extents.size(); ++i) TRY(add_to_catalog(target, parameters.frozen[i], extents[i]));
  return {};
}

}  // namespace

bool takes_object(std::string_view key) {
  return AdamObjects::is_hyperparameter(key) ||
         (take(key, "extra_state.") && (key == kGlobalSteps || key == kGlobalSamples));
}

Result<std::unique_ptr<Target>> lay_out_universal(LayoutRequest request) {
  if (request.mesh.ranks() != 1)
    return unsupported("a universal checkpoint holds whole tensors: expected a mesh of one rank, got " +
                       request.mesh.to_string());
  Training run;
  const bool has_states = TRY(has_adam(request, "DeepSpeed", Frozen::kAllowed));
  if (has_states) run.adam = TRY(AdamObjects::read(request.blobs, request.step, "DeepSpeed"));
  const std::string tag = "global_step" + std::to_string(run.steps()) + "_universal", top = tag + "/";
  const std::string zero = top + std::string(kUniversalDirectory) + "/";
  auto target = std::make_unique<TensorFilesTarget>();
  Parameters parameters;
  std::set<std::string> trained;
  for (const TargetTensor& t : request.tensors)
    if (const StateKey key = split_state_key(t.name); key.kind == StateKind::kOptimizer) trained.insert(key.parameter);
  for (const TargetTensor& t : request.tensors) {
    const StateKey key = split_state_key(t.name);
    const bool is_frozen = has_states && !trained.contains(key.parameter);
    if (key.kind != StateKind::kOptimizer) (is_frozen ? parameters.frozen : parameters.trained).push_back(t);
    if (key.kind != StateKind::kOptimizer && has_states) continue;  // the master replaces it
    if (key.parameter.find('/') != std::string::npos || key.parameter.starts_with("."))
      return unsupported(tensor_text(key.parameter) + ": is the name of a directory in a universal checkpoint");
    const bool is_weight = key.kind != StateKind::kOptimizer || key.suffix == kMasterSuffix;
    const std::string file = zero + key.parameter + "/" + (is_weight ? "fp32" : key.suffix.substr(1)) + ".pt";
    const auto extents = TRY(target->add_file(file, Container::kTorchSave, {{"param", t.dtype, t.shape, {}}}));
    TRY(add_to_catalog(*target, t, extents.front()));
  }
  if (run.adam)
    for (const TargetTensor& t : parameters.trained)
      target->add_text(zero + t.name + "/step.pt", number_file(static_cast<float>(run.adam->step())));
  target->add_text(zero + "optimizer_state.pt", TRY(optimizer_file(run)));
  const std::string of_all = top + "mp_rank_00_model_states.pt";
  if (parameters.frozen.empty())
    target->add_text(of_all, model_file(run, parameters));
  else
    TRY(add_model_file(*target, of_all, run, parameters));
  target->add_text(top + "zero_pp_rank_0_mp_rank_00_model_states.pt", model_file(run, parameters));
  target->add_text(std::string(kLatestUniversalFile), tag);
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace reshard::deepspeed
