// SPDX-License-Identifier: Apache-2.0
// Reads the optimizer in per-rank files. It is either "plain", torch's own optimizer with float32 masters next to
// it (megatron/core/optimizer/optimizer.py, Float16OptimizerWithFloat16Params.state_dict), or "distributed": flat
// buffers that the data-parallel ranks shared and that the first of them gathered for the save (distrib_optimizer.py,
// save_parameter_state).
#include <algorithm>

#include "formats/megatron/legacy_reader.h"
#include "formats/tensor_files/flat_runs.h"
#include "formats/tensor_files/parameter_ids.h"
#include "lib/base/text.h"

namespace reshard::megatron {
namespace {

// Returns N of the path [optimizer, ...] KEY, N, KEY, where `rest` is the index of the first KEY; nothing for paths of
// another length or another type.
std::optional<Index> number_after(const KeyPath& path, std::size_t rest) {
  return path.size() == rest + 3 ? number_of(path[rest + 1]) : std::nullopt;
}

// A parameter's place in a flat buffer.
struct BufferPlace {
  Index begin = 0, end = 0;  // in the storage, in elements
  Index at = 0;              // in the buffer
  const LegacyParameter* parameter = nullptr;
};

// Computes where each parameter of a storage is in the buffer. The order is that of the storage; the buffer leaves out
// only what the storage pads at the end of a bucket. Returns nothing if the storage is not laid out like a buffer.
std::optional<std::vector<BufferPlace>> places_in_buffer(const std::vector<const LegacyParameter*>& parameters) {
  std::vector<BufferPlace> places;
  for (const LegacyParameter* p : parameters) {
    const Index size = byte_size(p->stored.dtype);
    if (p->stored.start % size != 0 || p->stored.strides != row_major_strides(p->stored.shape())) return std::nullopt;
    const Index begin = p->stored.start / size;
    places.push_back({begin, begin + volume(p->stored.shape()), 0, p});
  }
  std::sort(places.begin(), places.end(), [](const BufferPlace& a, const BufferPlace& b) { return a.begin < b.begin; });
  Index gap = 0, end = 0;
  for (BufferPlace& place : places) {
    const Index next = checked_round_up(end, kBufferAlignment).value_or(-1);
    if (place.begin < next) return std::nullopt;
    gap += place.begin - next;  // more than alignment: the end of a bucket
    place.at = place.begin - gap;
    end = place.end;
  }
  return places;
}

}  // namespace

std::optional<OptimizerKey> optimizer_key(const KeyPath& path) {
  if (!is_word(path, 0, "optimizer")) return std::nullopt;
  OptimizerKey out;
  out.rest = 1;
  if (path.size() > 1)
    if (const auto n = number_of(path[1])) {
      out.optimizer = *n;
      ++out.rest;
    }
  if (is_word(path, out.rest, "optimizer")) ++out.rest;
  return out;
}

void LegacyReader::leave_out_optimizer(std::string why) {
  if (left_out_.empty()) left_out_ = std::move(why);
}

// ---- Plain

// The entries of one optimizer in a rank's file. A model with experts has two optimizers: of dense parameters, of
// experts.
struct LegacyReader::PlainOptimizer {
  Index number = 0;                               // the optimizer's position in the list of them
  Entries states;                                 // optimizer.state.ID.exp_avg
  Entries masters;                                // fp32_from_fp16_params.GROUP.POSITION
  std::map<Index, ParameterId> by_id;             // with the shapes of the states
  std::map<Index, std::vector<Index>> groups;     // the ids in each parameter group
  bool is_of_experts = false;                     // a group says is_expert_parallel
  std::map<Index, const LegacyParameter*> owner;  // the parameter of each id
};

Status LegacyReader::read_plain_optimizer(const LegacyRank& rank) {
  std::map<Index, PlainOptimizer> optimizers;
  for (const TensorFile::Entry& entry : rank.content->tensors()) {
    const auto key = optimizer_key(entry.path);
    if (!key) continue;
    PlainOptimizer& optimizer = optimizers[key->optimizer];
    optimizer.number = key->optimizer;
    if (is_word(entry.path, key->rest, "state")) optimizer.states.push_back(&entry);
    if (is_word(entry.path, key->rest, "fp32_from_fp16_params")) optimizer.masters.push_back(&entry);
  }
  for (auto& [number, optimizer] : optimizers) {
    if (optimizer.states.empty()) continue;
    find_ids(optimizer);
    find_groups(rank, optimizer);
    if (!find_owners(rank, optimizer, optimizers.size() > 1)) continue;
    TRY(add_states(rank, optimizer));
    TRY(add_masters(rank, optimizer));
  }
  return {};
}

void LegacyReader::find_ids(PlainOptimizer& optimizer) {
  for (const TensorFile::Entry* entry : optimizer.states) {
    const auto id = number_after(entry->path, optimizer_key(entry->path)->rest);
    if (!id) continue;
    ParameterId& known = optimizer.by_id[*id];
    known.id = *id;
    if (entry->tensor.shape().rank() > 0) known.shape = entry->tensor.shape();
  }
}

// Reads the ids of each group, and whether the optimizer is that of the experts.
void LegacyReader::find_groups(const LegacyRank& rank, PlainOptimizer& optimizer) {
  for (const TensorFile::Object& object : rank.content->objects()) {
    const auto key = optimizer_key(object.path);
    if (!key || key->optimizer != optimizer.number || object.path.size() != key->rest + 3 ||
        !is_word(object.path, key->rest, "param_groups"))
      continue;
    const auto group = number_after(object.path, key->rest);
    if (group && is_word(object.path, key->rest + 2, "params"))
      for (std::size_t i = 0; i < object.value.size(); ++i)
        if (const auto id = object.value[i].as_int()) optimizer.groups[*group].push_back(*id);
    if (is_word(object.path, key->rest + 2, "is_expert_parallel"))
      optimizer.is_of_experts = optimizer.is_of_experts || object.value.as_bool().value_or(false);
  }
}

// Finds the parameter of each id by shapes and order. Returns false, and says why, if they leave a doubt.
bool LegacyReader::find_owners(const LegacyRank& rank, PlainOptimizer& optimizer, bool is_one_of_several) {
  std::vector<const LegacyParameter*> own;
  std::vector<NamedShape> shapes;
  for (const LegacyParameter& p : rank.parameters) {
    if (is_one_of_several && p.is_expert != optimizer.is_of_experts) continue;
    shapes.push_back({std::to_string(own.size()), p.stored.shape()});
    own.push_back(&p);
  }
  std::vector<ParameterId> ids;
  for (const auto& [id, known] : optimizer.by_id) ids.push_back(known);
  std::vector<std::vector<Index>> groups;
  for (const auto& [group, list] : optimizer.groups) groups.push_back(list);
  const ParameterNames named = name_parameters(shapes, NameOrder::kAsDefined, ids, groups);
  if (named.names.empty()) {
    leave_out_optimizer(named.evidence);
    return false;
  }
  for (std::size_t i = 0; i < ids.size(); ++i) optimizer.owner[ids[i].id] = own[*parse_number(named.names[i])];
  return true;
}

Status LegacyReader::add_states(const LegacyRank& rank, const PlainOptimizer& optimizer) {
  for (const TensorFile::Entry* entry : optimizer.states) {
    const std::size_t rest = optimizer_key(entry->path)->rest;
    if (const auto id = number_after(entry->path, rest))
      TRY(add_state(rank, *entry, *optimizer.owner.at(*id), name_from(entry->path, rest + 2)));
  }
  return {};
}

// A group's masters are listed in the order of its parameters, without those that are float32 themselves.
Status LegacyReader::add_masters(const LegacyRank& rank, const PlainOptimizer& optimizer) {
  std::map<Index, std::vector<const LegacyParameter*>> with_master;
  for (const auto& [group, list] : optimizer.groups)
    for (const Index id : list)
      if (const auto o = optimizer.owner.find(id);
          o != optimizer.owner.end() && o->second->stored.dtype != DType::kFloat32)
        with_master[group].push_back(o->second);
  for (const TensorFile::Entry* entry : optimizer.masters) {
    const std::size_t rest = optimizer_key(entry->path)->rest;
    const auto group = number_after(entry->path, rest);
    const auto position = group ? number_of(entry->path[rest + 2]) : std::nullopt;
    if (!position || *position < 0 || *position >= std::ssize(with_master[*group])) {
      leave_out_optimizer("no parameter belongs to the master " + printable(entry->name));
      return {};
    }
    TRY(add_state(rank, *entry, *with_master[*group][*position], std::string(kMaster)));
  }
  optimizer_ = "plain: each rank has the state of its own parameters";
  return {};
}

// Adds a state of the parameter `of`. A number (a step) is not cut, whatever the parameter is.
Status LegacyReader::add_state(const LegacyRank& rank, const TensorFile::Entry& entry, const LegacyParameter& of,
                               const std::string& word) {
  const StoredTensor& stored = entry.tensor;
  const std::string where = catalog_.file_path(rank.file) + ": " + tensor_text(entry.name);
  const bool is_number = stored.shape().rank() == 0;
  if (!is_number && stored.shape() != of.stored.shape())
    return corrupt(where + ": expected " + to_string(of.stored.shape()) + " as parameter " + of.name + " has, got " +
                   to_string(stored.shape()));
  LegacyParameter place = of;
  if (is_number) place.cut = {};
  return add_word(place, word, stored.dtype, stored.shape(), {in_file(stored, rank.file)}).context(where);
}

// Adds pieces of a parameter's state `word`; masters become the model's tensors with --weights master.
Status LegacyReader::add_word(const LegacyParameter& of, const std::string& word, DType dtype, const Dims& local,
                              const std::vector<Fragment>& pieces) {
  const bool is_model = takes_masters_ && word == kMaster;
  return add_piece(is_model ? of.name : state_name(of.name, word),
                   is_model ? KeyPath{of.name} : state_path(of.name, word), dtype, of, local, pieces);
}

// ---- Distributed

// The file is {buckets_coalesced: True, 0: {(torch.bfloat16, torch.float32): {param, exp_avg, exp_avg_sq,
// numel_unpadded}}}. Each buffer has the order of the model's parameters, which are views of one storage for each
// buffer.
Status LegacyReader::read_distributed_optimizer(const LegacyRank& rank, const OpenOptions& options) {
  const auto opened = TRY(open_if_whole(path_join(rank.directory, kOptimizerFile), options));
  if (!opened) return {};
  const OpenFile& open = *opened;
  std::map<std::string, std::pair<Entries, std::optional<Index>>> buffers;
  std::vector<std::string> order;
  const auto buffer_of = [&](const KeyPath& path) -> std::pair<Entries, std::optional<Index>>& {
    const auto [it, is_new] = buffers.try_emplace(dotted_name(KeyPath(path.begin(), path.end() - 1)));
    if (is_new) order.push_back(it->first);
    return it->second;
  };
  for (const TensorFile::Entry& entry : open.content->tensors())
    if (entry.path.size() >= 3 && entry.tensor.shape().rank() == 1) buffer_of(entry.path).first.push_back(&entry);
  for (const TensorFile::Object& object : open.content->objects())
    if (object.path.size() >= 3 && is_word(object.path, object.path.size() - 1, "numel_unpadded"))
      buffer_of(object.path).second = object.value.as_int();
  std::erase_if(order, [&](const std::string& name) { return buffers.at(name).first.empty(); });

  // The parameters of each storage, in the order of the model's chunks. Experts are in another optimizer.
  std::map<std::pair<bool, Index>, std::vector<const LegacyParameter*>> by_storage;
  std::vector<std::pair<bool, Index>> storages;
  for (const LegacyParameter& p : rank.parameters) {
    const std::pair storage(p.is_expert && degrees_.ep > 1, p.stored.extent.offset);
    const auto [it, is_new] = by_storage.try_emplace(storage);
    if (is_new) storages.push_back(storage);
    it->second.push_back(&p);
  }
  std::stable_sort(storages.begin(), storages.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  if (order.size() != storages.size()) {
    leave_out_optimizer(catalog_.file_path(open.file) + " has " + count_of(std::ssize(order), "buffer") +
                        ", and the parameters are views of " + count_of(std::ssize(storages), "storage"));
    return {};
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto& [flats, unpadded] = buffers.at(order[i]);
    if (!TRY(read_buffer(rank, open.file, flats, unpadded, by_storage.at(storages[i])))) {
      leave_out_optimizer(catalog_.file_path(open.file) + ": buffer " + order[i] +
                          " is not laid out like the parameters in " + std::string(kModelFile));
      return {};
    }
  }
  optimizer_ = "distributed: flat buffers, gathered over the data-parallel ranks";
  return {};
}

// Adds the states in one flat buffer. Returns false if it is not laid out like the storage of its parameters.
Result<bool> LegacyReader::read_buffer(const LegacyRank& rank, std::uint32_t file, const Entries& flats,
                                       std::optional<Index> unpadded,
                                       const std::vector<const LegacyParameter*>& parameters) {
  const auto places = places_in_buffer(parameters);
  if (!places) return false;
  const Index elements = places->empty() ? 0 : places->back().at + places->back().end - places->back().begin;
  for (const TensorFile::Entry* flat : flats) {
    const StoredTensor& stored = flat->tensor;
    if (stored.shape()[0] < elements || (unpadded && *unpadded != elements) ||
        stored.strides != row_major_strides(stored.shape()))
      return false;
    const std::string word = state_word(std::get<std::string>(flat->path.back()));
    StoredTensor run = stored;
    run.extent.file = file;
    for (const auto& [begin, end, at, parameter] : *places) {
      const Dims& local = parameter->stored.shape();
      TRY(add_word(*parameter, word, stored.dtype, local, fragments_of_run(local, 0, volume(local), run, at))
              .context(path_join(catalog_.root, rank.directory) + ": parameter " + printable(parameter->name)));
    }
  }
  return true;
}

}  // namespace reshard::megatron
