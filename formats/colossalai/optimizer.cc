// SPDX-License-Identifier: Apache-2.0
// Reads ColossalAI's optimizer: the states of numbered parameters, in shards with an index or in one file, and the
// groups.
#include <algorithm>

#include "formats/colossalai/reader.h"
#include "formats/encoding/weight_index.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/layout/stages.h"

namespace reshard::colossalai {
namespace {

constexpr std::size_t kMaxGroupOptions = 64;  // each option becomes a value for each parameter
constexpr Index kMaxGroupValues = 2'000'000;
constexpr Index kMaxId = 999'999'999;

// The parsed name "state.12.exp_avg" or "12.exp_avg".
std::optional<std::pair<Index, std::string>> parse_state_name(std::string_view name) {
  take(name, "state.");
  const auto id = take_number(name);
  if (!id || *id > kMaxId || !take(name, ".") || name.empty()) return std::nullopt;
  return std::pair(*id, std::string(name));
}

// Returns whether a state is a moment, which has the shape of its parameter.
bool is_moment(std::string_view key) { return key == "exp_avg" || key == "exp_avg_sq" || key == "momentum_buffer"; }

}  // namespace

// Reads the parameters of the model in the usual place, for an optimizer that was opened alone.
Status ColossalaiReader::read_neighbour(const PathSnapshot& opened) {
  const bool is_file = !tree_.optimizer_file.empty();
  if (!is_file && base_name(tree_.root) != kOptimizer) return {};
  const IoFailureWatch watch;
  const auto around = (is_file ? opened : *tree_.place).parent();
  const auto modeling = around ? (*around)->inside(kModeling) : Result<const PathSnapshot*>(around.error());
  if (!modeling) return watch.may_be_io_failure(modeling.error()) ? modeling.error() : Status();
  ColossalaiReader model;
  model.options_ = {.files_too = false, .validated = false};
  const auto read = [&](const PathSnapshot& root, const std::string& file) -> Status {
    model.tree_.place = &root;
    model.tree_.root = model.catalog_.root = root.path();
    if (file.empty()) return model.open_model();
    TRY(model.read_model_file({file, {}}));
    model.list_parameters();
    return {};
  };
  neighbour_ = (*modeling)->path();
  Status done = (*modeling)->is_directory() ? read(**modeling, "") : Status(io_error("none"));
  for (const std::string_view file : {"model.bin", "model.safetensors", "pytorch_model.bin"}) {
    if (done || !is_file || !(*around)->has_file(file)) continue;
    neighbour_ = path_join((*around)->path(), file);
    done = read(**around, std::string(file));
  }
  if (!done || model.is_partial()) {
    neighbour_.clear();
    return !done && watch.may_be_io_failure(done.error()) ? std::move(done) : Status();
  }
  parameters_ = std::move(model.parameters_);
  is_ordered_ = model.is_ordered_;
  is_untied_ = model.is_untied_;
  return {};
}

Status ColossalaiReader::add_groups(pickle::Value list, std::uint32_t file) {
  if (list.kind() != pickle::Kind::kList) return list.mismatch("param_groups", "a list");
  for (std::size_t g = 0; g < list.size(); ++g) {
    if (list[g].kind() != pickle::Kind::kDict) return list[g].mismatch("param_groups", "dicts");
    if (list[g].size() > kMaxGroupOptions)
      return list[g].mismatch("param_groups", "at most " + std::to_string(kMaxGroupOptions) + " options");
    Group group;
    group.file = file;
    for (std::size_t i = 0; i < list[g].size(); ++i) {
      const auto key = list[g].key(i).as_string();
      const pickle::Value value = list[g].value(i);
      if (!key) return list[g].key(i).mismatch("param_groups", "names as keys");
      if (*key != "params") {
        group.options.emplace_back(*key, value);
        continue;
      }
      for (std::size_t k = 0; k < value.size(); ++k) {
        const auto id = value[k].as_int();
        if (!id || *id < 0) return value[k].mismatch("param_groups: params", "an id of 0 or more");
        if (!grouped_ids_.insert(*id).second) return value[k].mismatch("param_groups: params", "an id of one group");
        group.ids.push_back(*id);
      }
    }
    values_of_groups_ += std::ssize(group.ids) * std::ssize(group.options);
    if (values_of_groups_ > kMaxGroupValues)
      return list[g].mismatch("param_groups", "at most " + with_commas(kMaxGroupValues) + " options of all parameters");
    groups_.push_back(std::move(group));
  }
  return {};
}

Status ColossalaiReader::read_optimizer_file(const std::string& name) {
  const auto opened = TRY(open_if_whole(below(tree_.optimizer, name), options_));
  if (!opened) return {};
  const OpenFile& open = *opened;
  const std::string path = catalog_.file_path(open.file);
  const auto add = [&](const std::string& key, State state) -> Status {
    auto parsed = parse_state_name(key);
    if (!parsed) return corrupt(path + ": expected states of parameter ids, got '" + printable(key) + "'");
    if (state.tensor != nullptr) state_bytes_ += bytes_of(*state.tensor);
    const auto mapped = mapped_ids_.find(std::to_string(parsed->first));
    state.is_copy = mapped != mapped_ids_.end() && mapped->second != name;
    state.key = std::move(parsed->second);
    states_[parsed->first].push_back(std::move(state));
    return {};
  };
  const auto root = open.content->root();
  // The file of groups is a list; an unsharded file has them next to the states.
  if (root && root->kind() == pickle::Kind::kList) return add_groups(*root, open.file);
  const bool is_whole = root && root->find("param_groups");
  if (is_whole) TRY(add_groups(*root->find("param_groups"), open.file));
  const auto is_of_groups = [](std::string_view key) {
    return key == "param_groups" || key.starts_with("param_groups.");
  };
  for (const TensorFile::Entry& e : open.content->tensors())
    if (!is_of_groups(e.name)) TRY(add(e.name, State{"", open.file, &e.tensor, std::nullopt, false}));
  for (const TensorFile::Object& o : open.content->objects()) {
    if (!is_of_groups(o.name)) {
      TRY(add(o.name, State{"", open.file, nullptr, o.value, false}));
    } else if (!is_whole) {
      TRY(add_groups(o.value, open.file));
    }
  }
  return {};
}

Status ColossalaiReader::open_optimizer() {
  if (!tree_.optimizer_file.empty()) {
    TRY(read_optimizer_file(tree_.optimizer_file));
    return add_optimizer();
  }
  const PathSnapshot& place = *TRY(place_at(tree_.optimizer));
  const std::string& directory = place.path();
  const auto unread = [&](const std::string& why) {
    warn("The optimizer's state is not read: " + why);
    return Status();
  };
  constexpr std::string_view kHint =
      ". ColossalAI's save of a tensor-parallel optimizer fails if the vocabulary is not a multiple of its padding "
      "(\"The parameter isn't evenly distributed among tensor parallel group\"), and up to 0.4.7 the model that it "
      "wrote before then lacks rows: compare the embedding with the config's vocab_size.";
  if (!place.is_directory()) {
    const std::string why = "there is no " + std::string(kOptimizer) +
                            "/: this is a final model, or its save failed there" + std::string(kHint);
    if (is_step_name(base_name(tree_.root))) return unread(why);
    catalog_.notes.push_back("The optimizer's state is not read: " + why);
    return {};
  }
  const PartFiles there = files_of(place, Part::kOptimizer);
  std::vector<std::string> names, unnamed;
  std::string groups(kGroupFile);
  std::optional<double> total_size;
  if (there.indexes.empty()) {
    const std::string single = single_file(place, Part::kOptimizer);
    if (single.empty() && there.shards.empty())
      return unread((tree_.optimizer.empty() ? "the directory" : tree_.optimizer + "/") +
                    " contains no optimizer files" + std::string(kHint));
    if (single.empty())
      return unread("there is no index next to " + names_text(there.shards, "shard") +
                    ": its save was interrupted, or failed" + std::string(kHint));
    names.push_back(single);
  } else if (there.indexes.size() > 1) {
    return unread("expected one index, got " + names_text(there.indexes, "file"));
  } else {
    const WeightIndex index = TRY(WeightIndex::read(path_join(directory, there.indexes.front())));
    catalog_.metadata_files.push_back(below(tree_.optimizer, there.indexes.front()));
    names = index.files();
    if (!index.param_groups().empty()) groups = index.param_groups();
    if (const auto total = index.total_size().as_double()) total_size = *total;
    for (const WeightIndex::Entry& e : index.entries()) mapped_ids_.emplace(e.name, e.file);
    for (const std::string& shard : there.shards)
      if (!std::binary_search(names.begin(), names.end(), shard)) unnamed.push_back(shard);
  }
  std::vector<std::string> gone;
  for (const std::string& name : names)
    if (!TRY(path_exists(path_join(directory, name)))) gone.push_back(name);
  if (!gone.empty()) return unread(names_text(gone, "missing shard"));
  for (const std::string& name : names) TRY(read_optimizer_file(name));
  const auto is_indexed = [&](const std::string& name) {
    const auto state = parse_state_name(name);
    return state && mapped_ids_.contains(std::to_string(state->first));
  };
  for (const std::string& name : TRY(counted_shards(tree_.optimizer, unnamed, is_indexed, state_bytes_, total_size)))
    TRY(read_optimizer_file(name));
  if (TRY(has_file(path_join(directory, groups)))) {
    TRY(read_optimizer_file(groups));
  } else if (groups_.empty()) {
    warn(below(tree_.optimizer, groups) +
         " is missing, so the optimizer's learning rates and other options are unknown");
  }
  return add_optimizer();
}

// Adds the states and groups to the catalog, under the names of the parameters if they are known.
Status ColossalaiReader::add_optimizer() {
  std::set<Index> all;
  for (const auto& [id, states] : states_) all.insert(id);
  std::vector<std::vector<Index>> groups;
  for (const Group& group : groups_) {
    all.insert(group.ids.begin(), group.ids.end());
    groups.push_back(group.ids);
  }
  std::vector<ParameterId> ids;
  for (const Index id : all) {
    const auto states = states_.find(id);
    ParameterId parameter{id, std::nullopt, states == states_.end()};
    if (!parameter.is_fresh)
      for (const State& s : states->second)
        if (s.tensor != nullptr && is_moment(s.key)) parameter.shape = s.tensor->shape();
    ids.push_back(parameter);
  }
  const ParameterNames names = names_of(ids, groups);
  std::map<Index, std::string> name_of;
  for (std::size_t i = 0; i < ids.size(); ++i)
    name_of[ids[i].id] = names.names.empty() ? std::to_string(ids[i].id) : names.names[i];
  const std::string evidence = names.evidence + (neighbour_.empty() ? "" : "; the model is " + neighbour_);
  if (!names.names.empty()) {
    catalog_.attributes.emplace_back("optimizer ids", evidence);
  } else if (!states_.empty()) {
    warn("The optimizer's states are named by their ids (optimizer.state.0.exp_avg): " + evidence);
  }
  if (states_.empty() && !is_partial())
    catalog_.notes.emplace_back("The optimizer has no state yet: it was saved before its first step.");
  TRY(add_states(name_of));
  for (const Group& group : groups_)
    for (const Index id : group.ids)
      for (const auto& [option, value] : group.options) {
        const std::string inner = "param_groups." + name_of[id] + "." + option;
        TRY(add_object("optimizer." + inner, {"optimizer", inner}, group.file, value));
      }
  note_fused(name_of);
  return {};
}

// A tied model with several pipeline stages has the embedding twice, the second time as the head, and one id for both.
ParameterNames ColossalaiReader::names_of(const std::vector<ParameterId>& ids,
                                          const std::vector<std::vector<Index>>& groups) const {
  const NameOrder order = is_ordered_ ? NameOrder::kByStage : NameOrder::kSorted;
  ParameterNames names = name_parameters(parameters_, order, ids, groups);
  const auto is_outside = [](const NamedShape& p) { return p.shape.rank() == 2 && layer_number(p.name) < 0; };
  const auto embedding = std::find_if(parameters_.begin(), parameters_.end(), is_outside);
  const auto head = std::find_if(parameters_.rbegin(), parameters_.rend(), is_outside);
  if (!names.names.empty() || parameters_.size() != ids.size() + 1 || embedding == parameters_.end() ||
      &*embedding == &*head || embedding->shape != head->shape || is_untied_)
    return names;
  std::vector<NamedShape> own;
  for (const NamedShape& p : parameters_)
    if (&p != &*head) own.push_back(p);
  ParameterNames without = name_parameters(own, order, ids, groups);
  if (without.names.empty()) return names;
  without.evidence += "; " + printable(head->name) + " is tied to " + printable(embedding->name);
  return without;
}

// Adds the states. ZeRO leaves the moments of experts flat; in the order of the file they are the parameter's elements.
Status ColossalaiReader::add_states(std::map<Index, std::string>& name_of) {
  std::unordered_map<std::string_view, const Dims*> shapes;
  for (const NamedShape& p : parameters_) shapes.emplace(p.name, &p.shape);
  const auto unflattened = [&](Index id, const State& s) {
    StoredTensor stored = *s.tensor;
    const auto shape = shapes.find(name_of[id]);
    if (shape == shapes.end() || !is_moment(s.key) || stored.shape().rank() != 1 || stored.strides[0] != 1 ||
        volume(*shape->second) != stored.shape()[0])
      return stored;
    stored.box = whole(*shape->second);
    stored.strides = row_major_strides(*shape->second);
    return stored;
  };
  const auto inner_name = [&](Index id, const State& s) { return "state." + name_of[id] + "." + s.key; };
  const auto add = [&](Index id, const State& s) -> Status {
    const std::string inner = inner_name(id, s), name = "optimizer." + inner;
    KeyPath path = {"optimizer", inner};
    return s.tensor != nullptr ? add_tensor(name, std::move(path), s.file, unflattened(id, s))
                               : add_object(name, std::move(path), s.file, *s.value);
  };
  for (const auto& [id, states] : states_) {
    const bool has_own = std::any_of(states.begin(), states.end(), [](const State& s) { return !s.is_copy; });
    for (const State& s : states) {
      if (!s.is_copy || !has_own) {
        TRY(add(id, s));
      } else if (s.tensor != nullptr) {
        copies_.push_back({"optimizer." + inner_name(id, s), s.file, unflattened(id, s)});
      }
    }
  }
  return add_copies();
}

// Warns about moments of fused layers. ColossalAI gathers them as if the layer were not fused: with several ranks, the
// sections of query, key and value are interleaved by rank (checkpoint_io/utils.py calls gather_distributed_param for
// the parameter but not for its states). The number of ranks is not recorded.
void ColossalaiReader::note_fused(const std::map<Index, std::string>& name_of) {
  std::vector<std::string> fused;
  for (const auto& [id, states] : states_)
    if (const std::string& name = name_of.at(id); name.find(".attn.c_attn.") != std::string::npos)
      fused.push_back(name);
  if (!fused.empty())
    catalog_.notes.push_back(
        "If the run was tensor-parallel, the moments of fused layers are ordered differently from their parameters: "
        "ColossalAI "
        "joins them rank by rank, and the number of ranks is not recorded. " +
        names_text(fused, "parameter") + ".");
}

}  // namespace reshard::colossalai
