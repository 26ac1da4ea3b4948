// Files of ranks: --ckpt-format torch.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "formats/megatron/arguments.h"
#include "formats/megatron/megatron.h"
#include "formats/megatron/names.h"
#include "formats/tensor_files/flat_runs.h"
#include "formats/tensor_files/local_files.h"
#include "formats/tensor_files/parameter_ids.h"
#include "formats/tensor_files/reader.h"
#include "lib/base/text.h"

namespace reshard::megatron {
namespace {

// "3" of a key that is a number, or a list's position.
std::optional<Index> number_of(const KeyPath::value_type& key) {
  if (const auto* n = std::get_if<Index>(&key)) return *n;
  return parse_number(std::get<std::string>(key));
}
bool is_word(const KeyPath& path, std::size_t i, std::string_view word) {
  const auto* text = i < path.size() ? std::get_if<std::string>(&path[i]) : nullptr;
  return text != nullptr && *text == word;
}

std::string name_from(const KeyPath& path, std::size_t begin) {
  return dotted_name(KeyPath(path.begin() + static_cast<std::ptrdiff_t>(begin), path.end()));
}

// A parameter of one rank's model.
struct LocalParameter {
  std::string name;  // numbered through
  Cut cut;
  Index rank = 0, ranks = 1;  // along the axis that cuts it
  bool is_expert = false;
  StoredTensor stored;
};

struct Rank {
  Index tp = 0, stage = 0, ep = 0;
  std::string directory;
  std::uint32_t file = 0;
  const TensorFile* content = nullptr;
  std::vector<LocalParameter> parameters;  // in the model's order
  std::string text() const { return directory; }
};

class LegacyReader : public TensorFileReader {
 public:
  Status open(const Place& directory, const OpenOptions& options);

 private:
  using Entries = std::vector<const TensorFile::Entry*>;

  Result<std::optional<Json>> made_config() override;
  Status find_ranks(const Place& directory, const OpenOptions& options);
  Status read_ranks(const Place& directory, const OpenOptions& options);
  Status check_ranks() const;
  Status check_rank(const Rank& rank) const;
  Status number_layers();
  Status read_model(Rank& rank);
  Status add_parameters(bool missing);
  Status add_piece(const std::string& name, KeyPath path, DType dtype, const LocalParameter& parameter,
                   const Dims& local, const std::vector<Fragment>& pieces);
  Status read_plain_optimizer(const Rank& rank);
  Status read_plain_optimizer(const Rank& rank, const Entries& states, const Entries& masters, bool one_of_several);
  Status read_distributed_optimizer(const Rank& rank, const OpenOptions& options);
  Status read_buffer(const Rank& rank, std::uint32_t file, const Entries& flats, std::optional<Index> unpadded,
                     const std::vector<const LocalParameter*>& parameters, bool& fits);
  Status add_values(const Rank& rank);
  void leave_out_optimizer(std::string why);
  Index global_layer(const Rank& rank, Index chunk, Index layer) const {
    return first_layer_.at({chunk, rank.stage}) + layer;
  }

  Arguments args_;
  Degrees degrees_;
  bool is_gated_ = false, is_tied_ = false;
  bool takes_masters_ = false;  // in the place of the model's own
  std::optional<Index> iteration_;
  std::vector<Rank> ranks_;
  std::map<std::pair<Index, Index>, Index> first_layer_;  // of a chunk of a stage
  std::map<std::string, JoinedTensor> tensors_;
  std::set<std::string> unknown_;  // names of which nothing tells how they are cut
  std::string left_out_;           // why the optimizer's state is
  std::string optimizer_;          // its kind
};

// ---- Files

// The number in "iter_0000010".
std::optional<Index> iteration_of(std::string_view directory) {
  constexpr std::string_view kPrefix = "iter_";
  if (!directory.starts_with(kPrefix)) return std::nullopt;
  return parse_number(directory.substr(kPrefix.size()));
}

// 1 and 3 of "mp_rank_01_003"; nothing for what is no such name.
std::optional<std::vector<Index>> numbers_of(std::string_view name) {
  std::vector<Index> out;
  for (const std::string& part : split(name.substr(std::string_view("mp_rank_").size()), '_')) {
    const auto n = parse_number(part);
    if (!n) return std::nullopt;
    out.push_back(*n);
  }
  if (out.empty() || out.size() > 3) return std::nullopt;
  return out;
}

// Each directory is of a tp rank[, a stage][, an ep rank]; which a second number is, args tell.
Status LegacyReader::find_ranks(const Place& directory, const OpenOptions& options) {
  std::vector<std::pair<std::string, std::vector<Index>>> found;
  for (const DirectoryEntry& e : directory.entries()) {
    if (!e.is_directory || !is_rank_directory(e.name)) continue;
    auto numbers = numbers_of(e.name);
    if (!numbers) return corrupt(path_join(catalog_.root, e.name) + ": expected mp_rank_TT[_PPP][_EEE]");
    found.emplace_back(e.name, std::move(*numbers));
  }
  std::sort(found.begin(), found.end());
  for (const auto& [name, numbers] : found)
    if (numbers.size() != found.front().second.size())
      return corrupt(path_join(catalog_.root, name) + ": expected as many numbers as in " + found.front().first +
                     ": the files are of two saves");
  for (auto& [name, numbers] : found) {
    Rank rank;
    rank.directory = name;
    const std::string file = path_join(name, kModelFile);
    if (!path_exists(path_join(catalog_.root, file)))
      return io_error(path_join(catalog_.root, file) +
                      ": file is missing: the save did not finish, or was not copied whole");
    const OpenFile open = TRY(open_file(file, options));
    rank.file = open.file;
    rank.content = open.content;
    if (ranks_.empty()) {
      const auto root = open.content->root();
      const auto args = root ? root->find("args") : std::nullopt;
      if (args) args_ = Arguments::read(*args);
      if (args_.empty())
        return corrupt(catalog_.file_path(open.file) + ": args: expected Megatron's arguments, got " +
                       std::string(args ? pickle::kind_name(args->kind()) : "nothing"));
      degrees_ = TRY(degrees_of(args_).context(catalog_.file_path(open.file)));
      const std::size_t wanted = 1 + std::size_t{degrees_.pp > 1} + std::size_t{degrees_.ep > 1};
      if (numbers.size() != wanted)
        return corrupt(path_join(catalog_.root, name) + ": expected " + count_of(static_cast<Index>(wanted), "number") +
                       " in the name, by args (" + mesh_text(degrees_) + ")");
    }
    rank.tp = numbers[0];
    if (degrees_.pp > 1) rank.stage = numbers[1];
    if (degrees_.ep > 1) rank.ep = numbers.back();
    ranks_.push_back(std::move(rank));
  }
  std::stable_sort(ranks_.begin(), ranks_.end(), [](const Rank& a, const Rank& b) {
    return std::tie(a.stage, a.tp, a.ep) < std::tie(b.stage, b.tp, b.ep);
  });
  return {};
}

// That each part of each tensor is in some file. Of the (tp, ep) pairs only those that met in a rank have one.
Status LegacyReader::check_ranks() const {
  std::set<std::pair<Index, Index>> tp, ep;
  for (const Rank& rank : ranks_) {
    if (rank.tp >= degrees_.tp || rank.stage >= degrees_.pp || rank.ep >= degrees_.ep)
      return corrupt(path_join(catalog_.root, rank.directory) + ": is of no rank of " + mesh_text(degrees_) +
                     ", as args have it: the files are of two saves");
    tp.emplace(rank.stage, rank.tp);
    ep.emplace(rank.stage, rank.ep);
  }
  const auto check = [&](const std::set<std::pair<Index, Index>>& there, Index ranks, std::string_view axis) -> Status {
    for (Index stage = 0; stage < degrees_.pp; ++stage)
      for (Index r = 0; r < ranks; ++r)
        if (!there.contains({stage, r}))
          return io_error(catalog_.root + ": no file of " + std::string(axis) + " rank " + std::to_string(r) + " of " +
                          std::to_string(ranks) + (degrees_.pp > 1 ? " of stage " + std::to_string(stage) : "") +
                          ": mp_rank_... is missing of a model on " + mesh_text(degrees_));
    return {};
  };
  TRY(check(tp, degrees_.tp, "tp"));
  return check(ep, degrees_.ep, "ep");
}

// That a file is of the save that the first is of.
Status LegacyReader::check_rank(const Rank& rank) const {
  const auto root = rank.content->root();
  if (!root || root->kind() != pickle::Kind::kDict)
    return corrupt(catalog_.file_path(rank.file) + ": expected a dict of torch.save");
  const auto iteration = root->find("iteration");
  const auto is = iteration ? iteration->as_int() : std::nullopt;
  if (iteration_ && is && *is != *iteration_)
    return corrupt(catalog_.file_path(rank.file) + ": expected iteration " + std::to_string(*iteration_) + ", got " +
                   std::to_string(*is) + ": the file is from another save");
  const auto args = root->find("args");
  const Degrees degrees =
      args ? TRY(degrees_of(Arguments::read(*args)).context(catalog_.file_path(rank.file))) : degrees_;
  if (degrees != degrees_)
    return corrupt(catalog_.file_path(rank.file) + ": expected args of " + mesh_text(degrees_) + ", got " +
                   mesh_text(degrees) + ": the file is from another save");
  const auto version = root->find("checkpoint_version");
  const auto number = version ? version->as_float() : std::nullopt;
  if (number && *number < 2)
    return unsupported(catalog_.file_path(rank.file) +
                       ": a checkpoint_version below 2: rows of q, k and v are in another order. Megatron-LM loads and "
                       "saves it anew");
  return {};
}

Status LegacyReader::read_ranks(const Place& directory, const OpenOptions& options) {
  TRY(find_ranks(directory, options));
  const auto root = ranks_.front().content->root();
  iteration_ = iteration_of(base_name(catalog_.root));
  if (!iteration_)
    if (const auto said = root ? root->find("iteration") : std::nullopt) iteration_ = said->as_int();
  for (const Rank& rank : ranks_) TRY(check_rank(rank));
  return check_ranks();
}

// ---- The model

// The chunk of the model in "model" or "model1"; nothing for other keys.
std::optional<Index> chunk_of(const KeyPath& path) {
  constexpr std::string_view kModel = "model";
  const auto* word = path.size() > 1 ? std::get_if<std::string>(&path[0]) : nullptr;
  if (word == nullptr || !word->starts_with(kModel)) return std::nullopt;
  return word->size() == kModel.size() ? 0 : parse_number(std::string_view(*word).substr(kModel.size()));
}

// Stages have each their chunks in turn, and count their layers from 0 in each.
Status LegacyReader::number_layers() {
  std::map<std::pair<Index, Index>, Index> layers;
  for (const Rank& rank : ranks_)
    for (const TensorFile::Entry& entry : rank.content->tensors()) {
      const auto chunk = chunk_of(entry.path);
      if (!chunk) continue;
      const auto layer = parse_core_name(core_name(name_from(entry.path, 1))).layer;
      if (layer && *layer >= kMaxStack)
        return corrupt(catalog_.file_path(rank.file) + ": " + printable(entry.name) + ": more than " +
                       with_commas(kMaxStack) + " layers");
      Index& count = layers[{*chunk, rank.stage}];
      count = std::max(count, layer ? *layer + 1 : 0);
    }
  Index first = 0;
  for (const auto& [place, count] : layers) {
    first_layer_[place] = first;
    first += count;
  }
  const auto told = args_.number("num_layers");
  if (told && *told != first)
    return corrupt(catalog_.root + ": expected " + count_of(*told, "layer") + ", as args have it, got " +
                   std::to_string(first) + " in the files of all stages");
  return {};
}

Status LegacyReader::add_piece(const std::string& name, KeyPath path, DType dtype, const LocalParameter& parameter,
                               const Dims& local, const std::vector<Fragment>& pieces) {
  const Dims shape = TRY(whole_shape(parameter.cut, local, parameter.ranks));
  auto found = tensors_.find(name);
  if (found == tensors_.end()) found = tensors_.emplace(name, JoinedTensor(name, dtype, shape, std::move(path))).first;
  JoinedTensor& whole = found->second;
  if (whole.tensor.shape != shape || whole.tensor.dtype != dtype)
    return corrupt("expected a part of " + std::string(info(whole.tensor.dtype).torch_name) + " " +
                   to_string(whole.tensor.shape) + " as in the files of other ranks, got one of " +
                   std::string(info(dtype).torch_name) + " " + to_string(shape));
  const auto parts = parts_of_rank(parameter.cut, local, parameter.rank, parameter.ranks);
  for (const Fragment& piece : pieces)
    for (const LocalBox& part : parts)
      if (const auto held = in_whole(piece, part, byte_size(dtype)))
        whole.add(*held, {held->box, Dims::filled(held->box.rank(), 0)});
  return {};
}

Status LegacyReader::read_model(Rank& rank) {
  Index local_experts = 0;
  for (const TensorFile::Entry& entry : rank.content->tensors())
    if (chunk_of(entry.path))
      if (const auto expert = parse_core_name(core_name(name_from(entry.path, 1))).expert)
        local_experts = std::max(local_experts, std::min(*expert, kMaxStack) + 1);
  const auto experts = args_.number("num_experts");
  if (local_experts > kMaxStack || (experts && local_experts > 0 && local_experts * degrees_.ep != *experts))
    return corrupt(catalog_.file_path(rank.file) + ": expected " +
                   count_of(experts.value_or(kMaxStack) / degrees_.ep, "expert") + " in a file of " +
                   mesh_text(degrees_) + ", got " + with_commas(local_experts));
  for (const TensorFile::Entry& entry : rank.content->tensors()) {
    const auto chunk = chunk_of(entry.path);
    if (!chunk || is_extra_state(entry.name)) continue;
    CoreName core = parse_core_name(core_name(name_from(entry.path, 1)));
    if (core.layer) core.layer = global_layer(rank, *chunk, *core.layer);
    if (core.expert) core.expert = rank.ep * local_experts + *core.expert;
    LocalParameter parameter;
    parameter.is_expert = core.is_expert();
    parameter.name = core.text();
    if (is_tied_ && parameter.name == kHead) parameter.name = kEmbedding;  // the last stage's copy
    parameter.ranks = core.is_expert() ? degrees_.etp : degrees_.tp;
    parameter.rank = core.is_expert() ? rank.tp % degrees_.etp : rank.tp;
    parameter.stored = entry.tensor;
    const auto cut = cut_of(parameter.name, is_gated_);
    if (!cut && parameter.ranks > 1) {
      unknown_.insert(parameter.name);
      continue;
    }
    parameter.cut = cut.value_or(Cut{});
    if (parameter.ranks == 1) parameter.cut = {};
    rank.parameters.push_back(std::move(parameter));
  }
  return {};
}

// Those of all ranks; `missing`: only those that no master stands for.
Status LegacyReader::add_parameters(bool missing) {
  std::set<std::string> there;
  if (missing)
    for (const auto& [name, joined] : tensors_) there.insert(name);
  for (const Rank& rank : ranks_)
    for (const LocalParameter& p : rank.parameters)
      if (!there.contains(p.name))
        TRY(add_piece(p.name, {p.name}, p.stored.dtype, p, p.stored.shape(), {in_file(p.stored, rank.file)})
                .context(catalog_.file_path(rank.file) + ": parameter " + printable(p.name)));
  return {};
}

// ---- The optimizer

void LegacyReader::leave_out_optimizer(std::string why) {
  if (left_out_.empty()) left_out_ = std::move(why);
}

// {optimizer: {state: {id: {...}}, param_groups}, fp32_from_fp16_params: [[...], [...]]}, of several optimizers (dense
// parameters, experts) a list of these; of a float32 model torch's own dict.
struct OptimizerKey {
  Index optimizer = 0;
  std::size_t rest = 0;  // of the path: where "state", "param_groups" or "fp32_from_fp16_params" stands
};
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

Status LegacyReader::read_plain_optimizer(const Rank& rank) {
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

Status LegacyReader::read_plain_optimizer(const Rank& rank, const Entries& states, const Entries& masters,
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
  std::vector<const LocalParameter*> own;
  std::vector<NamedShape> shapes;
  for (const LocalParameter& p : rank.parameters) {
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
  std::map<Index, const LocalParameter*> owner;
  for (std::size_t i = 0; i < ids.size(); ++i)
    owner[ids[i].id] = own[static_cast<std::size_t>(*parse_number(named.names[i]))];

  const auto add = [&](const TensorFile::Entry& entry, const LocalParameter& of, const std::string& word) -> Status {
    const StoredTensor& stored = entry.tensor;
    const bool is_number = stored.shape().rank() == 0;
    if (!is_number && stored.shape() != of.stored.shape())
      return corrupt(where + ": " + tensor_text(entry.name) + ": expected " + to_string(of.stored.shape()) +
                     " as parameter " + of.name + " has, got " + to_string(stored.shape()));
    LocalParameter place = of;
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
  std::map<Index, std::vector<const LocalParameter*>> halves;
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
Status LegacyReader::read_distributed_optimizer(const Rank& rank, const OpenOptions& options) {
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
  std::map<std::pair<bool, Index>, std::vector<const LocalParameter*>> by_storage;
  std::vector<std::pair<bool, Index>> storages;
  for (const LocalParameter& p : rank.parameters) {
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
Status LegacyReader::read_buffer(const Rank& rank, std::uint32_t file, const Entries& flats,
                                 std::optional<Index> unpadded, const std::vector<const LocalParameter*>& parameters,
                                 bool& fits) {
  struct Place {
    Index begin = 0, end = 0;  // in the storage, elements
    Index at = 0;              // in the buffer
    const LocalParameter* parameter = nullptr;
  };
  std::vector<Place> places;
  for (const LocalParameter* p : parameters) {
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

// ---- Values

// What all ranks have alike, of the first. Random states are the ranks' own, and are not carried.
Status LegacyReader::add_values(const Rank& rank) {
  static constexpr std::array<std::string_view, 4> kExtra = {"iteration", "checkpoint_version", "opt_param_scheduler",
                                                             "num_floating_point_operations_so_far"};
  for (const TensorFile::Object& object : rank.content->objects()) {
    KeyPath path;
    if (const auto key = optimizer_key(object.path)) {
      if (!is_word(object.path, key->rest, "param_groups") || object.path.size() != key->rest + 3 ||
          is_word(object.path, key->rest + 2, "params"))
        continue;
      path = {std::string("optimizer" + (key->optimizer > 0 ? "_" + std::to_string(key->optimizer) : "")),
              std::string("param_groups"), object.path[key->rest + 1], object.path[key->rest + 2]};
    } else if (std::any_of(kExtra.begin(), kExtra.end(), [&](auto word) { return is_word(object.path, 0, word); })) {
      path = object.path;
      path.insert(path.begin(), std::string("extra_state"));
    } else {
      continue;
    }
    TRY(add_object(dotted_name(path), path, rank.file, object.value));
  }
  if (const auto root = rank.content->root())
    for (const auto& [name, count] : sample_counts(*root))
      TRY(add_object("extra_state." + name, {std::string("extra_state"), name}, rank.file, count));
  return {};
}

// ---- All of it

Status LegacyReader::open(const Place& directory, const OpenOptions& options) {
  catalog_.root = directory.path();
  TRY(read_ranks(directory, options));
  is_gated_ = args_.flag("swiglu");
  is_tied_ = !args_.flag("untie_embeddings_and_output_weights");
  takes_masters_ = options.weights == Weights::kMaster;
  TRY(number_layers());
  for (Rank& rank : ranks_) TRY(read_model(rank));
  if (!takes_masters_) TRY(add_parameters(false));
  const auto buffers_of = [&](const Rank& rank) {
    return path_join(catalog_.root, path_join(rank.directory, kOptimizerFile));
  };
  const bool has_buffers =
      std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return path_exists(buffers_of(rank)); });
  for (const Rank& rank : ranks_) {
    if (!left_out_.empty()) break;
    if (has_buffers && !path_exists(buffers_of(rank)))
      return io_error(buffers_of(rank) +
                      ": file is missing, which other ranks have: a part of the optimizer's state is in it");
    TRY(has_buffers ? read_distributed_optimizer(rank, options) : read_plain_optimizer(rank));
  }
  if (!left_out_.empty()) {
    std::erase_if(tensors_, [](const auto& t) { return split_state_key(t.first).kind == StateKind::kOptimizer; });
    catalog_.warnings.push_back("The optimizer's state is not read: " + left_out_);
  }
  if (takes_masters_) {
    if (optimizer_.empty() || !left_out_.empty())
      return unsupported(catalog_.root + ": --weights master: the checkpoint has no masters that can be read");
    TRY(add_parameters(true));
  }
  for (auto& [name, joined] : tensors_) TRY(catalog_.add(std::move(joined.tensor)).context(catalog_.root));
  tensors_.clear();
  if (!unknown_.empty())
    catalog_.warnings.push_back(names_text({unknown_.begin(), unknown_.end()}, "tensor") +
                                " left out: nothing tells how tensor parallelism cuts what has such a name");
  TRY(add_values(ranks_.front()));
  catalog_.attributes.emplace_back(
      "format", "Megatron-LM, files of ranks" + (iteration_ ? ", iteration " + std::to_string(*iteration_) : ""));
  catalog_.vocabulary = vocabulary_of(args_, catalog_);
  catalog_.attributes.emplace_back("saved",
                                   "on " + mesh_text(degrees_) + ", as args have it" +
                                       (left_out_.empty() && !optimizer_.empty() ? "; optimizer " + optimizer_ : "") +
                                       vocabulary_text(args_, catalog_));
  if (const MadeConfig config = make_config(args_, catalog_); !config.config)
    catalog_.notes.push_back("No config.json can be made of args: " + config.why_not + ".");
  return finish(options);
}

Result<std::optional<Json>> LegacyReader::made_config() { return make_config(args_, catalog_).config; }

}  // namespace

Result<std::unique_ptr<Reader>> open_rank_files(const Place& directory, const OpenOptions& options) {
  return open_as<LegacyReader>(directory, options);
}

}  // namespace reshard::megatron
