// SPDX-License-Identifier: Apache-2.0
// Reads an optimizer's states in DeepSpeed's three forms: vectors of ranks, torch's own, a universal checkpoint.
#include <algorithm>

#include "formats/deepspeed/flat_states.h"
#include "formats/deepspeed/reader.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/tensor_files/flat_runs.h"
#include "formats/tensor_files/parameter_ids.h"
#include "formats/tensor_files/parameter_lists.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard::deepspeed {
namespace {

constexpr std::string_view kMasterFile = "fp32";
constexpr std::string_view kStateFile = ".pt";

}  // namespace

bool OptimizerGroups::add(Index stage, const std::vector<ParameterGroup>& groups,
                          const std::vector<FlatParameter>& parameters) {
  if (stage < stages) return false;
  stages = stage + 1;
  if (options.empty()) options = groups;
  names.resize(options.size());
  for (std::size_t g = 0; g < std::min(options.size(), groups.size()); ++g) {
    const std::set<Index> ids(groups[g].ids.begin(), groups[g].ids.end());
    for (const FlatParameter& p : parameters)
      if (ids.contains(p.group)) names[g].push_back(p.parameter.name);
  }
  return true;
}

// Sets the number of data-parallel ranks: what the model states say, or that of the files.
Status DeepspeedReader::count_ranks() {
  for (const auto& [number, states] : models_)
    if (states.dp_ranks) ranks_ = std::max(ranks_, *states.dp_ranks);
  if (ranks_ == 0)
    for (const auto& [number, name] : set_.optimizers) ranks_ = std::max(ranks_, number.second + 1);
  if (ranks_ == 0 || ranks_ > kMaxMeshRanks)
    return corrupt(catalog_.root + ": dp_world_size: expected up to " + with_commas(kMaxMeshRanks) + " ranks, got " +
                   with_commas(ranks_));
  return {};
}

Status DeepspeedReader::read_optimizers() {
  TRY(count_ranks());
  if (set_.is_universal) return read_universal();
  if (set_.optimizers.empty() && !has_rank_models()) return read_without_rank_files();
  for (const auto& [number, states] : models_)
    if (tensor_ranks_ > 1 && !states.groups)
      return unsupported(catalog_.root +
                         ": optimizer states of tensor-parallel ranks without param_shapes: it is unknown how " +
                         "their parts join");
  OptimizerGroups groups;
  for (Index part = 0; part < parts(); ++part) {
    TRY(check_ranks(set_, part, ranks_));
    const auto model = models_.lower_bound({part, -1});
    if (model == models_.end() || model->first.first != part) continue;  // it cannot be read
    if (const auto ranks = TRY(read_ranks_of(part, model->second)))
      TRY(add_states_of_part(part, model->second, *ranks, groups));
  }
  for (std::size_t g = 0; g < groups.options.size(); ++g)
    TRY(add_parameter_group(g, groups.options[g], model_files_.begin()->second, groups.names[g]));
  return {};
}

// Reads the optimizer of a checkpoint without files of optimizer states.
Status DeepspeedReader::read_without_rank_files() {
  const bool has_zero = first().groups.has_value();
  catalog_.lacks_optimizer = has_zero;
  optimizer_ = has_zero ? "without its optimizer states" : "without ZeRO";
  if (has_zero)
    warn(
        "There are no files of optimizer states (zero_pp_rank_0_mp_rank_00_optim_states.pt and so on): masters "
        "and moments are missing");
  return read_plain_optimizer();
}

// Reads the optimizer states of a part, those of each data-parallel rank. A rank whose file cannot be read gets a copy
// of another rank's states that is marked as a stand-in. Returns nothing if no file can be read.
Result<std::optional<std::vector<RankStates>>> DeepspeedReader::read_ranks_of(Index part, const ModelStates& model) {
  std::vector<std::string> files;
  for (Index rank = 0; rank < ranks_; ++rank) files.push_back(set_.optimizers.at({part, rank}));
  auto read = TRY(read_files<RankStates>(files, [&](const File& file, std::uint32_t number) -> Result<RankStates> {
    const TorchFile content = TRY(TorchFile::open(file, 0, TRY(file.size())));
    OptimizerStates states = TRY(read_optimizer_states(content, file.path(), !model.groups));
    RankStates out{file.path(), std::move(states)};
    for (GroupState& group : out.states.groups) {
      if (group.master) group.master->extent.file = number;
      for (auto& [name, tensor] : group.tensors) tensor.extent.file = number;
    }
    return out;
  }));
  const auto whole = std::find_if(read.begin(), read.end(), [](const auto& rank) { return rank.has_value(); });
  if (whole == read.end()) return std::optional<std::vector<RankStates>>();
  std::optional<RankStates> stand_in;
  if (is_partial()) stand_in = {(*whole)->path, (*whole)->states, true};
  std::vector<RankStates> out;
  for (auto& rank : read) out.push_back(rank ? *std::move(rank) : *stand_in);
  return std::optional(std::move(out));
}

// Adds the states of a part's parameters to the weights, and the part's groups to `groups`.
Status DeepspeedReader::add_states_of_part(Index part, const ModelStates& model, const std::vector<RankStates>& ranks,
                                           OptimizerGroups& groups) {
  TRY(check_stage(set_, part, ranks));
  TRY(check_steps(files_, ranks));
  std::map<std::string, Dims> shapes;
  if (!model.groups)
    for (const auto& [name, weight] : weights_)
      if (weight.stored) shapes.emplace(name, weight.stored->shape);
  const auto parameters =
      TRY(model.groups ? find_parameters(ranks, *model.groups, model.stacked_experts) : find_parameters(ranks, shapes));
  TRY(add_parameters(ranks, parameters, part % tensor_ranks_));
  const OptimizerStates& states = ranks[0].states;  // all ranks have the same options
  optimizer_ = states.stage             ? "ZeRO " + std::to_string(*states.stage)
               : states.cuts_parameters ? "ZeRO 3"
                                        : "BF16_Optimizer";
  if (groups.add(part / tensor_ranks_, states.param_groups, parameters))
    left_out_.insert(states.left_out.begin(), states.left_out.end());
  return {};
}

// Sets the dtype of a weight that has no placeholder in the module: that of the module's first parameter.
void DeepspeedReader::take_dtype_of_module(Weight& weight) {
  if (first().module.empty()) return;
  weight.dtype = first().module.front().tensor.dtype;
  weight.computes = true;
}

Status DeepspeedReader::add_parameters(const std::vector<RankStates>& ranks,
                                       const std::vector<FlatParameter>& parameters, Index part) {
  std::vector<std::string> without_weights;
  for (const FlatParameter& p : parameters) {
    if (unplaced_.contains(p.parameter.name)) continue;
    const auto known = weights_.find(p.parameter.name);
    if (known == weights_.end()) {
      const std::size_t dot = p.parameter.name.find('.');
      const auto layer = as_number(p.parameter.name.substr(0, dot));
      if (!set_.layers.empty() && layer && !set_.has_layer(*layer))
        return io_error(catalog_.root + ": missing '" + set_.directory + "layer_" + (*layer < 10 ? "0" : "") +
                        std::to_string(*layer) + "-model_states.pt', the weights of a layer that has optimizer states");
      if (!p.is_expert || !has_rank_models()) without_weights.push_back(p.parameter.name);
    }
    Weight& weight = known == weights_.end() ? weights_[p.parameter.name] : known->second;
    if (p.is_expert && has_rank_models()) take_dtype_of_module(weight);
    const auto joined = joined_.find(p.parameter.name);
    const bool is_joined = joined != joined_.end();
    if (tensor_ranks_ > 1 && !is_joined)
      return corrupt(catalog_.root + ": " + tensor_text(p.parameter.name) + ": optimizer states of a parameter that " +
                     "tensor-parallel ranks do not have");
    if (weight.master && (!is_joined || part == 0))
      return corrupt(catalog_.root + ": " + tensor_text(p.parameter.name) + ": two parts have optimizer states of it");
    if (!is_joined && weight.stored && weight.stored->shape != p.parameter.shape)
      return corrupt(catalog_.root + ": " + tensor_text(p.parameter.name) + ": param_shapes has " +
                     to_string(p.parameter.shape) + ", the module " + to_string(weight.stored->shape));
    const auto add = [&](std::optional<Tensor>& to, Tensor tensor) {
      if (is_joined)
        add_part(to, tensor, joined->second, part, false);
      else
        to = std::move(tensor);
    };
    add(weight.master, TRY(join(p, ranks, std::string(kMasterState), [&](const OptimizerStates& states) {
          const auto& master = states.groups[p.group].master;
          return master ? &*master : nullptr;
        })));
    has_masters_ = true;
    const std::size_t holder = p.runs.empty() ? 0 : p.runs.front().rank;
    const GroupState& group = ranks[holder].states.groups[p.group];
    for (const auto& [name, tensor] : group.tensors) {
      const std::string& state = name;
      const auto earlier =
          std::find_if(weight.states.begin(), weight.states.end(), [&](const Tensor& t) { return t.name == state; });
      if (tensor.shape().rank() > 0) {
        std::optional<Tensor> whole;
        if (earlier != weight.states.end()) whole = *earlier;
        add(whole, TRY(join(p, ranks, name, [&](const OptimizerStates& states) -> const StoredTensor* {
              const auto& tensors = states.groups[p.group].tensors;
              const auto found = tensors.find(state);
              return found == tensors.end() ? nullptr : &found->second;
            })));
        if (earlier != weight.states.end())
          *earlier = *std::move(whole);
        else
          weight.states.push_back(*std::move(whole));
        continue;
      }
      if (earlier != weight.states.end()) continue;
      Tensor scalar;  // a step, which every parameter gets
      scalar.name = name;
      scalar.dtype = tensor.dtype;
      scalar.fragments.add(tensor);
      weight.states.push_back(std::move(scalar));
    }
    weight.values.assign(group.values.begin(), group.values.end());
  }
  if (!without_weights.empty() && !is_partial())
    warn("Parameters with optimizer states that are in no module: " + names_text(without_weights, "parameter"));
  return {};
}

// Adds the options of a group and the names of its parameters.
Status DeepspeedReader::add_parameter_group(std::size_t g, const ParameterGroup& group, std::uint32_t file,
                                            const std::vector<std::string>& names) {
  const auto add = [&](const std::string& option, std::string value) {
    return add_pickled("optimizer.param_groups." + std::to_string(g) + "." + option,
                       {"optimizer", "param_groups", static_cast<Index>(g), option}, file, std::move(value));
  };
  for (const auto& option : group.options) TRY(add(option.first, option.second));
  return add("params", pickled_names(names));
}

// The content of a file of a universal checkpoint: a state of a parameter, as a tensor or a value.
struct UniversalState {
  std::string parameter, name;
  std::optional<StoredTensor> tensor;
  std::string value;  // pickled, if it is not a tensor
};

Result<std::vector<std::optional<UniversalState>>> DeepspeedReader::read_universal_states() {
  std::vector<std::string> files;
  std::vector<std::pair<std::string, std::string>> owners;
  for (const std::string& parameter : universal_)
    for (const DirectoryEntry& e : TRY(list_directory(path_join(catalog_.root, universal_path(parameter))))) {
      if (e.is_directory || !e.name.ends_with(kStateFile)) continue;
      files.push_back(universal_path(parameter) + "/" + e.name);
      owners.emplace_back(parameter, e.name.substr(0, e.name.size() - kStateFile.size()));
    }
  const auto base = static_cast<std::uint32_t>(catalog_.files.size());
  return read_files<UniversalState>(files, [&](const File& file, std::uint32_t number) -> Result<UniversalState> {
    const auto& [parameter, name] = owners[number - base];
    UniversalState out{parameter, name, {}, {}};
    const TensorFile content = TRY(TensorFile::open(file));
    for (const TensorFile::Entry& entry : content.tensors())
      if (entry.name == "param" || entry.name == "value") out.tensor = entry.tensor;
    if (out.tensor) {
      out.tensor->extent.file = number;
      return out;
    }
    const auto root = content.root();
    pickle::PickleWriter w;
    if (!root || (!root->as_int() && !root->as_float()) || !pickle::write_value(w, *root))
      return corrupt(file.path() + ": expected a tensor, alone or as 'param', or a number");
    out.value = std::move(w).finish();
    return out;
  });
}

// Adds a state. `shapes` are those of the parameters in param_shapes.
Status DeepspeedReader::add_universal_state(const UniversalState& state, const std::map<std::string, Dims>& shapes) {
  Weight& weight = weights_[state.parameter];
  if (!state.tensor) {
    weight.values.emplace_back(state.name, state.value);
    return {};
  }
  const StoredTensor& stored = *state.tensor;
  const auto shape = shapes.find(state.parameter);
  const bool is_flat = stored.shape().rank() == 1 && shape != shapes.end() && shape->second.rank() != 1;
  Tensor tensor;
  tensor.name = state.name == kMasterFile ? kMasterState : std::string_view(state.name);
  tensor.dtype = stored.dtype;
  tensor.shape = is_flat ? shape->second : stored.shape();
  tensor.fragments = tensor.replicas = FragmentList(tensor.shape.rank());
  if (!is_flat) {
    tensor.fragments.add(stored);
  } else if (volume(tensor.shape) != stored.shape()[0] || (stored.shape()[0] > 1 && stored.strides[0] != 1)) {
    return corrupt(catalog_.file_path(stored.extent.file) + ": expected the numbers of " + to_string(tensor.shape) +
                   " as in param_shapes, got " + to_string(stored.shape()));
  } else {
    for (const Fragment& fragment : fragments_of_run(tensor.shape, 0, volume(tensor.shape), stored, 0))
      tensor.fragments.add(fragment);
  }
  if (state.name != kMasterFile) {
    weight.states.push_back(std::move(tensor));
    return {};
  }
  weight.master = std::move(tensor);
  has_masters_ = true;
  return {};
}

// Reads the options of the groups. `groups` are the names of the parameters in each group of param_shapes.
Status DeepspeedReader::read_universal_options(const std::vector<std::vector<std::string>>& groups) {
  const std::string options = set_.directory + std::string(kUniversalDirectory) + "/optimizer_state.pt";
  if (!TRY(path_exists(path_join(catalog_.root, options)))) return {};
  const auto read = TRY(read_files<std::vector<ParameterGroup>>(
      {options}, [&](const File& file, std::uint32_t) -> Result<std::vector<ParameterGroup>> {
        const TorchFile content = TRY(TorchFile::open(file, 0, TRY(file.size())));
        const auto list = content.root().find("param_groups");
        if (!list) return std::vector<ParameterGroup>();
        return read_parameter_groups(*list, left_out_);
      }));
  const std::vector<ParameterGroup> own = read[0].value_or(std::vector<ParameterGroup>());
  for (std::size_t g = 0; g < own.size(); ++g) {
    std::vector<std::string> names;
    const std::set<Index> ids(own[g].ids.begin(), own[g].ids.end());
    for (const Index id : ids)
      if (id >= 0 && id < std::ssize(groups)) {
        const auto& of = groups[id];
        names.insert(names.end(), of.begin(), of.end());
      }
    TRY(add_parameter_group(g, own[g], model_files_.begin()->second, names));
  }
  return {};
}

// Reads a universal checkpoint: a directory for each parameter, with a file for each state. States of ZeRO 3 have lost
// their shape.
Status DeepspeedReader::read_universal() {
  if (has_rank_models()) TRY(check_ranks(set_, 0, ranks_));
  const auto states = TRY(read_universal_states());
  std::map<std::string, Dims> shapes;
  std::vector<std::vector<std::string>> groups;
  for (const auto& [number, model] : models_) {
    if (number.second > 0 || !model.groups) continue;
    groups.resize(std::max(groups.size(), model.groups->size()));
    for (std::size_t g = 0; g < model.groups->size(); ++g)
      for (const NamedShape& p : (*model.groups)[g]) {
        if (!universal_.contains(p.name))
          return io_error(catalog_.root + ": missing '" + printable(universal_path(p.name)) +
                          "', the states of a parameter that param_shapes names");
        if (shapes.emplace(p.name, p.shape).second) groups[g].push_back(p.name);
      }
  }
  for (const auto& state : states)
    if (state) TRY(add_universal_state(*state, shapes));
  for (const std::string& parameter : universal_) {
    if (!weights_[parameter].master && !is_partial())
      return io_error(catalog_.root + ": missing '" + printable(universal_path(parameter)) + "/fp32.pt'");
    if (first().stacked_experts.contains(parameter)) take_dtype_of_module(weights_[parameter]);
  }
  optimizer_ = "a universal checkpoint";
  return read_universal_options(groups);
}

// Reads torch's own optimizer in the model states, which exists without ZeRO. Its states are numbered.
Status DeepspeedReader::read_plain_optimizer() {
  const auto root = first_file_->root();
  const auto optimizer = root->find("optimizer");
  if (!optimizer || optimizer->kind() != pickle::Kind::kDict || set_.is_universal) return {};
  if (tensor_ranks_ > 1) {
    warn("The optimizer's states are not read: they are torch's numbered states of several tensor-parallel ranks");
    return {};
  }
  const std::uint32_t file = model_files_.begin()->second;
  const auto groups = optimizer->find("param_groups");
  std::vector<ParameterGroup> options;
  if (groups) options = TRY(read_parameter_groups(*groups, left_out_));
  std::map<Index, std::vector<const TensorFile::Entry*>> states;
  for (const TensorFile::Entry& entry : first_file_->tensors()) {
    if (entry.path.size() != 4 || entry.path[0] != KeyPath::value_type("optimizer") ||
        entry.path[1] != KeyPath::value_type("state"))
      continue;
    const auto* text = std::get_if<std::string>(&entry.path[2]);
    const auto id = text ? as_number(*text) : std::nullopt;
    if (id) states[*id].push_back(&entry);
  }
  std::vector<std::vector<Index>> ids_of_groups;
  std::set<Index> ids;
  for (const ParameterGroup& group : options) {
    if (!group.ids.empty()) ids_of_groups.push_back(group.ids);
    ids.insert(group.ids.begin(), group.ids.end());
  }
  for (const auto& [id, entries] : states) ids.insert(id);
  if (ids.empty() && optimizer->size() > 0)
    warn("The optimizer's states are not read: they are not numbered like torch's (from FP16_Optimizer?)");
  if (ids.empty()) return {};
  std::vector<ParameterId> wanted;
  for (const Index id : ids) {
    ParameterId& to = wanted.emplace_back();
    to.id = id;
    to.is_fresh = !states.contains(id);
    if (!to.is_fresh)
      for (const TensorFile::Entry* entry : states.at(id))
        if (entry->tensor.shape().rank() > 0) to.shape = entry->tensor.shape();
  }
  std::vector<NamedShape> parameters;  // in the model's order, each tied one once
  std::set<std::pair<Index, Index>> places;
  for (const NamedTensor& entry : first().module) {
    const StoredTensor& t = entry.tensor;
    if (first().buffers.contains(entry.name)) continue;
    if (volume(t.shape()) > 0 && !places.emplace(t.extent.offset, t.start).second) continue;
    parameters.push_back({entry.name, t.shape()});
  }
  const ParameterNames named = name_parameters(parameters, NameOrder::kAsDefined, wanted, ids_of_groups);
  if (named.names.empty()) {
    warn("The optimizer's states are not read: " + named.evidence);
    return {};
  }
  std::map<Index, std::string> name_of;
  for (std::size_t i = 0; i < wanted.size(); ++i) name_of[wanted[i].id] = named.names[i];
  for (const auto& [id, entries] : states) {
    Weight& weight = weights_.at(name_of.at(id));
    for (const TensorFile::Entry* entry : entries) {
      Tensor state;
      state.name = std::get<std::string>(entry->path[3]);
      state.dtype = entry->tensor.dtype;
      state.shape = entry->tensor.shape();
      state.fragments = state.replicas = FragmentList(state.shape.rank());
      state.fragments.add(in_file(entry->tensor, file));
      weight.states.push_back(std::move(state));
    }
  }
  for (std::size_t g = 0; g < options.size(); ++g) {
    std::vector<std::string> names;
    for (const Index id : options[g].ids) names.push_back(name_of.at(id));
    TRY(add_parameter_group(g, options[g], file, names));
  }
  return {};
}

}  // namespace reshard::deepspeed
