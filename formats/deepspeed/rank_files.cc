// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/rank_files.h"

#include <unordered_set>

#include "formats/encoding/pickle_writer.h"
#include "lib/base/text.h"

namespace reshard::deepspeed {
namespace {

using pickle::Kind;
using pickle::Value;

// Limits for lists, which may contain the same container many times.
constexpr std::size_t kMaxStates = 32;              // for one group; Adam has three
constexpr Index kMaxNumbers = Index{1} << 22;       // for paddings and ids; a parameter has a few
constexpr Index kMaxOptionBytes = Index{16} << 20;  // for all parameter groups, pickled

Result<Value> member(Value dict, std::string_view name) {
  const auto found = dict.find(name);
  if (!found) return dict.mismatch("'" + std::string(name) + "'", "that member");
  return *found;
}

// Returns a member, or nothing if it is missing or None.
std::optional<Value> optional_member(Value dict, std::string_view name) {
  const auto found = dict.find(name);
  return found && !found->is_none() ? found : std::nullopt;
}

Result<Index> read_count(Value v, std::string_view what) {
  const auto n = v.as_int();
  if (!n || *n < 0) return v.mismatch(what, "a number of 0 or more");
  return *n;
}

Result<std::optional<Index>> optional_count(Value dict, std::string_view name) {
  const auto v = optional_member(dict, name);
  if (!v) return std::optional<Index>();
  return std::optional(TRY(read_count(*v, name)));
}

Result<std::string> text_of(Value v, std::string_view what) {
  const auto text = v.as_string();
  if (!text) return v.mismatch(what, "a name");
  return std::string(*text);
}

Result<std::vector<Index>> read_counts(Value v, std::string_view what, Index most = kMaxNumbers) {
  if (!v.is_sequence()) return v.mismatch(what, "a list of numbers");
  if (std::ssize(v) > most) return v.mismatch(what, "fewer numbers");
  std::vector<Index> out;
  for (std::size_t i = 0; i < v.size(); ++i) out.push_back(TRY(read_count(v[i], what)));
  return out;
}

// ---- model states

Result<std::vector<Group>> read_groups(Value list) {
  constexpr std::string_view kWhat = "param_shapes";
  if (!list.is_sequence()) return list.mismatch(kWhat, "a list of groups");
  std::vector<Group> out;
  std::unordered_set<std::string_view> names;  // a hostile file may contain the same group many times
  for (std::size_t g = 0; g < list.size(); ++g) {
    const Value shapes = list[g];
    if (shapes.kind() != Kind::kDict) return shapes.mismatch(kWhat, "names and shapes");
    out.emplace_back();
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const auto name = shapes.key(i).as_string();
      if (!name) return shapes.key(i).mismatch(kWhat, "a name");
      if (!names.insert(*name).second)
        return shapes.mismatch("param_shapes: '" + printable(*name) + "'", "a parameter in one group");
      const Dims shape = TRY(read_shape(shapes.value(i), "param_shapes"));
      out.back().push_back({std::string(*name), shape});
    }
  }
  return out;
}

// Returns a tensor's name below `section`, or nothing if it is elsewhere.
std::optional<std::string> name_below(const TensorFile::Entry& entry, std::string_view section) {
  if (entry.path.size() < 2 || entry.path[0] != KeyPath::value_type(std::string(section))) return std::nullopt;
  return entry.name.substr(section.size() + 1);
}

// ---- optimizer states

Result<std::optional<Index>> read_stage(Value dict) {
  const auto v = optional_member(dict, "zero_stage");
  if (!v) return std::optional<Index>();
  if (v->kind() != Kind::kObject) return std::optional(TRY(read_count(*v, "zero_stage")));
  if (!v->is_object("deepspeed.runtime.zero.config", "ZeroStageEnum") || v->args().size() != 1)
    return v->mismatch("zero_stage", "a ZeroStageEnum");
  return std::optional(TRY(read_count(v->args()[0], "zero_stage")));
}

Result<StoredTensor> read_vector(const TorchFile& file, Value v, std::string_view what) {
  if (!makes_torch_tensor(v)) return v.mismatch(what, "a tensor");
  StoredTensor out = TRY(file.resolve(v).context(what));
  if (out.shape().rank() != 1 || (out.shape()[0] > 1 && out.strides[0] != 1))
    return corrupt(file.place() + ": " + std::string(what) + ": expected a vector, got " + to_string(out.shape()));
  return out;
}

Status read_state(const TorchFile& file, Value dict, std::size_t g, GroupState& out) {
  if (dict.kind() != Kind::kDict) return dict.mismatch(group_text(g) + ": state", "a dict");
  if (dict.size() > kMaxStates)
    return dict.mismatch(group_text(g) + ": state", "at most " + std::to_string(kMaxStates) + " states");
  for (std::size_t i = 0; i < dict.size(); ++i) {
    const std::string name = TRY(text_of(dict.key(i), group_text(g) + ": state"));
    const std::string what = group_text(g) + ": " + printable(name);
    const Value v = dict.value(i);
    if (makes_torch_tensor(v)) {
      StoredTensor tensor = TRY(file.resolve(v).context(what));
      if (tensor.shape().rank() > 0) tensor = TRY(read_vector(file, v, what));
      out.tensors.insert_or_assign(name, tensor);
      continue;
    }
    pickle::PickleWriter w;
    if (!v.as_int() && !v.as_float()) continue;
    TRY(pickle::write_value(w, v));
    out.values.insert_or_assign(name, std::move(w).finish());
  }
  return {};
}

// Reads {0: {...}, 1: {...}}, or a list in elastic checkpoints.
Status read_group_states(const TorchFile& file, Value states, std::vector<GroupState>& groups) {
  if (!states.is_sequence() && states.kind() != Kind::kDict) return states.mismatch("state", "a dict of groups");
  for (std::size_t i = 0; i < states.size(); ++i) {
    const bool has_keys = states.kind() == Kind::kDict;
    const Index g = has_keys ? TRY(read_count(states.key(i), "state: a group")) : static_cast<Index>(i);
    if (g >= std::ssize(groups))
      return states.mismatch("state of group " + std::to_string(g), "one of " + count_of(std::ssize(groups), "group"));
    const std::size_t n = g;
    TRY(read_state(file, has_keys ? states.value(i) : states[i], n, groups[n]));
  }
  return {};
}

Result<std::vector<std::vector<Slice>>> read_slices(Value list) {
  constexpr std::string_view kWhat = "param_slice_mappings";
  if (!list.is_sequence()) return list.mismatch(kWhat, "a list of groups");
  std::vector<std::vector<Slice>> out;
  std::unordered_set<std::string_view> names;
  for (std::size_t g = 0; g < list.size(); ++g) {
    const Value group = list[g];
    if (group.kind() != Kind::kDict) return group.mismatch(kWhat, "names and addresses");
    out.emplace_back();
    for (std::size_t i = 0; i < group.size(); ++i) {
      const auto name = group.key(i).as_string();
      if (!name || !names.insert(*name).second) return group.mismatch(kWhat, "each parameter once");
      const Value address = group.value(i).state();
      if (address.kind() != Kind::kDict) return group.value(i).mismatch(kWhat, "a fragment_address");
      const Index start = TRY(read_count(TRY(member(address, "start")), "start"));
      const Index length = TRY(read_count(TRY(member(address, "numel")), "numel"));
      out.back().push_back({std::string(*name), start, length});
    }
  }
  return out;
}

// Returns the number of experts in one of AutoEP's layers. `numbers_left` limits the lists of all layers. Fails
// (unsupported) unless each rank has a run of them, in the order of ranks.
Result<Index> read_experts(Value layer, const std::string& path, Index& numbers_left) {
  const Index count = TRY(read_count(TRY(member(layer, "num_experts")), "num_experts"));
  const auto placement = optional_member(layer, "expert_placement");
  const auto ranks = placement ? optional_member(*placement, "ranks") : std::nullopt;
  Index next = 0;
  for (std::size_t r = 0; ranks && ranks->is_sequence() && r < ranks->size(); ++r) {
    --numbers_left;
    const auto experts = TRY(read_counts(TRY(member((*ranks)[r], "experts")), "experts", numbers_left));
    numbers_left -= std::ssize(experts);
    for (const Index expert : experts)
      if (expert != next++)
        return unsupported(path + ": expert_placement: expected equal runs of experts in the order of ranks");
  }
  return count;
}

// Finds the parameters of param_shapes that are experts. `layers`: the number of experts, by what the names of their
// parameters begin with.
Status find_stacked_experts(const std::map<std::string, Index>& layers, const std::string& path, ModelStates& states) {
  for (const Group& group : *states.groups)
    for (const NamedShape& p : group) {
      const auto after = layers.upper_bound(p.name);
      if (after == layers.begin() || !p.name.starts_with(std::prev(after)->first)) continue;
      const Index count = std::prev(after)->second;
      if (p.shape.rank() == 0 || volume(p.shape) == 0 || count % p.shape[0] != 0)
        return corrupt(path + ": param_shapes: '" + printable(p.name) + "': expected an equal part of " +
                       count_of(count, "expert") + ", got " + to_string(p.shape));
      states.stacked_experts.emplace(p.name, count);
    }
  return {};
}

// Finds the second names of a layer's router: the layer has its module `router` also under the name that the model gave
// it. `names` are those of the module.
void find_router_aliases(const std::string& layer, const std::set<std::string_view>& names, ModelStates& states) {
  for (auto name = names.lower_bound(layer); name != names.end() && name->starts_with(layer); ++name) {
    const std::size_t dot = name->find('.', layer.size());
    if (dot == std::string_view::npos || name->substr(layer.size(), dot - layer.size()) == "router") continue;
    const std::string router = layer + "router" + std::string(name->substr(dot));
    if (names.contains(router)) states.shared.emplace(*name, router);
  }
}

// Reads AutoEP's list of dicts, one for each layer with experts (module_inject/auto_ep_layer.py).
Status read_autoep_layers(Value list, const std::string& path, ModelStates& states) {
  constexpr std::string_view kWhat = "ds_autoep_layers";
  if (!list.is_sequence()) return list.mismatch(kWhat, "a list of layers");
  std::set<std::string_view> names;
  for (const NamedTensor& t : states.module) names.insert(t.name);
  std::map<std::string, Index> experts;
  std::set<std::string> layers;
  Index numbers_left = kMaxNumbers;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string prefix = TRY(text_of(TRY(member(list[i], "expert_key_prefix")), "expert_key_prefix")) + ".";
    const std::string layer = TRY(text_of(TRY(member(list[i], "module_path")), "module_path")) + ".";
    if (experts.contains(prefix) || !layers.insert(layer).second) return list.mismatch(kWhat, "each layer once");
    experts.emplace(prefix, TRY(read_experts(list[i], path, numbers_left)));
    find_router_aliases(layer, names, states);
  }
  return states.groups ? find_stacked_experts(experts, path, states) : Status();
}

}  // namespace

Result<Dims> read_shape(Value v, const std::string& what) {
  if (v.kind() != Kind::kTuple) return v.mismatch(what, "a shape");
  if (v.size() > std::size_t{kMaxRank}) return v.mismatch(what, "at most " + std::to_string(kMaxRank) + " dimensions");
  Dims out;
  for (std::size_t i = 0; i < v.size(); ++i) out.push_back(TRY(read_count(v[i], what)));
  const auto elements = checked_volume(out);
  if (!elements || !checked_mul(*elements, 8)) return v.mismatch(what, "a shape of less than 2^60 elements");
  return out;
}

Result<ModelStates> read_model_states(const TensorFile& file, const std::string& path) {
  const auto root = file.root();
  if (!root || root->kind() != Kind::kDict || !root->find("module"))
    return corrupt(path + ": expected DeepSpeed's model states, a dict with 'module'");
  ModelStates out;
  const Value module = TRY(member(*root, "module"));
  out.has_module = !module.is_none();
  if (out.has_module && module.kind() != Kind::kDict) return module.mismatch("module", "a dict of tensors");
  for (const TensorFile::Entry& entry : file.tensors()) {
    if (auto name = name_below(entry, "module")) out.module.push_back({std::move(*name), entry.tensor});
    if (auto name = name_below(entry, "frozen_param_fragments")) out.frozen.push_back({std::move(*name), entry.tensor});
  }
  if (const auto groups = optional_member(*root, "param_shapes")) out.groups = TRY(read_groups(*groups));
  if (const auto frozen = optional_member(*root, "frozen_param_shapes")) {
    if (frozen->kind() != Kind::kDict) return frozen->mismatch("frozen_param_shapes", "names and shapes");
    for (std::size_t i = 0; i < frozen->size(); ++i)
      out.frozen_shapes.insert_or_assign(TRY(text_of(frozen->key(i), "frozen_param_shapes")),
                                         TRY(read_shape(frozen->value(i), "frozen_param_shapes")));
  }
  if (const auto shared = optional_member(*root, "shared_params")) {
    if (shared->kind() != Kind::kDict) return shared->mismatch("shared_params", "a dict of names");
    for (std::size_t i = 0; i < shared->size(); ++i)
      out.shared.insert_or_assign(TRY(text_of(shared->key(i), "shared_params")),
                                  TRY(text_of(shared->value(i), "shared_params")));
  }
  if (const auto layers = optional_member(*root, "ds_autoep_layers")) TRY(read_autoep_layers(*layers, path, out));
  if (const auto buffers = optional_member(*root, "buffer_names"); buffers && buffers->is_sequence())
    for (std::size_t i = 0; i < buffers->size(); ++i) out.buffers.insert(TRY(text_of((*buffers)[i], "buffer_names")));
  out.steps = TRY(optional_count(*root, "global_steps"));
  out.dp_ranks = TRY(optional_count(*root, "dp_world_size"));
  out.mp_ranks = TRY(optional_count(*root, "mp_world_size"));
  if (const auto degrees = optional_member(*root, "checkpoint_parallel_dimensions");
      degrees && degrees->kind() == Kind::kDict)
    out.stages = TRY(optional_count(*degrees, "pp_degree"));
  if (const auto info = optional_member(*root, "universal_checkpoint_info"))
    out.tensor_parallel = TRY(read_tensor_parallel_info(*info));
  if (const auto experts = optional_member(*root, "num_experts"); experts && experts->is_sequence())
    out.experts = TRY(read_counts(*experts, "num_experts"));
  if (const auto version = optional_member(*root, "ds_version"))
    out.version = printable(version->as_string().value_or(""));
  return out;
}

Result<std::vector<ParameterGroup>> read_parameter_groups(Value list, std::set<std::string>& left_out) {
  if (!list.is_sequence()) return list.mismatch("param_groups", "a list of dicts");
  std::vector<ParameterGroup> out;
  Index bytes_left = kMaxOptionBytes, ids_left = kMaxNumbers;
  for (std::size_t g = 0; g < list.size(); ++g) {
    const Value group = list[g];
    if (group.kind() != Kind::kDict) return group.mismatch("param_groups", "a dict");
    ParameterGroup& to = out.emplace_back();
    for (std::size_t i = 0; i < group.size(); ++i) {
      const std::string name = TRY(text_of(group.key(i), "param_groups"));
      const Value v = group.value(i);
      bytes_left -= std::ssize(name) + 1;
      if (bytes_left < 0) return list.mismatch("param_groups", "options of at most " + human_bytes(kMaxOptionBytes));
      if (name == "params") {
        ids_left -= std::ssize(v);
        if (ids_left < 0) return list.mismatch("param_groups", "fewer parameters");
        if (v.is_sequence())
          for (std::size_t k = 0; k < v.size(); ++k)
            if (const auto id = v[k].as_int()) to.ids.push_back(*id);
        continue;
      }
      pickle::PickleWriter w;
      if (pickle::write_value(w, v, bytes_left)) {
        bytes_left -= w.size();
        to.options.emplace_back(name, std::move(w).finish());
      } else {
        left_out.insert("optimizer.param_groups." + std::to_string(g) + "." + printable(name));
      }
    }
  }
  return out;
}

Result<OptimizerStates> read_optimizer_states(const TorchFile& file, const std::string& path, bool with_slices) {
  const Value root = file.root();
  const auto top = root.kind() == Kind::kDict ? root.find("optimizer_state_dict") : std::nullopt;
  if (!top || top->kind() != Kind::kDict)
    return corrupt(path + ": expected DeepSpeed's optimizer states, a dict with 'optimizer_state_dict'");
  OptimizerStates out;
  out.stage = TRY(read_stage(*top));
  const auto by_parameter = optional_member(*top, "fp32_flat_groups");
  out.cuts_parameters = by_parameter.has_value();
  const auto masters = by_parameter ? by_parameter : optional_member(*top, "single_partition_of_fp32_groups");
  if (!masters || !masters->is_sequence())
    return corrupt(path + ": expected 'single_partition_of_fp32_groups' or 'fp32_flat_groups', the vectors of ZeRO; " +
                   "states of other optimizers are not supported");
  for (std::size_t g = 0; g < masters->size(); ++g) {
    out.groups.emplace_back();
    out.groups.back().master = TRY(read_vector(file, (*masters)[g], group_text(g) + ": " + "fp32"));
  }
  const Value base = TRY(member(*top, by_parameter ? "optimizer_state_dict" : "base_optimizer_state"));
  if (base.kind() == Kind::kDict) {
    if (const auto states = optional_member(base, "state")) TRY(read_group_states(file, *states, out.groups));
    if (const auto groups = optional_member(base, "param_groups"))
      out.param_groups = TRY(read_parameter_groups(*groups, out.left_out));
  } else {
    TRY(read_group_states(file, base, out.groups));
  }
  if (const auto counts = optional_member(*top, "partition_count"))
    out.partition_counts = counts->is_sequence() ? TRY(read_counts(*counts, "partition_count"))
                                                 : std::vector<Index>{TRY(read_count(*counts, "partition_count"))};
  if (const auto groups = optional_member(*top, "ds_zero_partition_groups"); groups && groups->is_sequence()) {
    out.partition_counts.clear();
    for (std::size_t g = 0; g < groups->size(); ++g)
      out.partition_counts.push_back(TRY(read_count(TRY(member((*groups)[g], "partition_count")), "partition_count")));
  }
  if (const auto paddings = optional_member(*top, "param_alignment_paddings")) {
    if (!paddings->is_sequence() || paddings->size() > out.groups.size())
      return paddings->mismatch("param_alignment_paddings", "a list for each group");
    Index left = kMaxNumbers;
    for (std::size_t g = 0; g < paddings->size(); ++g) {
      out.paddings.push_back(TRY(read_counts((*paddings)[g], "param_alignment_paddings", left)));
      left -= std::ssize(out.paddings.back());
    }
  }
  if (const auto slices = with_slices ? optional_member(*top, "param_slice_mappings") : std::nullopt)
    out.slices = TRY(read_slices(*slices));
  return out;
}

}  // namespace reshard::deepspeed
