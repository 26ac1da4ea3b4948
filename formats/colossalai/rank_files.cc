// SPDX-License-Identifier: Apache-2.0
#include "formats/colossalai/rank_files.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "formats/tensor_files/flat_runs.h"
#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/reader.h"
#include "lib/base/text.h"

namespace reshard::colossalai {
namespace {

constexpr std::string_view kGlobalMeta = "global_meta.bin";
constexpr Index kMaxRanks = 1'000'000;
constexpr std::size_t kMaxMetaFiles = 100'000;

using pickle::Kind;
using pickle::Value;

using Cuts = std::vector<std::pair<Index, Index>>;  // (dimension, parts), the highest dimension first

// The position of one rank's tensor in the whole.
struct DistMeta {
  Index dp_rank = 0;
  Index tp_rank = 0;
  Cuts cuts;
  std::optional<Index> zero_elements;  // of the tensor-parallel part, if ZeRO flattened it
  Dims zero_shape;
};

Result<Index> read_number(Value object, std::string_view name, Index most) {
  const auto value = object.find(name);
  const auto n = value ? value->as_int() : std::nullopt;
  if (!n || *n < 0 || *n > most)
    return object.mismatch("ParamDistMeta: " + std::string(name), "a number up to " + std::to_string(most));
  return *n;
}

bool has(Value object, std::string_view name) {
  const auto value = object.find(name);
  return value && !value->is_none();
}

Result<std::vector<Index>> read_numbers(Value object, std::string_view name, Index most) {
  const Value list = *object.find(name);
  std::vector<Index> out;
  if ((list.kind() != Kind::kList && list.kind() != Kind::kTuple) || list.size() > std::size_t{kMaxRank})
    return list.mismatch("ParamDistMeta: " + std::string(name), "up to " + std::to_string(kMaxRank) + " numbers");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto n = list[i].as_int();
    if (!n || *n < 0 || *n > most)
      return list[i].mismatch("ParamDistMeta: " + std::string(name), "numbers up to " + std::to_string(most));
    out.push_back(*n);
  }
  return out;
}

Result<DistMeta> read_dist_meta(Value value) {
  if (value.kind() != Kind::kObject || value.callee().name() != "ParamDistMeta")
    return value.mismatch("dist_meta", "a ParamDistMeta");
  const Value fields = value.state();
  DistMeta out;
  out.dp_rank = TRY(read_number(fields, "dp_rank", kMaxRanks));
  out.tp_rank = TRY(read_number(fields, "tp_rank", kMaxRanks));
  const Index tp_size = TRY(read_number(fields, "tp_world_size", kMaxRanks));
  if (has(fields, "tp_shard_dims") && has(fields, "tp_num_parts")) {
    const auto dims = TRY(read_numbers(fields, "tp_shard_dims", kMaxRank - 1));
    const auto parts = TRY(read_numbers(fields, "tp_num_parts", kMaxRanks));
    if (dims.size() != parts.size()) return fields.mismatch("ParamDistMeta", "as many tp_num_parts as tp_shard_dims");
    Index product = 1;
    for (std::size_t i = 0; i < dims.size(); ++i) {
      const auto next = checked_mul(product, parts[i]);
      if (!next || *next < 1 || *next > kMaxRanks) return fields.mismatch("tp_num_parts", "a product of tp_world_size");
      product = *next;
      out.cuts.emplace_back(dims[i], parts[i]);
    }
    if (product != tp_size)
      return fields.mismatch("tp_num_parts", "a product of " + std::to_string(tp_size) + ", the tp_world_size");
    std::sort(out.cuts.rbegin(), out.cuts.rend());
  }
  if (has(fields, "zero_numel") && has(fields, "zero_orig_shape")) {
    out.zero_elements = TRY(read_number(fields, "zero_numel", INT64_MAX));
    for (const Index n : TRY(read_numbers(fields, "zero_orig_shape", INT64_MAX))) out.zero_shape.push_back(n);
    if (checked_volume(out.zero_shape) != out.zero_elements)
      return fields.mismatch("zero_orig_shape", "a shape of " + count_of(*out.zero_elements, "element"));
  }
  return out;
}

// One rank's part of a tensor.
struct StoredPart {
  DistMeta meta;
  std::uint32_t file = 0;
  StoredTensor stored;
};

// The tensor-parallel parts of one tensor by rank: the local shape, and the stored parts of it.
using LocalParts = std::map<Index, std::pair<Dims, std::vector<StoredPart>>>;

class RankReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

 private:
  Status read_rank(const std::string& meta_file);
  using Placed = std::map<std::string, DistMeta>;
  Status read_optimizer(Value meta, const Placed& placed);
  Status add_whole(const std::string& name, KeyPath path, const std::vector<StoredPart>& parts);
  Result<std::vector<Index>> coordinates_of(const std::string& name, Index rank, const Cuts& cuts) const;
  Result<std::map<Index, Dims>> offsets_of(const std::string& name, const Cuts& cuts, const LocalParts& locals,
                                           Dims& whole) const;
  Result<bool> place_rank(Tensor& tensor, const Dims& shape, const std::vector<StoredPart>& stored, const Dims& offset);
  Result<LocalParts> group(const std::string& name, const std::vector<StoredPart>& parts) const;
  Status place_part(Tensor& tensor, const StoredPart& part, const Dims& local, const Dims& offset, Index& begin);

  OpenOptions options_;
  std::map<std::string, std::vector<StoredPart>> parts_;
  std::map<std::string, std::string> parameter_of_;  // the parameter of each state in parts_
  std::set<std::string> objects_;
};

Result<std::vector<std::string>> names_in(Value meta, std::string_view name) {
  std::vector<std::string> out;
  const auto list = meta.find(name);
  if (!list || list->is_none()) return out;
  if (list->kind() != Kind::kList || list->size() > kMaxMetaFiles)
    return list->mismatch(name, "a list of at most " + std::to_string(kMaxMetaFiles) + " files");
  for (std::size_t i = 0; i < list->size(); ++i) {
    const auto file = (*list)[i].as_string();
    if (!file || !is_safe_relative_path(*file)) return (*list)[i].mismatch(name, "files inside the directory");
    out.emplace_back(*file);
  }
  return out;
}

Status RankReader::read_rank(const std::string& meta_file) {
  const auto open = TRY(open_if_whole(meta_file, options_));
  if (!open) return {};
  const auto meta = open->content->root();
  if (!meta || meta->kind() != Kind::kDict)
    return corrupt(catalog_.file_path(open->file) + ": expected a dict that torch.save wrote");
  Placed placed;
  if (const auto all = meta->find("dist_meta"); all && all->kind() == Kind::kDict)
    for (std::size_t i = 0; i < all->size(); ++i)
      if (const auto name = all->key(i).as_string())
        placed.insert_or_assign(std::string(*name), TRY(read_dist_meta(all->value(i))));
  for (const std::string& name : TRY(names_in(*meta, "model"))) {
    const auto model = TRY(open_if_whole(name, options_));
    if (!model) continue;
    for (const TensorFile::Entry& e : model->content->tensors()) {
      const auto place = placed.find(e.name);
      parts_[e.name].push_back({place == placed.end() ? DistMeta() : place->second, model->file, e.tensor});
    }
  }
  return read_optimizer(*meta, placed);
}

// Reads the optimizer's files of one rank. `placed` has the position of each of the rank's parameters.
Status RankReader::read_optimizer(Value meta, const Placed& placed) {
  std::map<Index, std::string> parameters;
  if (const auto ids = meta.find("param_to_os"); ids && ids->kind() == Kind::kDict)
    for (std::size_t i = 0; i < ids->size(); ++i)
      if (const auto id = ids->value(i).as_int())
        if (const auto name = ids->key(i).as_string()) parameters.insert_or_assign(*id, std::string(*name));
  std::set<std::pair<Index, std::string>> cut;
  if (const auto paired = meta.find("paired_os"); paired && paired->kind() == Kind::kDict)
    for (std::size_t i = 0; i < paired->size(); ++i) {
      const auto id = paired->key(i).as_int();
      const Value states = paired->value(i);
      for (std::size_t k = 0; id && states.kind() == Kind::kDict && k < states.size(); ++k)
        if (const auto key = states.key(k).as_string(); key && states.value(k).as_bool() == true)
          cut.emplace(*id, std::string(*key));
    }
  for (const std::string& name : TRY(names_in(meta, "optimizer"))) {
    const auto opened = TRY(open_if_whole(name, options_));
    if (!opened) continue;
    const OpenFile& optimizer = *opened;
    const auto parse = [&](const KeyPath& path) -> std::optional<std::tuple<Index, std::string, std::string>> {
      const std::size_t at = !path.empty() && path.front() == KeyPath::value_type("state") ? 1 : 0;
      if (path.size() != at + 2) return std::nullopt;
      const auto* id = std::get_if<std::string>(&path[at]);
      const auto* key = std::get_if<std::string>(&path[at + 1]);
      if (id == nullptr || key == nullptr || id->empty() || id->size() > 9 ||
          id->find_first_not_of("0123456789") != std::string::npos)
        return std::nullopt;
      const auto parameter = parameters.find(std::stoll(*id));
      return std::tuple(static_cast<Index>(std::stoll(*id)), *key,
                        parameter == parameters.end() ? *id : parameter->second);
    };
    for (const TensorFile::Entry& e : optimizer.content->tensors()) {
      const auto state = parse(e.path);
      if (!state)
        return corrupt(catalog_.file_path(optimizer.file) + ": expected states of parameter ids, got '" +
                       printable(e.name) + "'");
      const auto& [id, key, parameter] = *state;
      DistMeta place;
      if (const auto own = placed.find(parameter); own != placed.end() && cut.contains({id, key})) place = own->second;
      parts_["optimizer.state." + parameter + "." + key].push_back({place, optimizer.file, e.tensor});
      parameter_of_["optimizer.state." + parameter + "." + key] = parameter;
    }
    for (const TensorFile::Object& o : optimizer.content->objects()) {
      const auto state = parse(o.path);
      const std::string inner = state ? "state." + std::get<2>(*state) + "." + std::get<1>(*state) : o.name;
      if (objects_.insert(inner).second)
        TRY(add_object("optimizer." + inner, {"optimizer", inner}, optimizer.file, o.value));
    }
  }
  return {};
}

// Groups stored parts by tensor-parallel rank. Several ranks may have the same part.
Result<LocalParts> RankReader::group(const std::string& name, const std::vector<StoredPart>& parts) const {
  LocalParts out;
  for (const StoredPart& part : parts) {
    const Dims& local = part.meta.zero_elements ? part.meta.zero_shape : part.stored.shape();
    auto& [shape, same] = out.try_emplace(part.meta.tp_rank, local, std::vector<StoredPart>{}).first->second;
    if (shape != local || part.stored.dtype != parts.front().stored.dtype ||
        part.meta.cuts != parts.front().meta.cuts ||
        part.meta.zero_elements.has_value() != parts.front().meta.zero_elements.has_value() ||
        local.rank() != out.begin()->second.first.rank())
      return corrupt(catalog_.file_path(part.file) + ": " + tensor_text(name) + ": expected a part like that in " +
                     catalog_.file_path(parts.front().file) + ", got " + type_text(part.stored.dtype, local));
    same.push_back(part);
  }
  for (auto& [rank, local] : out)
    std::stable_sort(local.second.begin(), local.second.end(),
                     [](const StoredPart& a, const StoredPart& b) { return a.meta.dp_rank < b.meta.dp_rank; });
  return out;
}

// Adds a stored part of the local tensor at `offset` of the whole. `begin` is the first element of a flat run, and is
// advanced.
Status RankReader::place_part(Tensor& tensor, const StoredPart& part, const Dims& local, const Dims& offset,
                              Index& begin) {
  Fragment fragment = in_file(part.stored, part.file);
  const auto move = [&](Box box) {
    for (int d = 0; d < box.rank(); ++d) box.origin[d] += offset[d];
    return box;
  };
  if (!part.meta.zero_elements) {
    fragment.box = move(fragment.box);
    tensor.fragments.add(fragment);
    return {};
  }
  const Dims& flat = part.stored.shape();
  const Index elements = volume(flat);
  if (flat.rank() != 1 || elements > *part.meta.zero_elements - begin)
    return corrupt(catalog_.file_path(part.file) + ": " + tensor_text(tensor.name) +
                   ": expected a flat run of at most " + count_of(*part.meta.zero_elements - begin, "element") +
                   ", got " + to_string(flat));
  const Index stride = part.stored.strides[0];
  if (stride != 1 && elements > 1)
    return unsupported(catalog_.file_path(part.file) + ": " + tensor_text(tensor.name) +
                       ": a flat run with a stride of " + std::to_string(stride));
  for (Fragment& run : fragments_of_run(local, begin, begin + elements, part.stored, 0)) {
    run.box = move(run.box);
    run.extent.file = part.file;
    tensor.fragments.add(run);
  }
  begin += elements;
  return {};
}

// Returns the number of the rank's part along each of the cuts.
Result<std::vector<Index>> RankReader::coordinates_of(const std::string& name, Index rank, const Cuts& cuts) const {
  std::vector<Index> out;
  Index rest = rank, ranks = 1;
  for (const auto& [dim, parts] : cuts) {
    out.push_back(rest % parts);
    rest /= parts;
    ranks *= parts;
  }
  if (rest > 0 && !cuts.empty())
    return corrupt(catalog_.root + ": " + tensor_text(name) + ": tp_rank " + std::to_string(rank) + " of a world of " +
                   std::to_string(ranks));
  return out;
}

// Returns the offset of each rank's part in the whole, and extends `whole` to the shape of the whole. Without cuts
// every rank has the whole, and only the first is returned.
Result<std::map<Index, Dims>> RankReader::offsets_of(const std::string& name, const Cuts& cuts,
                                                     const LocalParts& locals, Dims& whole) const {
  for (const auto& [dim, parts] : cuts)
    if (dim >= whole.rank())
      return corrupt(catalog_.root + ": " + tensor_text(name) + ": cut along dimension " + std::to_string(dim) +
                     " of " + std::to_string(whole.rank()));
  std::map<Index, Dims> out;
  // For each dimension and each combination of coordinates in the others: the end of the parts so far.
  std::map<std::pair<std::size_t, std::vector<Index>>, Index> ends;
  for (const auto& [rank, local] : locals) {
    const std::vector<Index> coordinates = TRY(coordinates_of(name, rank, cuts));
    Dims offset = Dims::filled(whole.rank(), 0);
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      std::vector<Index> others = coordinates;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
      const int d = static_cast<int>(cuts[i].first);
      Index& end = ends[{i, others}];
      offset[d] = end;
      const auto sum = checked_add(end, local.first[d]);
      if (!sum) return corrupt(catalog_.root + ": " + tensor_text(name) + ": 2^63 elements or more");
      end = *sum;
      whole[d] = std::max(whole[d], end);
    }
    out.emplace(rank, offset);
    if (cuts.empty()) break;
  }
  return out;
}

// Places the stored parts of one tensor-parallel rank, whose part of the whole has `shape` and is at `offset`. Returns
// false if some are missing because a file cannot be read.
Result<bool> RankReader::place_rank(Tensor& tensor, const Dims& shape, const std::vector<StoredPart>& stored,
                                    const Dims& offset) {
  Index begin = 0;
  std::set<Index> seen;
  for (const StoredPart& part : stored) {
    if (part.meta.zero_elements && !seen.insert(part.meta.dp_rank).second) continue;
    if (!part.meta.zero_elements && !seen.empty()) continue;
    seen.insert(part.meta.dp_rank);
    TRY(place_part(tensor, part, shape, offset, begin));
  }
  const auto all = stored.front().meta.zero_elements;
  if (!all || begin == *all) return true;
  if (is_partial()) return false;
  return corrupt(catalog_.root + ": " + tensor_text(tensor.name) + ": expected runs of " + count_of(*all, "element") +
                 " together, got " + std::to_string(begin) + ": the files of a rank are missing");
}

Status RankReader::add_whole(const std::string& name, KeyPath path, const std::vector<StoredPart>& parts) {
  const LocalParts locals = TRY(group(name, parts));
  const Cuts& cuts = parts.front().meta.cuts;
  Index expected = 1;
  for (const auto& [dim, n] : cuts) expected *= n;
  if (std::ssize(locals) < expected && is_partial()) {
    leave_out_tensor(name);
    return {};
  }
  if (std::ssize(locals) < expected)
    return corrupt(catalog_.root + ": " + tensor_text(name) + ": expected the parts of " +
                   count_of(expected, "tensor-parallel rank") + ", got " + std::to_string(locals.size()));
  Tensor tensor;
  tensor.name = name;
  tensor.path = std::move(path);
  tensor.dtype = parts.front().stored.dtype;
  tensor.shape = locals.begin()->second.first;
  const std::map<Index, Dims> offsets = TRY(offsets_of(name, cuts, locals, tensor.shape));
  TRY(check_size(tensor.dtype, tensor.shape).context(catalog_.root + ": " + tensor_text(name)));
  tensor.fragments = FragmentList(tensor.shape.rank());
  for (const auto& [rank, offset] : offsets) {
    const auto& [shape, stored] = locals.at(rank);
    if (TRY(place_rank(tensor, shape, stored, offset))) continue;
    leave_out_tensor(name);
    return {};
  }
  return catalog_.add(std::move(tensor));
}

Status RankReader::open(const PathSnapshot& place, const OpenOptions& options) {
  catalog_.root = place.path();
  options_ = options;
  const auto global = TRY(open_if_whole(std::string(kGlobalMeta), options_));
  if (!global) {
    std::vector<std::string> names;
    for (const DirectoryEntry& e : place.entries())
      if (!e.is_directory && e.name.ends_with(".bin")) names.push_back(e.name);
    return find_more_damaged(names);
  }
  const auto root = global->content->root();
  if (!root || root->kind() != Kind::kDict)
    return corrupt(catalog_.file_path(global->file) + ": expected a dict that torch.save wrote");
  const auto metas = TRY(names_in(*root, "meta"));
  if (metas.empty()) return corrupt(catalog_.file_path(global->file) + ": expected the names of meta files, got none");
  for (const std::string& meta : metas) TRY(read_rank(meta));
  for (const auto& [name, parts] : parts_) {
    KeyPath key = {name};
    if (parameter_of_.contains(name)) key = {"optimizer", name.substr(std::string_view("optimizer.").size())};
    TRY(add_whole(name, std::move(key), parts));
  }
  catalog_.attributes.emplace_back(
      "format", "ColossalAI, files of " + count_of(std::ssize(metas), "rank") + " (releases before 0.3.2)");
  return finish(options);
}

}  // namespace

bool is_rank_directory(const PathSnapshot& place) { return place.has_file(kGlobalMeta); }

Result<std::unique_ptr<Reader>> open_rank_directory(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<RankReader>(place, options);
}

}  // namespace reshard::colossalai
