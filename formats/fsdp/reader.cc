// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>

#include "formats/encoding/pickle_writer.h"
#include "formats/fsdp/fsdp.h"
#include "formats/fsdp/optimizer_states.h"
#include "formats/tensor_files/flat_runs.h"
#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/parameter_ids.h"
#include "formats/tensor_files/rank_values.h"
#include "lib/base/names.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"

namespace reshard::fsdp {
namespace {

KeyPath below(std::string_view prefix, const KeyPath& path) {
  KeyPath out;
  if (!prefix.empty()) out.emplace_back(std::string(prefix));
  out.insert(out.end(), path.begin(), path.end());
  return out;
}

// A tensor while the files are read, with each rank's pieces in the order of ranks.
struct TensorPieces {
  KeyPath path;
  DType dtype = DType::kFloat32;
  Dims shape;                   // of the whole; of a plain tensor, the first rank's
  bool is_distributed = false;  // each piece has its box; otherwise each is a whole copy
  FragmentList fragments;
};

class PiecesByName {
 public:
  TensorPieces& add(const TensorFile::Entry& entry) {
    const auto [it, is_new] = number_.emplace(entry.name, all_.size());
    if (is_new) {
      const auto& d = entry.distributed;
      const Dims& shape = d ? d->shape : entry.tensor.shape();
      all_.push_back({entry.path, d ? d->dtype : entry.tensor.dtype, shape, d.has_value(), FragmentList(shape.rank())});
    }
    return all_[it->second];
  }
  std::vector<TensorPieces>& all() { return all_; }

 private:
  std::vector<TensorPieces> all_;
  std::unordered_map<std::string, std::size_t> number_;
};

class FsdpReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

 private:
  std::vector<std::string> side_directories() const override;
  Status read_files_of(Role role);
  Status add_pieces(Role role, Index rank, const TensorFile::Entry& entry);
  void add_value(Role role, Index rank, const TensorFile::Object& object);
  Status check_ranks() const;

  Status finish_tensor(KeyPath path, const TensorPieces& pieces);
  Status finish_optimizer();
  std::vector<NamedShape> parameters(bool distributed_only);
  std::string name_by_id(const std::vector<Index>& ids);
  Result<bool> place_flat_states(const std::vector<Index>& ids, std::string& evidence);
  std::optional<std::vector<Index>> lengths_by_shard(const TensorPieces& flat) const;
  Status add_flat_state(const FlatUnit& unit, const KeyPath& path, const TensorPieces& flat,
                        const std::vector<Index>& lengths);
  Status finish_extra();
  Status finish_values();
  Result<std::string> named_ids(const std::vector<Index>& ids) const;

  PiecesByName& of(Role role) { return pieces_[static_cast<std::size_t>(role)]; }
  std::uint32_t file_of(Role role, Index rank) const {  // a role has one file for each rank, in order
    return first_file_[static_cast<std::size_t>(role)] + static_cast<std::uint32_t>(rank);
  }
  Index writer(const Extent& extent) const { return catalog_.files[extent.file].writer; }
  void warn(std::string text) { catalog_.warnings.push_back(std::move(text)); }

  FileSet set_;
  std::array<std::uint32_t, kRoles.size()> first_file_{};
  std::array<PiecesByName, kRoles.size()> pieces_;
  std::array<std::map<std::string, RankValues>, kRoles.size()> values_;
  std::set<std::string> left_out_;                    // names of values that are not plain data
  std::map<std::string, std::vector<Index>> groups_;  // the optimizer's groups: ids, by the name of their list
  std::map<Index, std::vector<std::string>> owners_;  // the parameters of each id
  std::vector<NamedShape> parameters_;                // those that an optimizer numbers, in the model's order
  bool has_distributed_ = false;                      // the model's files have distributed tensors
  Index told_ranks_ = 0;                              // the largest number of ranks that a tensor records
  std::string layout_;                                // of the tensor on the largest mesh
  std::vector<std::pair<Index, Index>> shard_of_;     // for each rank: shard and number of shards, for flat states
};

// ---- Files

// Reads files in parallel, in batches, and adds their tensors in the order of ranks.
Status FsdpReader::read_files_of(Role role) {
  const std::vector<std::pair<Index, std::string>> all(set_.of(role).begin(), set_.of(role).end());
  const std::size_t batch = 2 * static_cast<std::size_t>(thread_count(0));
  first_file_[static_cast<std::size_t>(role)] = static_cast<std::uint32_t>(catalog_.files.size());
  for (std::size_t begin = 0; begin < all.size(); begin += batch) {
    std::vector<std::string> names;
    for (std::size_t i = begin; i < std::min(begin + batch, all.size()); ++i) names.push_back(all[i].second);
    auto contents = TRY(read_files<TensorFile>(names, [](const File& file, std::uint32_t) {
      return TensorFile::open(file, SafetensorsEnd::kExact, TensorFile::Parts::kRead);
    }));
    for (std::size_t i = 0; i < contents.size(); ++i) {
      const Index rank = all[begin + i].first;
      catalog_.files[file_of(role, rank)].writer = rank;
      if (!contents[i]) continue;
      for (const TensorFile::Entry& entry : contents[i]->tensors()) TRY(add_pieces(role, rank, entry));
      for (const TensorFile::Object& object : contents[i]->objects()) add_value(role, rank, object);
      contents[i].reset();
    }
  }
  return {};
}

Status FsdpReader::add_pieces(Role role, Index rank, const TensorFile::Entry& entry) {
  TensorPieces& pieces = of(role).add(entry);
  const std::uint32_t file = file_of(role, rank);
  const auto what = [&] { return catalog_.file_path(file) + ": " + tensor_text(entry.name); };
  const auto& d = entry.distributed;
  const DType dtype = d ? d->dtype : entry.tensor.dtype;
  const Dims& shape = d ? d->shape : entry.tensor.shape();
  if (dtype != pieces.dtype || shape.rank() != pieces.shape.rank() || d.has_value() != pieces.is_distributed ||
      (d && shape != pieces.shape))
    return corrupt(what() + ": expected " + type_text(pieces.dtype, pieces.shape) +
                   " as in the files of other ranks, got " + type_text(dtype, shape));
  if (!d) {
    pieces.fragments.add(in_file(entry.tensor, file));
    return {};
  }
  if (d->rank && *d->rank != rank)
    return corrupt(what() + ": expected the part of rank " + std::to_string(rank) + ", got that of rank " +
                   std::to_string(*d->rank) + ": the file belongs to another rank");
  if (d->ranks > told_ranks_) layout_ = d->layout();
  told_ranks_ = std::max(told_ranks_, d->ranks);
  for (const StoredTensor& part : d->parts) pieces.fragments.add(in_file(part, file));
  if (role != Role::kModel) return {};
  has_distributed_ = true;
  if (d->shards > 0) shard_of_[rank] = {d->shard, d->shards};
  return {};
}

void FsdpReader::add_value(Role role, Index rank, const TensorFile::Object& object) {
  const KeyPath& path = object.path;
  if (!values_[static_cast<std::size_t>(role)][object.name].add(file_of(role, rank), path, object.value)) {
    left_out_.insert(object.name);
    return;
  }
  if (role != Role::kOptimizer || rank > 0 || path.size() != 3 || path[2] != KeyPath::value_type("params")) return;
  std::vector<Index> ids;
  for (std::size_t i = 0; i < object.value.size(); ++i)
    if (const auto id = object.value[i].as_int()) ids.push_back(*id);
  if (!ids.empty()) groups_.emplace(object.name, std::move(ids));
}

// Fails if the tensors are of more ranks than there are files. Accelerate's file names do not give the number of ranks.
Status FsdpReader::check_ranks() const {
  if (told_ranks_ <= set_.ranks) return {};
  if (set_.is_verl)
    return corrupt(catalog_.root + ": expected tensors of " + count_of(set_.ranks, "rank") +
                   ", as the file names say, got tensors of " + std::to_string(told_ranks_) + " (" + layout_ + ")");
  return io_error(catalog_.root + ": missing " + missing_text(set_, told_ranks_) + ": the tensors are of " +
                  count_of(told_ranks_, "rank") + " (" + layout_ + ")");
}

// ---- Tensors

Status FsdpReader::finish_tensor(KeyPath path, const TensorPieces& pieces) {
  const std::string name = dotted_name(path);
  JoinedTensor joined(name, pieces.dtype, pieces.shape, std::move(path));
  for (std::size_t i = 0; i < pieces.fragments.size(); ++i) {
    const Fragment piece = pieces.fragments.get(i);
    if (!pieces.is_distributed && piece.box.shape != pieces.shape)
      return corrupt(catalog_.file_path(piece.extent.file) + ": " + tensor_text(name) + ": expected " +
                     to_string(pieces.shape) + " as in the files of other ranks, got " + to_string(piece.box.shape) +
                     ", and it does not record its position in the whole tensor");
    joined.add(piece);
  }
  return catalog_.add(std::move(joined.tensor)).context(catalog_.root);
}

// Returns the tensors that an optimizer of the model may number: each tied one once. With `distributed_only` plain
// tensors are left out, as they are buffers if others are distributed.
std::vector<NamedShape> FsdpReader::parameters(bool distributed_only) {
  std::vector<NamedShape> out;
  std::set<std::tuple<std::uint32_t, Index, Index>> places;
  for (const TensorPieces& p : of(Role::kModel).all()) {
    if (distributed_only && !p.is_distributed) continue;
    if (!p.fragments.empty() && volume(p.shape) > 0) {
      const Fragment first = p.fragments.get(0);
      if (!places.emplace(first.extent.file, first.extent.offset, first.start).second) continue;
    }
    out.push_back({dotted_name(p.path), p.shape});
  }
  return out;
}

std::optional<Index> id_of(const KeyPath& path) {
  if (path.size() < 3 || path[0] != KeyPath::value_type("state")) return std::nullopt;
  const auto* text = std::get_if<std::string>(&path[1]);
  return text == nullptr ? std::nullopt : parse_number(*text);
}

KeyPath with_owner(const KeyPath& path, const std::string& owner) {
  KeyPath out = below("optimizer", path);
  out[2] = owner;
  return out;
}

Status FsdpReader::finish_optimizer() {
  std::set<Index> all;
  bool has_flat = false;
  for (const TensorPieces& p : of(Role::kOptimizer).all()) {
    const auto id = id_of(p.path);
    if (!id) continue;
    all.insert(*id);
    has_flat = has_flat || (!p.is_distributed && p.shape.rank() == 1);
  }
  const bool has_states = !all.empty();
  for (const auto& [name, group] : groups_) all.insert(group.begin(), group.end());
  const std::vector<Index> ids(all.begin(), all.end());
  parameters_ = parameters(has_distributed_);
  std::string evidence = ids.empty() ? std::string() : name_by_id(ids);
  if (has_states && owners_.empty() && has_flat) {
    if (TRY(place_flat_states(ids, evidence))) {
      catalog_.attributes.emplace_back("optimizer ids", evidence);
      return {};
    }
    if (has_distributed_) {
      warn("The optimizer's states are not read: " + evidence);
      return {};
    }
  }
  if (!owners_.empty()) catalog_.attributes.emplace_back("optimizer ids", evidence);
  if (has_states && owners_.empty())
    warn("The optimizer's states are named by their ids (optimizer.state.0.exp_avg): " + evidence);
  for (TensorPieces& p : of(Role::kOptimizer).all()) {
    const auto id = id_of(p.path);
    const auto owner = id ? owners_.find(*id) : owners_.end();
    KeyPath path = owner == owners_.end() ? below("optimizer", p.path) : with_owner(p.path, owner->second.front());
    TRY(finish_tensor(std::move(path), p));
  }
  return {};
}

// Finds the parameter of each id, if possible. Returns how, or why it failed.
std::string FsdpReader::name_by_id(const std::vector<Index>& ids) {
  std::vector<ParameterId> wanted;
  for (const Index id : ids) wanted.push_back({id, std::nullopt});
  for (const TensorPieces& p : of(Role::kOptimizer).all())
    if (const auto id = id_of(p.path); id && p.shape.rank() > 0)
      wanted[std::lower_bound(ids.begin(), ids.end(), *id) - ids.begin()].shape = p.shape;
  if (parameters_.size() != ids.size()) {
    // Parameters can be plain tensors: those that FSDP was told to ignore, and all of them without sharding.
    if (auto found = without_buffers(parameters(false), wanted)) parameters_ = std::move(*found);
  }
  std::vector<std::vector<Index>> groups;
  for (const auto& [name, group] : groups_) groups.push_back(group);
  const ParameterNames names = name_parameters(parameters_, NameOrder::kAsDefined, wanted, groups);
  for (std::size_t i = 0; i < names.names.size(); ++i) owners_[ids[i]] = {names.names[i]};
  return names.evidence;
}

// Returns how many elements of a flat state each shard has, or nothing if ranks disagree or a piece is not a run.
std::optional<std::vector<Index>> FsdpReader::lengths_by_shard(const TensorPieces& flat) const {
  std::vector<Index> out;
  for (std::size_t i = 0; i < flat.fragments.size(); ++i) {
    const Fragment piece = flat.fragments.get(i);
    const auto [shard, shards] = shard_of_[writer(piece.extent)];
    if (shards <= 0 || (!out.empty() && std::ssize(out) != shards)) return std::nullopt;
    if (out.empty()) out.assign(shards, -1);
    Index& length = out[shard];
    if (piece.box.rank() != 1 || (piece.box.shape[0] > 1 && piece.strides[0] != 1)) return std::nullopt;
    if (length >= 0 && length != piece.box.shape[0]) return std::nullopt;
    length = piece.box.shape[0];
  }
  for (Index& n : out) n = std::max<Index>(n, 0);  // a rank without elements of a parameter has no state for it
  return out;
}

// Adds the flat states to the tensors of their parameters. Returns false and sets `evidence` if they cannot be placed.
Result<bool> FsdpReader::place_flat_states(const std::vector<Index>& ids, std::string& evidence) {
  if (is_partial()) {
    evidence = "they are flat, and files cannot be read that show the length of each rank's part";
    return false;
  }
  std::map<Index, FlatId> flat;
  for (const Index id : ids) flat[id].id = id;
  for (const TensorPieces& p : of(Role::kOptimizer).all()) {
    const auto id = id_of(p.path);
    if (!id || p.shape.rank() == 0) continue;
    const auto lengths = p.is_distributed ? std::nullopt : lengths_by_shard(p);
    FlatId& of_id = flat[*id];
    if (!lengths || (!of_id.lengths.empty() && of_id.lengths != *lengths)) {
      evidence = "the ranks' parts of '" + printable(dotted_name(p.path)) + "' are not runs of one flat state";
      return false;
    }
    of_id.lengths = *lengths;
  }
  std::vector<FlatId> in_order;
  for (auto& [id, f] : flat) in_order.push_back(std::move(f));
  if (groups_.size() > 1) {
    evidence = "they are flat, and of " + count_of(std::ssize(groups_), "group");
    return false;
  }
  const FlatUnits units = flat_units(parameters_, in_order);
  evidence = units.evidence;
  if (units.units.empty()) return false;
  for (std::size_t i = 0; i < ids.size(); ++i)
    for (const NamedShape* p : units.units[i].parameters) owners_[ids[i]].push_back(p->name);
  for (TensorPieces& p : of(Role::kOptimizer).all()) {
    const auto id = id_of(p.path);
    if (!id) {
      TRY(finish_tensor(below("optimizer", p.path), p));
      continue;
    }
    const std::size_t i = std::lower_bound(ids.begin(), ids.end(), *id) - ids.begin();
    if (p.shape.rank() > 0) {
      TRY(add_flat_state(units.units[i], p.path, p, in_order[i].lengths));
      continue;
    }
    for (const NamedShape* parameter : units.units[i].parameters)  // a step, which every parameter gets
      TRY(finish_tensor(with_owner(p.path, parameter->name), p));
  }
  return true;
}

Status FsdpReader::add_flat_state(const FlatUnit& unit, const KeyPath& path, const TensorPieces& flat,
                                  const std::vector<Index>& lengths) {
  std::vector<Index> begins = {0};  // start of each shard's run in the unit
  for (const Index n : lengths) begins.push_back(begins.back() + n);
  Index begin = 0;  // start of the parameter in the unit
  for (const NamedShape* parameter : unit.parameters) {
    const Index end = begin + volume(parameter->shape);
    TensorPieces out{{}, flat.dtype, parameter->shape, true, FragmentList(parameter->shape.rank())};
    for (std::size_t i = 0; i < flat.fragments.size(); ++i) {
      StoredTensor run;
      static_cast<Fragment&>(run) = flat.fragments.get(i);
      run.dtype = flat.dtype;
      const std::size_t shard = shard_of_[writer(run.extent)].first;
      const Index from = std::max(begin, begins[shard]), to = std::min(end, begins[shard + 1]);
      if (from >= to) continue;
      for (const Fragment& piece :
           fragments_of_run(parameter->shape, from - begin, to - begin, run, from - begins[shard]))
        out.fragments.add(piece);
    }
    TRY(finish_tensor(with_owner(path, parameter->name), out));
    begin = end;
  }
  return {};
}

// Adds tensors of the extra state, such as random states: once if all ranks have the same, otherwise one for each rank.
Status FsdpReader::finish_extra() {
  constexpr std::string_view kPrefix = "extra_state";
  for (TensorPieces& p : of(Role::kExtra).all()) {
    if (p.is_distributed) {
      TRY(finish_tensor(below(kPrefix, p.path), p));
      continue;
    }
    const Fragment first = p.fragments.get(0);
    bool is_shared = first.crc.has_value();
    for (std::size_t i = 0; i < p.fragments.size(); ++i) {
      const Fragment piece = p.fragments.get(i);
      is_shared = is_shared && piece.crc == first.crc && piece.box == first.box && piece.strides == first.strides &&
                  piece.start == first.start;
    }
    if (is_shared) {
      TRY(finish_tensor(below(kPrefix, p.path), p));
      continue;
    }
    for (std::size_t i = 0; i < p.fragments.size(); ++i) {
      const Fragment piece = p.fragments.get(i);
      KeyPath path = below("rank_" + std::to_string(writer(piece.extent)), p.path);
      TensorPieces own{{}, p.dtype, piece.box.shape, false, FragmentList(p.shape.rank())};
      own.fragments.add(piece);
      TRY(finish_tensor(below(kPrefix, path), own));
    }
  }
  return {};
}

// ---- Values

// Returns the names of these ids' parameters as a pickled list, or an empty text if one is unknown.
Result<std::string> FsdpReader::named_ids(const std::vector<Index>& ids) const {
  pickle::PickleWriter w;
  w.empty_list();
  pickle::ElementRuns runs(w, &pickle::PickleWriter::append_items);
  for (const Index id : ids) {
    const auto owners = owners_.find(id);
    if (owners == owners_.end()) return std::string();
    for (const std::string& name : owners->second) {
      runs.next();
      w.text(name);
    }
  }
  runs.end();
  return std::move(w).finish();
}

Status FsdpReader::finish_values() {
  static constexpr std::array<std::string_view, kRoles.size()> kPrefixes = {"", "optimizer", "extra_state"};
  for (std::size_t role = 0; role < kRoles.size(); ++role) {
    for (auto& [name, values] : values_[role]) {
      const std::string_view prefix = kPrefixes[role];
      if (values.is_alike() && std::ssize(values.holders) == set_.ranks) {
        const KeyPath path = below(prefix, values.path);
        std::string text = std::move(values.pickles.front());
        if (const auto group = groups_.find(name); kRoles[role] == Role::kOptimizer && group != groups_.end())
          if (std::string named = TRY(named_ids(group->second)); !named.empty()) text = std::move(named);
        TRY(add_pickled(dotted_name(path), path, file_of(kRoles[role], 0), std::move(text)));
        continue;
      }
      for (const auto& [file, which] : values.holders) {
        const Index rank = catalog_.files[file].writer;
        const KeyPath path = below(prefix, below("rank_" + std::to_string(rank), values.path));
        TRY(add_pickled(dotted_name(path), path, file, values.pickles[which]));
      }
    }
  }
  return {};
}

Status FsdpReader::open(const PathSnapshot& place, const OpenOptions& options) {
  set_ = TRY(find_files(place));
  catalog_.root = set_.directory;
  shard_of_.assign(set_.ranks, {0, set_.ranks == 1 ? 1 : 0});
  std::vector<std::string> parts;
  for (const Role role : kRoles) {
    static constexpr std::array<std::string_view, kRoles.size()> kTitles = {"model", "optimizer", "extra state"};
    if (!set_.of(role).empty()) parts.emplace_back(kTitles[static_cast<std::size_t>(role)]);
    TRY(read_files_of(role));
  }
  TRY(check_ranks());
  catalog_.attributes.emplace_back("format", "files of " + count_of(set_.ranks, "rank") + " of FSDP (" +
                                                 (set_.is_verl ? "verl" : "Accelerate") + "): " + join(parts, ", "));
  if (!layout_.empty()) catalog_.attributes.emplace_back("mesh", layout_);
  TRY(finish_optimizer());
  for (TensorPieces& p : of(Role::kModel).all()) TRY(finish_tensor(p.path, p));
  TRY(finish_extra());
  TRY(finish_values());
  if (!left_out_.empty())
    warn("Not read, because they are not plain data: " +
         names_text(std::vector<std::string>(left_out_.begin(), left_out_.end()), "object"));
  for (const std::string& name : {std::string(kSettingsFile), path_join(kModelDirectory, kConfigFile)})
    if (set_.is_verl && TRY(path_exists(path_join(catalog_.root, name)))) catalog_.metadata_files.push_back(name);
  return finish(options);
}

std::vector<std::string> FsdpReader::side_directories() const {
  if (!set_.is_verl) return {catalog_.root};
  return {catalog_.root, path_join(catalog_.root, kModelDirectory)};
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<FsdpReader>(place, options);
}

}  // namespace reshard::fsdp
