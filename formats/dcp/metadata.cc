// SPDX-License-Identifier: Apache-2.0
#include "formats/dcp/metadata.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <set>

#include "formats/dcp/dcp.h"
#include "formats/dcp/stored_rows.h"
#include "lib/base/file.h"
#include "lib/base/text.h"

namespace reshard::dcp {
namespace {

using pickle::Kind;
using pickle::Value;

constexpr std::string_view kOldPropertiesModule = "torch.distributed._shard.sharded_tensor.metadata";

// A limit for the bytes copied out of a pickle, relative to its size: an object that is stored once may be referenced a
// million times.
constexpr Index kCopiedPerByte = 64;
constexpr Index kFreeBytes = Index{16} << 20;

// Returns whether a non-empty box may begin there.
bool is_place_of_data(const Dims& origin, const Dims& shape) {
  return std::equal(origin.begin(), origin.end(), shape.begin(), shape.end(), std::less<>());
}

// The packages whose classes and functions metadata may name. Nothing is ever called, but a name from elsewhere means
// that the pickle was written to be executed, so the file is refused and the error gives the name.
constexpr std::string_view kKnownPackages[] = {
    "torch.", "collections.",     "pathlib.",     "megatron.core.", "olmo_core.distributed.checkpoint.",
    "numpy.", "builtins.getattr", "builtins.set", "builtins.list",  "builtins.dict"};

// torch 1.13 had these classes under _shard, and the old package name still occurs.
bool is_checkpoint_class(const Value& v, std::string_view name) {
  return v.is_object(kMetadataModule, name) || v.is_object("torch.distributed._shard.checkpoint.metadata", name);
}
bool is_tensor_entry(const Value& v) { return is_checkpoint_class(v, "TensorStorageMetadata"); }
bool is_bytes_entry(const Value& v) { return is_checkpoint_class(v, "BytesStorageMetadata"); }
bool is_chunk(const Value& v) { return is_checkpoint_class(v, "ChunkStorageMetadata"); }
bool is_metadata_index(const Value& v) { return is_checkpoint_class(v, "MetadataIndex"); }
bool is_storage_info(const Value& v) {
  return v.is_object(kFilesystemModule, "_StorageInfo") ||
         v.is_object("torch.distributed._shard.checkpoint.filesystem", "_StorageInfo") ||
         v.is_object("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo");
}

Result<Value> field(const Value& state, std::string_view name, std::string_view owner) {
  const auto v = state.find(name);
  if (!v) return state.mismatch(owner, "a field '" + std::string(name) + "'");
  return *v;
}

Result<Dims> read_dims(const Value& v, std::string_view what) {
  if (v.kind() != Kind::kTuple && v.kind() != Kind::kList) return v.mismatch(what, "a tuple of integers");
  if (v.size() > kMaxRank) return v.mismatch(what, "at most " + std::to_string(kMaxRank) + " dimensions");
  Dims dims;
  for (std::size_t i = 0; i < v.size(); ++i) {
    const auto n = v[i].as_int();
    if (!n || *n < 0) return v.mismatch(what, "integers of 0 or more");
    dims.push_back(*n);
  }
  return dims;
}

Result<DType> read_dtype(const Value& properties) {
  // TensorProperties' state is (dtype, layout, requires_grad, memory_format, pin_memory), or those fields by name.
  const Value state = properties.state();
  std::optional<Value> dtype;
  if (state.kind() == Kind::kTuple && state.size() > 0) dtype = state[0];
  if (state.kind() == Kind::kDict) dtype = state.find("dtype");
  if (!dtype || dtype->kind() != Kind::kGlobal || dtype->module() != "torch")
    return properties.mismatch("TensorProperties", "a torch dtype");
  const auto known = dtype_from_torch(dtype->name());
  if (!known) return unsupported("dtype torch." + printable(dtype->name()) + " is not supported");
  return *known;
}

}  // namespace

bool MetadataReader::ClassCheck::is(const Value& object, bool (*matches)(const Value& object)) {
  const std::uint32_t callee = object.callee().identity();
  if (callee_ == callee) return true;
  if (!matches(object)) return false;
  callee_ = callee;
  return true;
}

Status MetadataReader::Fields::look_at(const Value& state) {
  if (state.kind() != Kind::kDict) return state.mismatch(owner_, "a dict of fields");
  state_ = state;
  const std::size_t n = state.size();
  bool is_known = !places_.empty() && n == keys_.size();
  for (std::size_t i = 0; i < n && is_known; ++i) is_known = state.key(i).identity() == keys_[i];
  if (is_known) return {};
  keys_.clear();
  for (std::size_t i = 0; i < n; ++i) keys_.push_back(state.key(i).identity());
  places_.assign(names_.size(), std::nullopt);
  for (std::size_t k = 0; k < names_.size(); ++k)
    for (std::size_t i = 0; i < n; ++i)
      if (state.key(i).as_string() == names_[k]) places_[k] = i;  // the last one counts, as in Python
  return {};
}

std::optional<Value> MetadataReader::Fields::find(std::size_t name) const {
  if (!places_[name]) return std::nullopt;
  return state_->value(*places_[name]);
}

Result<Value> MetadataReader::Fields::get(std::size_t name) const {
  if (auto v = find(name)) return *v;
  return state_->mismatch(owner_, "a field '" + std::string(names_[name]) + "'");
}

Status MetadataReader::check_globals(const pickle::Document& document) const {
  for (const std::string& global : document.globals()) {
    const bool known = std::any_of(std::begin(kKnownPackages), std::end(kKnownPackages),
                                   [&](std::string_view p) { return global.starts_with(p); });
    if (!known)
      return corrupt(path_ + ": the pickle names '" + printable(global) +
                     "', which no checkpoint needs; refused (nothing in it was executed)");
  }
  return {};
}

Status MetadataReader::charge(std::size_t bytes) {
  budget_ -= bytes;
  if (budget_ >= 0) return {};
  return corrupt("the names, boxes and paths of this pickle are more than " + std::to_string(kCopiedPerByte) +
                 " times its size: the same ones are used too often");
}

Status MetadataReader::add(const pickle::Document& document, const std::string& path) {
  path_ = path;
  budget_ = kFreeBytes + kCopiedPerByte * std::ssize(document.bytes());
  familiar_ = {};
  ++pickles_;
  TRY(check_globals(document));
  const Value root = document.root();
  if (!is_checkpoint_class(root, "Metadata")) return root.mismatch("root", "torch.distributed.checkpoint's Metadata");
  const Value state = root.state();
  if (state.kind() != Kind::kDict) return state.mismatch("Metadata", "a dict of fields");

  first_fragment_.clear();
  for (PendingTensor& p : tensors_) {
    first_fragment_.push_back(p.tensor.fragments.size());
    p.by_origin.clear();
  }
  const Value entries = TRY(field(state, "state_dict_metadata", "Metadata"));
  if (entries.kind() != Kind::kDict) return entries.mismatch("state_dict_metadata", "a dict");
  if (pickles_ == 1) tensors_.reserve(std::min(entries.size(), std::size_t{1} << 20));
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto name = entries.key(i).as_string();
    if (!name) return entries.key(i).mismatch("state_dict_metadata", "a string as key");
    TRY(charge(name->size()).context(path_));
    TRY(add_entry(*name, entries.value(i)).context(path_ + ": '" + printable(*name) + "'"));
  }
  const Value storage = TRY(field(state, "storage_data", "Metadata"));
  if (storage.kind() != Kind::kDict) return storage.mismatch("storage_data", "a dict");
  TRY(add_storage(storage));
  const auto paths = state.find("planner_data");
  if (!paths)
    catalog_.warnings.emplace_back(
        "Metadata has no planner_data, which torch always writes: the paths of names in the nested state_dict are "
        "unknown");
  if (paths && paths->kind() == Kind::kDict) TRY(add_paths(*paths));
  read_facts(document, state);
  return {};
}

Status MetadataReader::add_entry(std::string_view name, const Value& entry) {
  if (familiar_.blob.is(entry, is_bytes_entry)) {
    if (tensor_index_.contains(std::string(name))) return corrupt("is a tensor and an object");
    const auto [it, is_new] = blob_index_.emplace(name, blobs_.size());
    if (is_new) {
      blobs_.emplace_back();
      blobs_.back().blob.name = name;
    }
    return {};
  }
  if (!familiar_.tensor.is(entry, is_tensor_entry))
    return entry.mismatch("state_dict_metadata", "TensorStorageMetadata or BytesStorageMetadata");
  if (blob_index_.contains(std::string(name))) return corrupt("is a tensor and an object");
  return add_tensor(name, entry.state());
}

Status MetadataReader::add_tensor(std::string_view name, const Value& state) {
  const Value properties = TRY(field(state, "properties", "TensorStorageMetadata"));
  const DType dtype = TRY(read_dtype(properties));
  const Dims shape = TRY(read_dims(TRY(field(state, "size", "TensorStorageMetadata")), "size"));
  const auto elements = checked_volume(shape);
  if (!elements || !checked_mul(*elements, byte_size(dtype))) return corrupt("size " + to_string(shape) + " overflows");
  const auto [it, is_new] = tensor_index_.emplace(name, tensors_.size());
  if (is_new) {
    tensors_.emplace_back();
    first_fragment_.push_back(0);
    Tensor& t = tensors_.back().tensor;
    t.name = name;
    t.dtype = dtype;
    t.shape = shape;
    t.fragments = FragmentList(shape.rank());
    t.replicas = FragmentList(shape.rank());
    t.located = false;
  }
  PendingTensor& pending = tensors_[it->second];
  if (pending.tensor.shape != shape || pending.tensor.dtype != dtype)
    return corrupt("expected " + to_string(pending.tensor.shape) + " as in the other ranks' metadata, got " +
                   to_string(shape));

  const Value chunks = TRY(field(state, "chunks", "TensorStorageMetadata"));
  if (chunks.kind() != Kind::kList) return unsupported("no list of chunks: the metadata is older than torch 2.0");
  if (rows_ != nullptr) {
    auto boxes = rows_->boxes_of(name, chunks);
    if (!boxes) return chunks.mismatch("chunks", "those that were taken");
    const FragmentList& fragments = boxes->fragments;
    if (!is_new || (!fragments.empty() && boxes->rank != shape.rank())) return corrupt("chunks of another rank");
    for (std::size_t i = 0; i < fragments.size(); ++i) {
      const Box box = fragments.box(i);
      if (!contains(whole(shape), box)) return corrupt("a chunk is outside the tensor");
      // If a non-empty box may begin there too, place() finds out which of the two is stored.
      if (box.empty() && is_place_of_data(box.origin, shape))
        return corrupt("an empty chunk is where a non-empty one may be");
    }
    if (!fragments.empty()) pending.tensor.fragments = fragments;
    pending.stored = std::move(boxes->stored);
    return {};
  }
  TRY(charge(chunks.size() * (sizeof(Extent) + 2 * sizeof(Index) * static_cast<std::size_t>(shape.rank()))));
  pending.tensor.fragments.reserve(pending.tensor.fragments.size() + chunks.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const Value chunk = chunks[i];
    if (!familiar_.chunk.is(chunk, is_chunk)) return chunk.mismatch("chunks", "ChunkStorageMetadata");
    TRY(familiar_.chunk_fields.look_at(chunk.state()));
    Box box;
    box.origin = TRY(read_dims(TRY(familiar_.chunk_fields.get(0)), "offsets"));
    box.shape = TRY(read_dims(TRY(familiar_.chunk_fields.get(1)), "sizes"));
    if (box.origin.rank() != shape.rank() || box.shape.rank() != shape.rank() || !contains(whole(shape), box))
      return corrupt("chunk " + std::to_string(i) + " at " + to_string(box.origin) + " of size " +
                     to_string(box.shape) + " is outside the tensor's size " + to_string(shape));
    pending.tensor.fragments.add(box, {});
    pending.stored.push_back(0);
  }
  return {};
}

Index rank_of_file(std::string_view path) {
  std::string_view name = path.substr(path.rfind('/') + 1);
  const auto rank = take(name, "__") ? take_number(name) : std::nullopt;
  const bool is_data = rank && take(name, "_") && take_number(name) && name == kDataEnding;
  return is_data ? *rank : -1;
}

Result<std::uint32_t> MetadataReader::file_index(std::string_view relative_path) {
  if (const auto it = files_.find(relative_path); it != files_.end()) return it->second;
  if (!is_safe_relative_path(relative_path))
    return corrupt(path_ + ": relative_path '" + printable(relative_path) + "' leaves the checkpoint's directory");
  const auto index = static_cast<std::uint32_t>(catalog_.files.size());
  catalog_.files.push_back({std::string(relative_path), -1, rank_of_file(relative_path)});
  files_.emplace(relative_path, index);
  return index;
}

Status MetadataReader::place_blob(std::string_view name, const Extent& extent) {
  TRY(charge(name.size()).context(path_));
  const auto blob = blob_index_.find(std::string(name));
  if (blob == blob_index_.end()) {
    catalog_.warnings.push_back("storage_data contains '" + printable(name) + "', but state_dict_metadata does not");
    return {};
  }
  PendingBlob& b = blobs_[blob->second];
  if (b.stored)
    b.blob.copies.push_back(extent);  // the value of another rank
  else
    b.blob.extent = extent;
  b.stored = true;
  return {};
}

// The rows' fragments already have their extents.
Status MetadataReader::add_rows(const Value& storage) {
  if (!rows_->is_all_of(storage)) return storage.mismatch("storage_data", "what was taken");
  for (const std::string& path : rows_->files()) TRY(file_index(path));
  for (const StoredRows::Item& item : rows_->blobs()) TRY(place_blob(item.name, item.extent));
  return {};
}

Status MetadataReader::add_storage(const Value& storage) {
  if (rows_ != nullptr) return add_rows(storage);
  // All uses of an FQN share one string of the pickle, so its identity finds the tensor without hashing a million
  // strings.
  std::unordered_map<std::uint32_t, std::size_t> by_identity;
  for (std::size_t i = 0; i < storage.size(); ++i) {
    const Value key = storage.key(i), info = storage.value(i);
    if (!familiar_.index.is(key, is_metadata_index)) return key.mismatch("storage_data", "a MetadataIndex as key");
    if (!familiar_.info.is(info, is_storage_info)) return info.mismatch("storage_data", "_StorageInfo");
    Fields &index_fields = familiar_.index_fields, &info_fields = familiar_.info_fields;
    TRY(index_fields.look_at(key.state()));
    TRY(info_fields.look_at(info.state()));
    const Value fqn = TRY(index_fields.get(0));
    const auto name = fqn.as_string();
    if (!name) return fqn.mismatch("MetadataIndex.fqn", "a string");
    const auto relative_path = TRY(info_fields.get(0)).as_string();
    const auto offset = TRY(info_fields.get(1)).as_int();
    const auto length = TRY(info_fields.get(2)).as_int();
    if (!relative_path || !offset || !length || *offset < 0 || *length < 0 || !checked_add(*offset, *length))
      return info.mismatch("_StorageInfo of '" + printable(*name) + "'", "a path, an offset and a length");
    const Extent extent{TRY(file_index(*relative_path)), *offset, *length};
    const auto transforms = info_fields.find(3);
    const bool encoded = transforms && transforms->kind() == Kind::kList && transforms->size() > 0;
    transforms_ = transforms_ || encoded;
    if (encoded && (transforms->size() > 1 || (*transforms)[0].as_string() != "stream.zstd/1"))
      return unsupported(path_ + ": '" + printable(*name) + "' is stored through the transform " +
                         pickle::print(*transforms) + "; only stream.zstd/1 is supported");

    const auto at = index_fields.find(2);
    if (!at || at->is_none()) {
      TRY(place_blob(*name, extent));
      continue;
    }
    auto known = by_identity.find(fqn.identity());
    if (known == by_identity.end()) {
      TRY(charge(name->size()).context(path_));
      const auto it = tensor_index_.find(std::string(*name));
      if (it == tensor_index_.end())
        return corrupt(path_ + ": storage_data contains a chunk of '" + printable(*name) +
                       "', but state_dict_metadata does not");
      known = by_identity.emplace(fqn.identity(), it->second).first;
    }
    PendingTensor& pending = tensors_[known->second];
    std::optional<Index> hint;
    if (const auto index = index_fields.find(1)) hint = index->as_int();
    if (hint) hint = checked_add(*hint, static_cast<Index>(first_fragment_[known->second]));
    const Dims origin = TRY(read_dims(*at, "MetadataIndex.offset"));
    TRY(place(pending, first_fragment_[known->second], origin, hint, extent).context(path_));
  }
  return {};
}

Status MetadataReader::place(PendingTensor& pending, std::size_t first, const Dims& offset, std::optional<Index> hint,
                             const Extent& extent) {
  FragmentList& fragments = pending.tensor.fragments;
  // torch before 2.8 may give an empty shard the offset of a non-empty one; the stored item is then that of the
  // non-empty one.
  const auto holds_data = [&](std::size_t i) { return !fragments.box(i).empty(); };
  std::optional<std::size_t> found;
  if (hint && *hint >= static_cast<Index>(first) && *hint < std::ssize(fragments)) {
    const std::size_t i = *hint;
    if (fragments.box(i).origin == offset && !pending.stored[i] && holds_data(i)) found = i;
  }
  if (!found) {
    if (pending.by_origin.empty())
      for (const bool with_data : {true, false})
        for (std::size_t i = first; i < fragments.size(); ++i)
          if (holds_data(i) == with_data) pending.by_origin.emplace(fragments.box(i).origin, i);
    for (auto it = pending.by_origin.lower_bound(offset);
         it != pending.by_origin.end() && it->first == offset && !found;) {
      if (!pending.stored[it->second]) found = it->second;
      it = pending.by_origin.erase(it);
    }
  }
  if (!found)
    return corrupt("storage_data has a chunk of '" + printable(pending.tensor.name) + "' at " + to_string(offset) +
                   " that is not one of its chunks, or is listed twice");
  fragments.set_extent(*found, extent);
  pending.stored[*found] = 1;
  return {};
}

Status MetadataReader::add_paths(const Value& paths) {
  for (std::size_t i = 0; i < paths.size(); ++i) {
    const auto name = paths.key(i).as_string();
    const Value parts = paths.value(i);
    if (!name || parts.kind() != Kind::kTuple) continue;  // written by a custom planner
    TRY(charge(name->size() + parts.size() * sizeof(KeyPath::value_type)).context(path_));
    KeyPath path;
    for (std::size_t k = 0; k < parts.size(); ++k) {
      const auto text = parts[k].as_string();
      if (text) TRY(charge(text->size()).context(path_));
      if (text)
        path.emplace_back(std::string(*text));
      else if (const auto number = parts[k].as_int())
        path.emplace_back(*number);
      else
        return parts.mismatch("planner_data of '" + printable(*name) + "'", "a path of strings and integers");
    }
    if (const auto t = tensor_index_.find(std::string(*name)); t != tensor_index_.end())
      tensors_[t->second].tensor.path = std::move(path);
    else if (const auto b = blob_index_.find(std::string(*name)); b != blob_index_.end())
      blobs_[b->second].blob.path = std::move(path);
  }
  return {};
}

void MetadataReader::read_facts(const pickle::Document& document, const Value& state) {
  const std::vector<std::string> globals = document.globals();
  const auto mentions = [&](std::string_view global) {
    return std::any_of(globals.begin(), globals.end(), [&](const std::string& g) { return g.starts_with(global); });
  };
  const auto storage_meta = state.find("storage_meta");
  const bool has_meta = storage_meta && storage_meta->kind() == Kind::kObject;
  if (mentions(kOldPropertiesModule))
    facts_.torch = "2.0 to 2.2";
  else if (state.find("version"))
    facts_.torch = "2.9 or later";
  else if (transforms_ ||
           (has_meta && storage_meta->state().kind() == Kind::kDict && storage_meta->state().find("modules")))
    facts_.torch = "2.7 or later";
  else if (has_meta)
    facts_.torch = "2.4 or later";
  else
    facts_.torch = "2.3 or later, or another writer";
  const auto bytes = document.bytes();
  if (mentions("pathlib._local."))
    facts_.python = "3.13";
  else if (bytes.size() > 1 && bytes[1] == 5)
    facts_.python = "3.14 or later";
  else if (mentions("builtins.getattr"))
    facts_.python = "3.11.0 to 3.11.3";
  else if (bytes.size() > 1 && bytes[1] == 4)
    facts_.python = "3.8 to 3.12";
}

Status MetadataReader::normalize_boxes(PendingTensor& pending) const {
  Tensor& t = pending.tensor;
  FragmentList once(t.shape.rank());
  once.reserve(t.fragments.size());
  std::set<std::pair<Dims, Dims>> seen;
  for (std::size_t i = 0; i < t.fragments.size(); ++i) {
    const Fragment f = t.fragments.get(i);
    if (!pending.stored[i]) {
      if (f.box.empty()) continue;
      return corrupt(path_ + ": " + tensor_text(t.name) + " " + to_string(f.box) +
                     ": storage_data has no entry for it");
    }
    const bool repeated = pickles_ > 1 && !seen.emplace(f.box.origin, f.box.shape).second;
    (repeated ? t.replicas : once).add(f);
  }
  t.fragments = once;
  return {};
}

Status MetadataReader::finish() {
  TRY(catalog_.reserve(catalog_.tensors().size() + tensors_.size()));
  for (PendingTensor& pending : tensors_) {
    Tensor& t = pending.tensor;
    const bool is_plain =
        pickles_ == 1 && std::all_of(pending.stored.begin(), pending.stored.end(), [](auto s) { return s != 0; });
    if (!is_plain) TRY(normalize_boxes(pending));
    TRY(catalog_.add(std::move(t)));
  }
  for (PendingBlob& b : blobs_) {
    if (!b.stored)
      return corrupt(path_ + ": object '" + printable(b.blob.name) + "': storage_data has no entry for it");
    catalog_.blobs.push_back(std::move(b.blob));
  }
  return {};
}

}  // namespace reshard::dcp
