// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "formats/encoding/key_path.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "formats/orbax/chunk_locator.h"
#include "formats/orbax/item_metadata.h"
#include "formats/orbax/item_values.h"
#include "formats/orbax/ocdbt.h"
#include "formats/orbax/orbax.h"
#include "formats/orbax/train_state.h"
#include "formats/orbax/zarr.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/memory_limit.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/source/tensor_source.h"

namespace reshard::orbax {
namespace {

constexpr Index kMaxChunks = Index{1} << 24;     // per array
constexpr Index kBytesOfChunk = 100;             // approximate memory per chunk
constexpr Index kMaxRandomKey = Index{1} << 20;  // bytes of a random key array, which is read as an object
constexpr Index kMaxJson = Index{16} << 20;      // bytes of a JSON item
constexpr Index kMaxObject = Index{1} << 30;     // bytes of an object
constexpr Index kMaxGroup = Index{8} << 20;      // bytes of rows that are best read together
constexpr std::size_t kShown = 3;                // names in a warning

class OrbaxReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);
  Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) override;
  Result<std::string> blob_bytes(const Blob& blob) override;
  std::string describe(const Blob& blob) override;

 private:
  // The state of reading one item.
  struct Reading {
    std::string directory;  // relative to the root
    std::string prefix;     // prefix of the tensors' names
    const PathSnapshot* place = nullptr;
    ItemValues values;
    std::optional<ItemMetadata> metadata = {};
    std::map<std::string, std::string, std::less<>> key_kinds = {};

    // Returns the path of a leaf in the state of all items.
    KeyPath in_state(KeyPath leaf) const {
      if (!prefix.empty()) leaf.insert(leaf.begin(), directory);
      return leaf;
    }
  };
  struct RandomKey {
    Tensor tensor;
    std::string kind;
  };

  Status read_item(const Item& item, bool is_only, const OpenOptions& options);
  Status check_finished(const Reading& now) const;
  Status list_files(const Reading& now);
  Status add_array(Reading& now, std::size_t value, std::string_view suffix, const OpenOptions& options);
  Status add_chunks(Reading& now, const std::string& name, Tensor& tensor, StoredArray& stored,
                    const OpenOptions& options);
  Status add_tensor(Reading& now, const std::string& name, Tensor tensor, StoredArray stored);
  Status check_leaves(const Reading& now, const std::vector<std::string>& names, const OpenOptions& options);
  Status read_strings(const Reading& now);
  Status read_objects(const Reading& now);
  Status read_empty_leaves(const Reading& now);
  Status read_json_items(const Parts& parts);
  Status describe_checkpoint(const Parts& parts);

  Result<Json> value_of(const RandomKey& key);

  std::unordered_map<std::string, RandomKey> random_keys_;
  std::set<std::string> archives_;  // objects that are stored as torch.save archives
  std::set<std::string> other_types_;
  Index databases_ = 0;
  ChunkLocator chunks_{catalog_, files_};
};

constexpr std::string_view kIndex = "tensorstore_index.json";

// Returns whether an array is stored in a directory and not in a database.
Result<bool> has_arrays_of_their_own(const PathSnapshot& item) {
  for (const DirectoryEntry& e : item.entries()) {
    if (!e.is_directory) continue;
    const PathSnapshot& array = *TRY(item.inside(e.name));
    if (array.has_file(kZarr3.substr(1)) || TRY(array.has_hidden_file(kZarr2.substr(1)))) return true;
  }
  return false;
}

Status OrbaxReader::check_finished(const Reading& now) const {
  const PathSnapshot& place = *now.place;
  std::vector<std::string> processes;
  for (const DirectoryEntry& e : place.entries())
    if (e.is_directory && e.name.starts_with(kProcessPrefix)) processes.push_back(e.name);
  const bool is_temporary = place.path().find(kUnfinished) != std::string::npos;
  if (is_temporary)
    return corrupt(place.path() + ": a save that did not finish: Orbax removes '" + std::string(kUnfinished) +
                   "' from the name when all is written. Take an earlier step");
  if (place.has_file(kManifest)) return {};
  if (!processes.empty())
    return corrupt(place.path() + ": a save that did not finish: " + std::string(kManifest) +
                   " is missing, into which Orbax merges what the processes wrote (" + some_of(processes) +
                   "). Take an earlier step");
  if (!now.metadata || place.entries().empty()) return {};
  const std::optional<bool> said = now.metadata->uses_database;
  if (!said && TRY(has_arrays_of_their_own(place))) return {};
  if (said.value_or(true))
    return corrupt(place.path() + ": " + std::string(kManifest) + " is missing, and " +
                   (said ? std::string(kItemMetadata) + " says that the arrays are in a database"
                         : "no array has a directory of its own") +
                   ": it was not copied whole");
  return {};
}

// ---- Arrays

Status OrbaxReader::add_chunks(Reading& now, const std::string& name, Tensor& tensor, StoredArray& stored,
                               const OpenOptions& options) {
  const ZarrArray& array = stored.array;
  tensor.fragments = FragmentList(array.shape.rank());
  if (volume(array.shape) == 0) return {};
  const Dims counts = array.counts();
  const auto count = checked_volume(counts);
  if (!count || *count > kMaxChunks)
    return unsupported(tensor_text(tensor.name) + ": more than " + with_commas(kMaxChunks) + " chunks");
  TRY(may_take(*count * kBytesOfChunk, [&] { return tensor_text(tensor.name) + ": " + count_of(*count, "chunk"); }));
  tensor.located = !array.shards && is_read_in_place(tensor, array);
  if (!array.chunk.filters.empty() && !array.chunk.is_blosc)
    stored.encoding = std::make_shared<ChunkEncoding>(ChunkEncoding{array.chunk.filters, chunk_bytes(array)});
  tensor.fragments.reserve(*count);
  Dims number = Dims::filled(counts.rank(), 0);
  for (Index i = 0; i < *count; ++i) {
    const Box box = array.box_of(number);
    const auto value = now.values.all().find(name + "/" + array.key_of(number));
    catalog_.shares_extents = catalog_.shares_extents || !value;
    auto chunk = value ? chunks_.stored_chunk(tensor, stored, box, TRY(now.values.extent(*value)))
                       : chunks_.missing_chunk(tensor, stored, box);
    if (!chunk && !value && !options.validated) {
      catalog_.warnings.push_back(chunk.error().message());
      return {};  // an audit reports the missing chunk
    }
    tensor.fragments.add(TRY(std::move(chunk)));
    for (int d = counts.rank() - 1; d >= 0 && ++number[d] == counts[d]; --d) number[d] = 0;
  }
  return {};
}

Status OrbaxReader::add_tensor(Reading& now, const std::string& name, Tensor tensor, StoredArray stored) {
  const auto kind = now.key_kinds.find(name);
  const bool is_key = kind != now.key_kinds.end() && tensor.dtype == DType::kUint32 && !tensor.fragments.empty() &&
                      tensor.bytes() <= kMaxRandomKey;
  if (!tensor.located) chunks_.keep(tensor.name, std::move(stored));
  if (!is_key) return catalog_.add(std::move(tensor));
  catalog_.blobs.push_back({tensor.name, {tensor.fragments.extent(0).file, 0, 0}, tensor.path});
  const std::string key = tensor.name;
  random_keys_.emplace(key, RandomKey{std::move(tensor), kind->second});
  return {};
}

Status OrbaxReader::add_array(Reading& now, std::size_t value, std::string_view suffix, const OpenOptions& options) {
  const std::string_view key = now.values.all().key(value);
  const std::string name(key.substr(0, key.size() - suffix.size()));
  if (now.key_kinds.contains(name) && archives_.contains(now.prefix + name)) {
    const auto is_its_own = [&](std::size_t i) { return now.values.all().key(i).starts_with(name + "/"); };
    for (std::size_t i = value + 1; i-- > 0 && is_its_own(i);) now.values.use(i);
    for (std::size_t i = value; i < now.values.all().size() && is_its_own(i); ++i) now.values.use(i);
    return {};  // the object is the same
  }
  const std::string place = path_join(now.place->path(), key);
  const std::string text = TRY(now.values.text(value, printable(place)));
  StoredArray stored;
  stored.array = TRY(suffix == kZarr2 ? parse_zarr2(text, printable(place)) : parse_zarr3(text, printable(place)));
  const ZarrArray& array = stored.array;
  stored.stores_fill_values = now.metadata && now.metadata->stores_fill_values;
  if (!stored.stores_fill_values && !array.fill.empty()) stored.fill = now.values.add(array.fill);
  Tensor tensor;
  tensor.name = now.prefix + name;
  // Keys of Orbax may contain slashes; those of others are paths in a tree.
  if (!now.metadata && (!now.place->has_file(kManifest) || has_step_files(*now.place)))
    std::replace(tensor.name.begin(), tensor.name.end(), '/', '.');
  tensor.dtype = array.dtype;
  tensor.shape = array.shape;
  const Leaf* leaf = nullptr;
  if (now.metadata)
    if (const auto at = now.metadata->leaves.find(name); at != now.metadata->leaves.end()) leaf = &at->second;
  if (leaf) tensor.path = now.in_state(leaf->path);
  if (array.stored_type == "int4" || array.stored_type == "uint4") other_types_.insert(array.stored_type);
  TRY(add_chunks(now, name, tensor, stored, options));
  if (!array.chunk.filters.empty() && array.shape.rank() > 0 && array.shape[0] > 0) {
    const auto group = checked_mul(tensor.bytes() / array.shape[0], array.chunk.shape[0]);
    if (is_read_in_place(tensor, array) && group && *group <= kMaxGroup) tensor.row_group = array.chunk.shape[0];
  }
  return add_tensor(now, name, std::move(tensor), std::move(stored));
}

// Returns the paths of the arrays that EasyDeL (eformer/serialization/serialization.py) lists in an index.
Result<std::vector<std::string>> indexed_arrays(const PathSnapshot& place) {
  std::vector<std::string> out;
  if (!place.has_file(kIndex)) return out;
  const std::string path = path_join(place.path(), kIndex);
  const Json json = TRY(parse_json(TRY(read_whole_file(path, kMaxJson)), path));
  const auto add = [&](const Json& arrays) -> Status {
    for (const Json& array : TRY(arrays.as_array()))
      if (array.contains("path")) out.emplace_back(TRY(array.get_string("path")));
    return {};
  };
  if (const Json* const arrays = json.find("arrays")) TRY(add(*arrays).context(path));
  if (json.contains("prefixes"))
    for (const Json::Member& tree : TRY(json.get_object("prefixes").context(path))) TRY(add(tree.value).context(path));
  return out;
}

// Fails if a leaf of the tree that has data, or an array of an index, is not stored.
Status OrbaxReader::check_leaves(const Reading& now, const std::vector<std::string>& names,
                                 const OpenOptions& options) {
  std::vector<std::string> missing = TRY(indexed_arrays(*now.place));
  if (now.metadata)
    for (const auto& [name, leaf] : now.metadata->leaves)
      if (leaf.is_array()) missing.push_back(name);
  std::erase_if(missing, [&](const auto& name) { return std::binary_search(names.begin(), names.end(), name); });
  if (missing.empty()) return {};
  const std::string text = path_join(now.place->path(), now.metadata ? kItemMetadata : kIndex) + " names " +
                           names_text(missing, "array") + ", and none is stored under " +
                           (missing.size() == 1 ? "that name" : "those names");
  if (options.validated) return corrupt(text + ": it was lost");
  catalog_.warnings.push_back(text);
  return {};
}

Status OrbaxReader::read_strings(const Reading& now) {
  if (!now.place->has_file(kStrings)) return {};
  const std::string path = path_join(now.place->path(), kStrings);
  const Json json = TRY(parse_json(TRY(read_whole_file(path, kMaxJson)), path));
  const auto file = static_cast<std::uint32_t>(catalog_.files.size());
  const Index size = TRY(TRY(files_.open(path))->size());
  catalog_.files.push_back({below(now.directory, kStrings), size});
  const auto members = TRY(json.as_object().context(path));
  for (const Json::Member& member : members) {
    if (archives_.contains(now.prefix + member.key)) continue;  // the same, as another format stored it
    KeyPath keys = {member.key};
    if (now.metadata)
      if (const auto leaf = now.metadata->leaves.find(member.key); leaf != now.metadata->leaves.end())
        keys = leaf->second.path;
    keys = now.in_state(std::move(keys));
    TRY(add_json(now.prefix + member.key, std::move(keys), file, member.value));
  }
  return {};
}

// Adds the leaves without data as objects: a tree without them would not be the one that was saved.
Status OrbaxReader::read_empty_leaves(const Reading& now) {
  if (!now.metadata) return {};
  std::optional<std::uint32_t> file;
  for (const auto& [stored, leaf] : now.metadata->leaves) {
    const std::string name = now.prefix + stored;
    if (!leaf.is_empty || archives_.contains(name)) continue;
    if (!file) {
      file = static_cast<std::uint32_t>(catalog_.files.size());
      const auto entry = TRY(entry_at(path_join(now.place->path(), kItemMetadata)));
      catalog_.files.push_back({below(now.directory, kItemMetadata), entry ? entry->size : -1});
    }
    const KeyPath path = now.in_state(leaf.path);
    pickle::PickleWriter w;
    if (leaf.type == "Dict")
      w.empty_dict();
    else if (leaf.type == "List")
      w.empty_list();
    else if (leaf.type == "Tuple")
      w.empty_tuple();
    else
      w.none();
    TRY(add_pickled(name, path, *file, std::move(w).finish()));
  }
  return {};
}

// Reads the list of objects that reshard stored next to the arrays.
Status OrbaxReader::read_objects(const Reading& now) {
  if (!now.place->has_file(kObjects)) return {};
  const std::string path = path_join(now.place->path(), kObjects);
  const Json json = TRY(parse_json(TRY(read_whole_file(path, kMaxJson)), path));
  const auto file = static_cast<std::uint32_t>(catalog_.files.size());
  catalog_.files.push_back({below(now.directory, kObjectBytes), 0});
  Index& size = catalog_.files.back().size;
  size = TRY(TRY(files_.open(catalog_.file_path(file)))->size());
  for (const Json& object : TRY(json.get_array("objects").context(path))) {
    const std::string stored(TRY(object.get_string("name").context(path))), name = now.prefix + stored;
    const std::string text(TRY(object.get_string("path").context(path)));
    Extent extent{file, 0, 0};
    extent.offset = TRY(object.get_index("offset").context(path));
    extent.length = TRY(object.get_index("length").context(path));
    if (!fits_inside(extent.offset, extent.length, size) || extent.length > kMaxObject)
      return corrupt(path + ": object '" + printable(name) + "': expected at most " + human_bytes(kMaxObject) +
                     " inside of " + std::string(kObjectBytes));
    KeyPath keys = TRY(parse_key_path(text, path));
    keys = now.in_state(keys.empty() ? KeyPath{stored} : std::move(keys));
    if (!archives_.insert(name).second) return corrupt(path + ": object '" + printable(name) + "' is listed twice");
    catalog_.blobs.push_back({name, extent, std::move(keys)});
  }
  return {};
}

// Adds the item's other files, so that they count as the checkpoint's.
Status OrbaxReader::list_files(const Reading& now) {
  std::set<std::string> data;
  for (const CatalogFile& file : catalog_.files) data.insert(file.path);
  const bool has_database = now.place->has_file(kManifest);
  for (const DirectoryEntry& file : TRY(files_in(*now.place))) {
    const std::string first = file.name.substr(0, file.name.find('/'));
    const bool is_own = !has_database || first.starts_with("_") || first.starts_with("manifest.") || first == "d" ||
                        first.starts_with("ocdbt.process_") || first == kArrayMetadatas ||
                        first == "commit_success.txt" || first == "process_metadata" || first == "descriptor";
    const std::string name = below(now.directory, file.name);
    if (is_own && !data.contains(name)) catalog_.metadata_files.push_back(name);
  }
  return {};
}

// Reads an item: its metadata, and its arrays and other values.
Status OrbaxReader::read_item(const Item& item, bool is_only, const OpenOptions& options) {
  Reading now{item.name, is_only ? "" : item.name + ".", item.place, {*item.place, item.name, catalog_, files_}};
  now.metadata = TRY(read_item_metadata(*item.place));
  TRY(check_finished(now));
  now.key_kinds = TRY(read_key_kinds(*item.place));
  TRY(now.values.read());
  if (now.values.has_database()) ++databases_;
  TRY(read_objects(now));
  std::vector<std::string> names;
  for (std::size_t i = 0; i < now.values.all().size(); ++i)
    for (const std::string_view suffix : {kZarr2, kZarr3}) {
      if (!now.values.all().key(i).ends_with(suffix)) continue;
      const std::string_view key = now.values.all().key(i);
      TRY(add_array(now, i, suffix, options));
      names.emplace_back(key.substr(0, key.size() - suffix.size()));
    }
  std::sort(names.begin(), names.end());
  TRY(check_leaves(now, names, options));
  TRY(now.values.keep_memory());
  TRY(read_strings(now));
  TRY(read_empty_leaves(now));
  TRY(list_files(now));
  std::vector<std::string> unused;
  for (std::size_t i = 0; i < now.values.all().size() && databases_ > 0; ++i)
    if (!now.values.is_used(i) && unused.size() <= kShown) unused.push_back(printable(now.values.all().key(i)));
  if (!unused.empty() && now.place->has_file(kManifest))
    catalog_.warnings.push_back(
        path_join(now.place->path(), kManifest) +
        ": some keys belong to neither the metadata nor the chunks of an array: " + some_of(unused) + ". Not read.");
  if (now.place->has_file("checkpoint"))
    catalog_.notes.push_back("Not read: " + path_join(now.place->path(), "checkpoint") +
                             ", Flax's msgpack file, which may hold small values.");
  return {};
}

// ---- The checkpoint

Status OrbaxReader::read_json_items(const Parts& parts) {
  for (const std::string& name : parts.json) {
    const std::string file = path_join(name, "metadata"), path = path_join(catalog_.root, file);
    const IoFailureWatch watch;
    const auto text = read_whole_file(path, kMaxJson);
    if (!text && watch.may_be_io_failure(text.error())) return text.error();
    const auto json = text ? parse_json(*text, path) : Result<Json>(text.error());
    if (!json) {
      catalog_.notes.push_back("Not read: item '" + printable(name) + "': " + json.error().message());
      continue;
    }
    catalog_.files.push_back({file, std::ssize(*text)});
    TRY(add_json(name, {name}, static_cast<std::uint32_t>(catalog_.files.size() - 1), *json));
  }
  for (const std::string& name : parts.others)
    catalog_.notes.push_back("Not read: '" + printable(name) + "/', which contains no arrays and no JSON.");
  return {};
}

Status OrbaxReader::describe_checkpoint(const Parts& parts) {
  std::string how = databases_ > 0 ? "Orbax, OCDBT" : "Orbax, a directory for each array";
  if (parts.items.size() > 1) how += ", " + count_of(std::ssize(parts.items), "item");
  catalog_.attributes.emplace_back("format", how);
  for (const Item& item : parts.items)
    if (std::string mesh = TRY(read_mesh(*item.place)); !mesh.empty()) {
      catalog_.attributes.emplace_back("saved", "from a mesh of " + mesh);
      break;
    }
  // If an item is opened alone, its step's metadata describes it, provided the step can be listed.
  const bool is_inside = parts.directory->has_file(kCheckpointMetadata);
  const PathSnapshot* around = is_inside ? parts.directory : nullptr;
  if (!is_inside)
    TRY(look_if_possible([&]() -> Status {
      around = TRY(parts.directory->parent());
      return {};
    }));
  if (!around) return {};
  const PathSnapshot& step = *around;
  const auto text = TRY(step.text_of(kCheckpointMetadata, kMaxJson));
  if (!text) return {};
  if (is_inside) catalog_.metadata_files.emplace_back(kCheckpointMetadata);
  const auto json = parse_json(*text, path_join(step.path(), kCheckpointMetadata));
  const Json* const custom = json ? json->find("custom_metadata") : nullptr;
  if (custom && custom->is_object() && custom->size() > 0)
    catalog_.attributes.emplace_back("custom metadata", to_text(*custom));
  return {};
}

Status OrbaxReader::open(const PathSnapshot& place, const OpenOptions& options) {
  const Parts parts = TRY(find_parts_of(*TRY(place.directory())));
  catalog_.root = parts.directory->path();
  for (const Item& item : parts.items) TRY(read_item(item, parts.items.size() == 1, options));
  TRY(read_json_items(parts));
  TRY(describe_checkpoint(parts));
  if (catalog_.tensors().empty() && catalog_.blobs.empty())
    return corrupt(catalog_.root + ": no array is stored: the save did not finish, or it was not copied whole");
  if (!other_types_.empty())
    catalog_.notes.push_back("Elements of type " + join({other_types_.begin(), other_types_.end()}, " and ") +
                             " are read as uint8, as they are stored: each in the lower 4 bits of a byte.");
  std::sort(catalog_.metadata_files.begin(), catalog_.metadata_files.end());
  catalog_.metadata_files.erase(std::unique(catalog_.metadata_files.begin(), catalog_.metadata_files.end()),
                                catalog_.metadata_files.end());
  catalog_.sort_by_name();
  set_state_keys(catalog_);
  warn_of_adapters(catalog_);
  if (!options.validated) return {};
  TRY(validate(catalog_, options.files_too));
  return check_extents_disjoint(catalog_, SharedExtents::kRefused);
}

Status OrbaxReader::locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) {
  std::vector<Tensor>& own = catalog_.own_tensors();
  std::vector<Tensor*> wanted;
  for (const std::size_t i : tensors)
    if (!own[i].located) wanted.push_back(&own[i]);
  return chunks_.locate(wanted, threads, spool);
}

// ---- Objects

// Returns a random key in the form of jax.random.wrap_key_data: its numbers, their shape, and the generator's name.
Result<Json> OrbaxReader::value_of(const RandomKey& key) {
  Catalog alone;
  alone.root = catalog_.root;
  Tensor tensor = key.tensor;
  if (!tensor.located) TRY(chunks_.locate({&tensor}, 1, ""));
  alone.files = catalog_.files;
  TRY(alone.add(tensor));
  std::vector<std::uint32_t> numbers(tensor.elements());
  std::vector<std::byte> scratch(std::size_t{kMaxRandomKey});
  FileSource source(alone, files_);
  TRY(source.read(0, whole(tensor.shape), std::as_writable_bytes(std::span(numbers)), scratch));
  Json shape = Json::array(), data = Json::array();
  for (const Index extent : tensor.shape) shape.push_back(extent);
  for (const std::uint32_t number : numbers) data.push_back(number);
  return Json::object().set("random_key_impl", key.kind).set("shape", shape).set("key_data", data);
}

Result<std::string> OrbaxReader::blob_bytes(const Blob& blob) {
  if (archives_.contains(blob.name)) {
    const auto file = TRY(files_.open(catalog_.file_path(blob.extent.file)));
    TRY(may_take(blob.extent.length, [&] { return "object '" + printable(blob.name) + "'"; }));
    std::string bytes(blob.extent.length, '\0');
    TRY(file->read_at(blob.extent.offset, {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}));
    TRY(torch_archive::check_item(*file, blob.extent.offset, blob.extent.length)
            .context("object '" + printable(blob.name) + "'"));
    return bytes;
  }
  const auto key = random_keys_.find(blob.name);
  if (key == random_keys_.end()) return TensorFileReader::blob_bytes(blob);
  return json_item(TRY(value_of(key->second)));
}

std::string OrbaxReader::describe(const Blob& blob) {
  if (archives_.contains(blob.name)) {
    const auto bytes = blob_bytes(blob);
    const auto document = bytes ? torch_archive::read_object_item(*bytes) : Result<pickle::Document>(bytes.error());
    return document ? pickle::print(document->root(), 2, 4) : "";
  }
  const auto key = random_keys_.find(blob.name);
  if (key == random_keys_.end()) return TensorFileReader::describe(blob);
  return "a random key, " + printable(key->second.kind) + " " + to_string(key->second.tensor.shape);
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<OrbaxReader>(place, options);
}

}  // namespace reshard::orbax
