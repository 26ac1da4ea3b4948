// The optimizer of files of ranks: torch's own with float32 masters, or buffers that ranks share out.
#include <algorithm>

#include "formats/megatron/legacy_reader.h"
#include "formats/tensor_files/flat_runs.h"
#include "formats/tensor_files/parameter_ids.h"
#include "lib/base/text.h"

namespace reshard::megatron {

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

Status LegacyReader::read_plain_optimizer(const LegacyRank& rank) {
  std::map<Index, std::pair<Entries, Entries>> optimizers;
  for (const TensorFile::Entry& entry : rank.content->tensors()) {
    const auto key = optimizer_key(entry.path);
    if (!key) continue;
    auto& [states, masters] = optimizers[key->optimizer];
    if (is_word(entry.path, key->rest, "state")) states.push_back(&entry);
    if (is_word(entry.path, key->rest, "fp32_from_fp16_params")) masters.push_back(&entry);
  }
  for (const auto& [number, entries] : optimizers)
    TRY(read_plain_optimizer(rank, entries.first, entries.second, optimizers.size() > 1));
  return {};
}

Status LegacyReader::read_plain_optimizer(const LegacyRank& rank, const Entries& states, const Entries& masters,
                                          bool one_of_several) {
  if (states.empty()) return {};
  const std::string where = catalog_.file_path(rank.file);
  std::map<Index, ParameterId> by_id;
  for (const TensorFile::Entry* entry : states) {
    const auto key = optimizer_key(entry->path);
    const auto id = entry->path.size() == key->rest + 3 ? number_of(entry->path[key->rest + 1]) : std::nullopt;
    if (!id) continue;
    ParameterId& known = by_id[*id];
    known.id = *id;
    if (entry->tensor.shape().rank() > 0) known.shape = entry->tensor.shape();
  }
  std::map<Index, std::vector<Index>> groups;  // the ids of each
  bool has_experts_apart = false;
  const Index number = optimizer_key(states.front()->path)->optimizer;
  for (const TensorFile::Object& object : rank.content->objects()) {
    const auto key = optimizer_key(object.path);
    if (!key || key->optimizer != number || object.path.size() != key->rest + 3 ||
        !is_word(object.path, key->rest, "param_groups"))
      continue;
    const auto group = number_of(object.path[key->rest + 1]);
    if (group && is_word(object.path, key->rest + 2, "params"))
      for (std::size_t i = 0; i < object.value.size(); ++i)
        if (const auto id = object.value[i].as_int()) groups[*group].push_back(*id);
    if (is_word(object.path, key->rest + 2, "is_expert_parallel"))
      has_experts_apart = has_experts_apart || object.value.as_bool().value_or(false);
  }
  std::vector<const LegacyParameter*> own;
  std::vector<NamedShape> shapes;
  for (const LegacyParameter& p : rank.parameters) {
    if (one_of_several && p.is_expert != has_experts_apart) continue;
    shapes.push_back({std::to_string(own.size()), p.stored.shape()});
    own.push_back(&p);
  }
  std::vector<ParameterId> ids;
  for (const auto& [id, known] : by_id) ids.push_back(known);
  std::vector<std::vector<Index>> lists;
  for (const auto& [group, list] : groups) lists.push_back(list);
  const ParameterNames named = name_parameters(shapes, NameOrder::kAsDefined, ids, lists);
  if (named.names.empty()) {
    leave_out_optimizer(named.evidence);
    return {};
  }
  std::map<Index, const LegacyParameter*> owner;
  for (std::size_t i = 0; i < ids.size(); ++i)
    owner[ids[i].id] = own[static_cast<std::size_t>(*parse_number(named.names[i]))];

  const auto add = [&](const TensorFile::Entry& entry, const LegacyParameter& of, const std::string& word) -> Status {
    const StoredTensor& stored = entry.tensor;
    const bool is_number = stored.shape().rank() == 0;
    if (!is_number && stored.shape() != of.stored.shape())
      return corrupt(where + ": " + tensor_text(entry.name) + ": expected " + to_string(of.stored.shape()) +
                     " as parameter " + of.name + " has, got " + to_string(stored.shape()));
    LegacyParameter place = of;
    if (is_number) place.cut = {};
    const bool is_model = takes_masters_ && word == kMaster;
    return add_piece(is_model ? of.name : state_name(of.name, word),
                     is_model ? KeyPath{of.name} : state_path(of.name, word), stored.dtype, place, stored.shape(),
                     {in_file(stored, rank.file)})
        .context(where + ": " + tensor_text(entry.name));
  };
  for (const TensorFile::Entry* entry : states) {
    const std::size_t rest = optimizer_key(entry->path)->rest;
    const auto id = entry->path.size() == rest + 3 ? number_of(entry->path[rest + 1]) : std::nullopt;
    if (id) TRY(add(*entry, *owner.at(*id), name_from(entry->path, rest + 2)));
  }
  // The masters of each group, of those of its parameters that are no float32 themselves.
  std::map<Index, std::vector<const LegacyParameter*>> halves;
  for (const auto& [group, list] : groups)
    for (const Index id : list)
      if (const auto o = owner.find(id); o != owner.end() && o->second->stored.dtype != DType::kFloat32)
        halves[group].push_back(o->second);
  for (const TensorFile::Entry* entry : masters) {
    const std::size_t rest = optimizer_key(entry->path)->rest;
    const auto group = entry->path.size() == rest + 3 ? number_of(entry->path[rest + 1]) : std::nullopt;
    const auto place = group ? number_of(entry->path[rest + 2]) : std::nullopt;
    if (!place || *place < 0 || *place >= std::ssize(halves[*group])) {
      leave_out_optimizer("a master of no parameter, " + printable(entry->name));
      return {};
    }
    TRY(add(*entry, *halves[*group][static_cast<std::size_t>(*place)], std::string(kMaster)));
  }
  optimizer_ = "plain: each rank has the state of its own parameters";
  return {};
}

// {buckets_coalesced: True, 0: {(torch.bfloat16, torch.float32): {param, exp_avg, exp_avg_sq, numel_unpadded}}}: flat
// buffers that lie as the model's own parameters do, which are views of one storage each.
Status LegacyReader::read_distributed_optimizer(const LegacyRank& rank, const OpenOptions& options) {
  const OpenFile open = TRY(open_file(path_join(rank.directory, kOptimizerFile), options));
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

  // The parameters of each storage, in the order of the model's chunks; those of experts are another optimizer's.
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
    bool fits = true;
    TRY(read_buffer(rank, open.file, flats, unpadded, by_storage.at(storages[i]), fits));
    if (!fits) {
      leave_out_optimizer(catalog_.file_path(open.file) + ": buffer " + order[i] +
                          " does not lie as the parameters of " + std::string(kModelFile) + " do");
      return {};
    }
  }
  optimizer_ = "distributed: flat buffers, gathered over the data-parallel ranks";
  return {};
}

// A parameter's place in the flat buffer is its place in its storage; only the ends of buckets, which the storage pads,
// are left out of the buffer.
Status LegacyReader::read_buffer(const LegacyRank& rank, std::uint32_t file, const Entries& flats,
                                 std::optional<Index> unpadded, const std::vector<const LegacyParameter*>& parameters,
                                 bool& fits) {
  struct Place {
    Index begin = 0, end = 0;  // in the storage, elements
    Index at = 0;              // in the buffer
    const LegacyParameter* parameter = nullptr;
  };
  std::vector<Place> places;
  for (const LegacyParameter* p : parameters) {
    const Index size = byte_size(p->stored.dtype);
    if (p->stored.start % size != 0 || p->stored.strides != row_major_strides(p->stored.shape())) {
      fits = false;
      return {};
    }
    const Index begin = p->stored.start / size;
    places.push_back({begin, begin + volume(p->stored.shape()), 0, p});
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.begin < b.begin; });
  Index gap = 0, end = 0;
  for (Place& place : places) {
    const Index next = checked_round_up(end, kBufferAlignment).value_or(-1);
    if (place.begin < next) {
      fits = false;
      return {};
    }
    gap += place.begin - next;  // more than alignment: the end of a bucket
    place.at = place.begin - gap;
    end = place.end;
  }
  for (const TensorFile::Entry* flat : flats) {
    const StoredTensor& stored = flat->tensor;
    if (stored.shape()[0] < end - gap || (unpadded && *unpadded != end - gap) ||
        stored.strides != row_major_strides(stored.shape())) {
      fits = false;
      return {};
    }
    const std::string word = state_word(std::get<std::string>(flat->path.back()));
    StoredTensor run = stored;
    run.extent.file = file;
    for (const Place& place : places) {
      const Dims& local = place.parameter->stored.shape();
      const std::string& name = place.parameter->name;
      const bool is_model = takes_masters_ && word == kMaster;
      TRY(add_piece(is_model ? name : state_name(name, word), is_model ? KeyPath{name} : state_path(name, word),
                    stored.dtype, *place.parameter, local, fragments_of_run(local, 0, volume(local), run, place.at))
              .context(path_join(catalog_.root, rank.directory) + ": parameter " + printable(name)));
    }
  }
  return {};
}

}  // namespace reshard::megatron
