// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <unordered_map>

#include "formats/encoding/key_path.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "formats/encoding/zstd_frame.h"
#include "formats/orbax/item_metadata.h"
#include "formats/orbax/ocdbt.h"
#include "formats/orbax/orbax.h"
#include "formats/orbax/train_state.h"
#include "formats/orbax/zarr.h"
#include "lib/base/memory_limit.h"
#include "lib/base/names.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/blosc.h"
#include "lib/device/codec.h"
#include "lib/device/crc32.h"
#include "lib/source/tensor_source.h"

namespace reshard::orbax {
namespace {

constexpr Index kMaxChunks = Index{1} << 24;     // per array
constexpr Index kBytesOfChunk = 100;             // approximate memory per chunk
constexpr Index kBatch = 4096;                   // chunks located at a time
constexpr Index kMaxRandomKey = Index{1} << 20;  // bytes of a random key array, which is read as an object
constexpr Index kMaxJson = Index{16} << 20;      // bytes of a JSON item
constexpr Index kMaxObject = Index{1} << 30;     // bytes of an object
constexpr Index kMaxGroup = Index{8} << 20;      // bytes of rows that are best read together
constexpr std::size_t kShown = 3;                // names in a warning
// Chunks up to the first size, of tensors up to the second, are decoded each time they are read. Others are decoded
// once, into the spool: a target with other cuts or a transpose would decode each chunk many times.
constexpr Index kMaxInPlace = Index{8} << 20, kMaxTensorInPlace = Index{32} << 20;
constexpr std::string_view kInlineName = "(values inside nodes)", kSpoolName = "(decoded chunks)";

// The stored form of an array, kept for locate().
struct Stored {
  ZarrArray array;
  bool stores_fill_values = false;
  std::optional<Extent> fill;                          // one element of the fill value
  std::shared_ptr<const ChunkEncoding> encoding = {};  // for chunks that are decoded in place

  bool is_fill(const Fragment& chunk) const { return fill && chunk.extent == *fill; }
};

std::string below(const std::string& directory, std::string_view name) {
  return directory.empty() ? std::string(name) : path_join(directory, name);
}

Index chunk_bytes(const ZarrArray& array) { return volume(array.chunk.shape) * byte_size(array.dtype); }

std::string text_of(const Tensor& tensor, const Box& box) { return tensor_text(tensor.name) + " " + to_string(box); }

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
    std::optional<ItemMetadata> metadata = {};
    std::map<std::string, std::string, std::less<>> key_kinds = {};
    KeyValues values = {};
    std::vector<bool> used = {};                             // by value
    std::vector<std::optional<std::uint32_t>> file_of = {};  // catalog index, by the values' file
    std::optional<std::uint32_t> memory_file = {};           // catalog index of the values inside nodes
    std::string memory = {};                                 // its content
  };
  struct RandomKey {
    Tensor tensor;
    std::string kind;
  };
  // A stored item that becomes chunks.
  struct Job {
    const Tensor* tensor = nullptr;
    const Stored* stored = nullptr;
    Fragment item = {};
    Index spool_at = 0;
    std::vector<Fragment> chunks = {};
  };

  Status read_item(const Item& item, bool is_only, const OpenOptions& options);
  Status read_values(Reading& now);
  Status check_finished(const Reading& now) const;
  Status list_files(const Reading& now);
  Result<Extent> place_of(Reading& now, std::size_t value);
  Result<std::string> text_of_value(Reading& now, std::size_t value, const std::string& name);
  Status add_array(Reading& now, std::size_t value, std::string_view suffix, const OpenOptions& options);
  Result<Fragment> stored_chunk(const Tensor& tensor, const Stored& stored, const Box& box, const Extent& extent);
  Status add_chunks(Reading& now, const std::string& name, Tensor& tensor, Stored& stored, const OpenOptions& options);
  Result<Fragment> whole_chunk(const Tensor& tensor, const Stored& stored, const Box& box, const Extent& extent);
  Result<Fragment> missing_chunk(const Tensor& tensor, const Stored& stored, const Box& box) const;
  Status add_tensor(Reading& now, const std::string& name, Tensor tensor, Stored stored);
  Status check_leaves(const Reading& now, const std::vector<std::string>& names, const OpenOptions& options);
  Status read_strings(const Reading& now);
  Status read_objects(const Reading& now);
  Status read_empty_leaves(const Reading& now);
  Status read_json_items(const Parts& parts);
  std::uint32_t memory_file(Reading& now);
  Status keep_memory(Reading& now);
  Status describe_checkpoint(const Parts& parts);

  Status locate_tensors(const std::vector<Tensor*>& tensors, int threads, const std::string& spool);
  Status make_room(const std::vector<Tensor*>& tensors, const std::string& spool);
  Status locate_batch(std::vector<Job>& jobs, int threads);
  Status locate_item(Job& job);
  Status locate_in_shard(Job& job);
  Status decode_to_spool(const Job& job, Fragment& chunk, Index at);
  Result<Index> decode_frame(const File& file, const Extent& frame, Index limit, Index at);
  Status decode_whole(const ChunkLayout& layout, const File& file, Fragment& chunk, Index bytes, Index at,
                      const std::string& place);
  Result<Json> value_of(const RandomKey& key);

  std::unordered_map<std::string, Stored> stored_;  // of each tensor that is not located yet
  std::unordered_map<std::string, RandomKey> random_keys_;
  std::set<std::string> archives_;  // objects that are stored as torch.save archives
  std::set<std::string> other_types_;
  bool has_fill_ = false;
  Index databases_ = 0, directories_ = 0;
  std::uint32_t spool_file_ = 0;
  Index spooled_ = 0;
  std::shared_ptr<const File> spool_;
  std::mutex large_window_;  // held while a frame is decoded that needs much memory
};

// ---- Keys and values

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
                   " is missing, into which what the processes wrote is merged at the end (" + some_of(processes) +
                   "). Take an earlier step");
  if (now.metadata && now.metadata->uses_database && !place.entries().empty())
    return corrupt(place.path() + ": " + std::string(kManifest) + " is missing, and " + std::string(kItemMetadata) +
                   " says that the arrays are in a database: it was not copied whole");
  return {};
}

namespace {

// Appends the files below a directory, by paths that begin with `prefix`.
Status add_files(const PathSnapshot& directory, const std::string& prefix, int depth,
                 std::vector<DirectoryEntry>& out) {
  constexpr int kMaxDepth = 32;
  if (depth > kMaxDepth)
    return corrupt(directory.path() + ": expected directories nested at most " + std::to_string(kMaxDepth) + " deep");
  for (const DirectoryEntry& entry : directory.entries()) {
    if (entry.is_directory) {
      TRY(add_files(*TRY(directory.inside(entry.name)), prefix + entry.name + "/", depth + 1, out));
    } else {
      out.push_back(entry);
      out.back().name = prefix + entry.name;
    }
  }
  return {};
}

// Returns all files below a directory, sorted by their paths relative to it.
Result<std::vector<DirectoryEntry>> files_in(const PathSnapshot& directory) {
  std::vector<DirectoryEntry> out;
  TRY(add_files(directory, "", 0, out));
  std::sort(out.begin(), out.end(), [](const DirectoryEntry& a, const DirectoryEntry& b) { return a.name < b.name; });
  return out;
}

}  // namespace

Status OrbaxReader::read_values(Reading& now) {
  if (now.place->has_file(kManifest)) {
    ++databases_;
    Database database = TRY(read_database(*now.place, files_));
    now.values = std::move(database.values);
    catalog_.has_other_bytes = true;
  } else {
    ++directories_;
    for (const DirectoryEntry& file : TRY(files_in(*now.place))) {
      TRY(now.values.add(file.name, {static_cast<std::uint32_t>(now.values.files.size()), 0, file.size}));
      now.values.files.push_back(file.name);
    }
  }
  now.used.assign(now.values.size(), false);
  now.file_of.assign(now.values.files.size(), std::nullopt);
  return {};
}

std::uint32_t OrbaxReader::memory_file(Reading& now) {
  if (!now.memory_file) {
    now.memory_file = static_cast<std::uint32_t>(catalog_.files.size());
    catalog_.files.push_back({below(now.directory, kInlineName), 0});
  }
  return *now.memory_file;
}

// Returns the extent of a value in the catalog's files.
Result<Extent> OrbaxReader::place_of(Reading& now, std::size_t value) {
  now.used[value] = true;
  Extent out = now.values.extent(value);
  if (out.file == KeyValues::kInline) {
    const auto begin = static_cast<std::size_t>(out.offset), length = static_cast<std::size_t>(out.length);
    out = {memory_file(now), std::ssize(now.memory), out.length};
    now.memory += std::string_view(now.values.inline_bytes()).substr(begin, length);
    return out;
  }
  std::optional<std::uint32_t>& file = now.file_of[out.file];
  if (!file) {
    file = static_cast<std::uint32_t>(catalog_.files.size());
    const std::string name = below(now.directory, now.values.files[out.file]);
    const auto entry = TRY(entry_at(path_join(catalog_.root, name)));
    catalog_.files.push_back({name, entry && !entry->is_directory ? entry->size : -1});
  }
  out.file = *file;
  return out;
}

Result<std::string> OrbaxReader::text_of_value(Reading& now, std::size_t value, const std::string& name) {
  const Extent& extent = now.values.extent(value);
  if (extent.length > kMaxArrayJson)
    return unsupported(name + ": " + human_bytes(extent.length) + "; at most " + human_bytes(kMaxArrayJson) +
                       " are read");
  now.used[value] = true;
  if (extent.file == KeyValues::kInline)
    return now.values.inline_bytes().substr(static_cast<std::size_t>(extent.offset),
                                            static_cast<std::size_t>(extent.length));
  const auto file = TRY(files_.open(path_join(now.place->path(), now.values.files[extent.file])));
  std::string text(static_cast<std::size_t>(extent.length), '\0');
  TRY(file->read_at(extent.offset, {reinterpret_cast<std::byte*>(text.data()), text.size()}).context(name));
  return text;
}

// ---- Arrays

// Returns the fill value for a chunk that is not stored. Fails if the checkpoint stores fill values, so that the chunk
// is lost.
Result<Fragment> OrbaxReader::missing_chunk(const Tensor& tensor, const Stored& stored, const Box& box) const {
  const std::string what = catalog_.root + ": " + text_of(tensor, box) + ": chunk is not stored";
  if (stored.stores_fill_values)
    return corrupt(what + ", and " + std::string(kItemMetadata) +
                   " says that chunks of the fill value are stored, too: it was lost");
  if (!stored.fill) return unsupported(what + ", and its fill value is not one that is read");
  Fragment out;
  out.box = box;
  out.strides = Dims::filled(box.rank(), 0);
  out.extent = *stored.fill;
  return out;
}

// Returns a stored chunk without its encoding, which the caller adds.
Result<Fragment> OrbaxReader::whole_chunk(const Tensor& tensor, const Stored& stored, const Box& box,
                                          const Extent& extent) {
  const ZarrArray& array = stored.array;
  const Index bytes = chunk_bytes(array);
  const bool is_plain = array.chunk.is_plain();
  // Incompressible data grows only a little.
  const Index longest = is_plain ? bytes : checked_add(bytes, bytes / 8 + 4096).value_or(bytes);
  if (extent.length > longest || (is_plain && extent.length != bytes))
    return corrupt(at(catalog_.file_path(extent.file), extent.offset) + ": " + text_of(tensor, box) +
                   ": expected a chunk of " + (is_plain ? "" : "at most ") +
                   bytes_of(static_cast<std::uint64_t>(longest)) + ", got " + std::to_string(extent.length));
  Fragment out;
  out.box = box;
  out.strides = array.chunk.strides();
  out.extent = extent;
  out.big_endian = array.is_big_endian;
  return out;
}

bool is_read_in_place(const Tensor& tensor, const ZarrArray& array) {
  if (array.chunk.is_plain() || array.chunk.is_blosc) return !array.chunk.is_blosc;
  return chunk_bytes(array) <= kMaxInPlace && tensor.bytes() <= kMaxTensorInPlace;
}

// Returns the chunk or shard with this number: its location if it is stored, and its encoding if the tensor is located.
Result<Fragment> OrbaxReader::stored_chunk(const Tensor& tensor, const Stored& stored, const Box& box,
                                           const Extent& extent) {
  if (tensor.located) {
    Fragment out = TRY(whole_chunk(tensor, stored, box, extent));
    out.encoding = stored.encoding;
    return out;
  }
  Fragment out;
  out.box = box;
  out.strides = row_major_strides(box.shape);
  out.extent = extent;
  return out;
}

Status OrbaxReader::add_chunks(Reading& now, const std::string& name, Tensor& tensor, Stored& stored,
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
  tensor.fragments.reserve(static_cast<std::size_t>(*count));
  Dims number = Dims::filled(counts.rank(), 0);
  for (Index i = 0; i < *count; ++i) {
    const Box box = array.box_of(number);
    const auto value = now.values.find(name + "/" + array.key_of(number));
    has_fill_ = has_fill_ || !value;
    auto chunk =
        value ? stored_chunk(tensor, stored, box, TRY(place_of(now, *value))) : missing_chunk(tensor, stored, box);
    if (!chunk && !value && !options.validated) {
      catalog_.warnings.push_back(chunk.error().message());
      return {};  // an audit reports the missing chunk
    }
    tensor.fragments.add(TRY(std::move(chunk)));
    for (int d = counts.rank() - 1; d >= 0 && ++number[d] == counts[d]; --d) number[d] = 0;
  }
  return {};
}

Status OrbaxReader::add_tensor(Reading& now, const std::string& name, Tensor tensor, Stored stored) {
  const auto kind = now.key_kinds.find(name);
  const bool is_key = kind != now.key_kinds.end() && tensor.dtype == DType::kUint32 && !tensor.fragments.empty() &&
                      tensor.bytes() <= kMaxRandomKey;
  if (!tensor.located) stored_.emplace(tensor.name, std::move(stored));
  if (!is_key) return catalog_.add(std::move(tensor));
  catalog_.blobs.push_back({tensor.name, {tensor.fragments.extent(0).file, 0, 0}, tensor.path});
  const std::string key = tensor.name;
  random_keys_.emplace(key, RandomKey{std::move(tensor), kind->second});
  return {};
}

Status OrbaxReader::add_array(Reading& now, std::size_t value, std::string_view suffix, const OpenOptions& options) {
  const std::string_view key = now.values.key(value);
  const std::string name(key.substr(0, key.size() - suffix.size()));
  if (now.key_kinds.contains(name) && archives_.contains(now.prefix + name)) {
    const auto is_its_own = [&](std::size_t i) { return now.values.key(i).starts_with(name + "/"); };
    for (std::size_t i = value + 1; i-- > 0 && is_its_own(i);) now.used[i] = true;
    for (std::size_t i = value; i < now.values.size() && is_its_own(i); ++i) now.used[i] = true;
    return {};  // the object is the same
  }
  const std::string place = path_join(now.place->path(), key);
  const std::string text = TRY(text_of_value(now, value, printable(place)));
  Stored stored;
  stored.array = TRY(suffix == kZarr2 ? parse_zarr2(text, printable(place)) : parse_zarr3(text, printable(place)));
  const ZarrArray& array = stored.array;
  stored.stores_fill_values = now.metadata && now.metadata->stores_fill_values;
  if (!stored.stores_fill_values && !array.fill.empty()) {
    stored.fill = Extent{memory_file(now), std::ssize(now.memory), std::ssize(array.fill)};
    now.memory += as_string(array.fill);
  }
  Tensor tensor;
  tensor.name = now.prefix + name;
  // Keys of Orbax may contain slashes; the trees of others are nested directories.
  if (!now.metadata && !now.place->has_file(kManifest)) std::replace(tensor.name.begin(), tensor.name.end(), '/', '.');
  tensor.dtype = array.dtype;
  tensor.shape = array.shape;
  const Leaf* leaf = nullptr;
  if (now.metadata)
    if (const auto at = now.metadata->leaves.find(name); at != now.metadata->leaves.end()) leaf = &at->second;
  if (leaf && now.prefix.empty()) tensor.path = leaf->path;
  if (array.stored_type == "int4" || array.stored_type == "uint4") other_types_.insert(array.stored_type);
  TRY(add_chunks(now, name, tensor, stored, options));
  if (!array.chunk.filters.empty() && array.shape.rank() > 0 && array.shape[0] > 0) {
    const auto group = checked_mul(tensor.bytes() / array.shape[0], array.chunk.shape[0]);
    if (is_read_in_place(tensor, array) && group && *group <= kMaxGroup) tensor.row_group = array.chunk.shape[0];
  }
  return add_tensor(now, name, std::move(tensor), std::move(stored));
}

// Fails if a leaf of the tree that has data is not stored.
Status OrbaxReader::check_leaves(const Reading& now, const std::vector<std::string>& names,
                                 const OpenOptions& options) {
  if (!now.metadata) return {};
  std::vector<std::string> missing;
  for (const auto& [name, leaf] : now.metadata->leaves)
    if (leaf.is_array() && !std::binary_search(names.begin(), names.end(), name)) missing.push_back(name);
  if (missing.empty()) return {};
  const std::string text = path_join(now.place->path(), kItemMetadata) + " names " + names_text(missing, "array") +
                           ", and none is stored under " + (missing.size() == 1 ? "that name" : "those names");
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
    KeyPath keys = {now.prefix + member.key};
    if (now.metadata && now.prefix.empty())
      if (const auto leaf = now.metadata->leaves.find(member.key); leaf != now.metadata->leaves.end())
        keys = leaf->second.path;
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
    const KeyPath path = now.prefix.empty() ? leaf.path : KeyPath{name};
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
    const Extent extent{file, TRY(object.get_index("offset").context(path)),
                        TRY(object.get_index("length").context(path))};
    if (!fits_inside(extent.offset, extent.length, size) || extent.length > kMaxObject)
      return corrupt(path + ": object '" + printable(name) + "': expected at most " + human_bytes(kMaxObject) +
                     " inside of " + std::string(kObjectBytes));
    KeyPath keys = TRY(parse_key_path(text, path));
    if (keys.empty() || !now.prefix.empty()) keys = {name};
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

// Makes values stored inside nodes, and fill values, readable like a file.
Status OrbaxReader::keep_memory(Reading& now) {
  if (!now.memory_file) return {};
  File file = TRY(File::create_in_memory());
  TRY(file.write_at(0, as_bytes(now.memory)));
  catalog_.files[*now.memory_file].size = std::ssize(now.memory);
  files_.pin(catalog_.file_path(*now.memory_file), std::move(file));
  return {};
}

Status OrbaxReader::read_item(const Item& item, bool is_only, const OpenOptions& options) {
  Reading now{item.name, is_only ? "" : item.name + ".", item.place};
  now.metadata = TRY(read_item_metadata(*item.place));
  TRY(check_finished(now));
  now.key_kinds = TRY(read_key_kinds(*item.place));
  TRY(read_values(now));
  TRY(read_objects(now));
  std::vector<std::string> names;
  for (std::size_t i = 0; i < now.values.size(); ++i)
    for (const std::string_view suffix : {kZarr2, kZarr3}) {
      if (!now.values.key(i).ends_with(suffix)) continue;
      const std::string_view key = now.values.key(i);
      TRY(add_array(now, i, suffix, options));
      names.emplace_back(key.substr(0, key.size() - suffix.size()));
    }
  std::sort(names.begin(), names.end());
  TRY(check_leaves(now, names, options));
  TRY(keep_memory(now));
  TRY(read_strings(now));
  TRY(read_empty_leaves(now));
  TRY(list_files(now));
  std::vector<std::string> unused;
  for (std::size_t i = 0; i < now.values.size() && databases_ > 0; ++i)
    if (!now.used[i] && unused.size() <= kShown) unused.push_back(printable(now.values.key(i)));
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
    const auto text = read_whole_file(path, kMaxJson);
    const auto json = text ? parse_json(*text, path) : Result<Json>(text.error());
    if (!json) {
      catalog_.notes.push_back("Not read: item '" + printable(name) + "': " + json.error().message());
      continue;
    }
    catalog_.files.push_back({file, std::ssize(*text)});
    TRY(add_json(name, {name}, static_cast<std::uint32_t>(catalog_.files.size() - 1), *json));
  }
  for (const std::string& name : parts.others)
    catalog_.notes.push_back("Not read: '" + printable(name) + "/', which holds no arrays and no JSON.");
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
  const auto parent = parts.directory->parent();
  if (!is_inside && !parent) return {};
  const PathSnapshot& step = is_inside ? *parts.directory : **parent;
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
  catalog_.shares_extents = has_fill_;
  set_state_keys(catalog_);
  if (!options.validated) return {};
  TRY(validate(catalog_, options.files_too));
  return check_extents_disjoint(catalog_, SharedExtents::kRefused);
}

// ---- Locating chunks

// Returns the number of inner chunks in a shard; 1 without sharding.
Index chunks_of_item(const ZarrArray& array) {
  Index out = 1;
  for (int d = 0; d < array.shape.rank(); ++d) out *= array.grid[d] / array.chunk.shape[d];
  return out;
}

// Reserves space in the spool for every chunk that is decoded into it.
Status OrbaxReader::make_room(const std::vector<Tensor*>& tensors, const std::string& spool) {
  std::optional<Index> bytes = 0;
  for (const Tensor* tensor : tensors) {
    const ZarrArray& array = stored_.at(tensor->name).array;
    if (is_read_in_place(*tensor, array)) continue;
    const auto chunks = checked_mul(std::ssize(tensor->fragments), chunks_of_item(array));
    const auto size = chunks ? checked_mul(*chunks, chunk_bytes(array)) : std::nullopt;
    bytes = bytes && size ? checked_add(*bytes, *size) : std::nullopt;
  }
  if (bytes == 0) return {};
  const Index free = TRY(free_space(spool));
  if (!bytes || *bytes > free)
    return io_error(spool + ": decoding compressed chunks needs room for " +
                    (bytes ? human_bytes(*bytes) : "2^63 bytes") + " there, and " + human_bytes(free) + " are free");
  if (!spool_) {
    spool_file_ = static_cast<std::uint32_t>(catalog_.files.size());
    catalog_.files.push_back({std::string(kSpoolName), 0});
    files_.pin(catalog_.file_path(spool_file_), TRY(File::create_anonymous(spool)));
    spool_ = TRY(files_.open(catalog_.file_path(spool_file_)));
  }
  catalog_.files[spool_file_].size = spooled_ + *bytes;
  return spool_->set_length(spooled_ + *bytes);
}

Status OrbaxReader::locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) {
  std::vector<Tensor>& own = catalog_.own_tensors();
  std::vector<Tensor*> wanted;
  for (const std::size_t i : tensors)
    if (!own[i].located) wanted.push_back(&own[i]);
  if (wanted.empty()) return {};
  TRY(locate_tensors(wanted, threads, spool));
  catalog_.shares_extents = has_fill_;
  return {};
}

Status OrbaxReader::locate_tensors(const std::vector<Tensor*>& tensors, int threads, const std::string& spool) {
  TRY(make_room(tensors, spool));
  std::vector<Job> jobs;
  for (std::size_t t = 0; t < tensors.size();) {
    const std::size_t begin = t;
    jobs.clear();
    for (; t < tensors.size() && std::ssize(jobs) < kBatch; ++t) {
      const Stored& stored = stored_.at(tensors[t]->name);
      const bool is_spooled = !is_read_in_place(*tensors[t], stored.array);
      for (std::size_t i = 0; i < tensors[t]->fragments.size(); ++i) {
        jobs.push_back({tensors[t], &stored, tensors[t]->fragments.get(i), spooled_});
        if (is_spooled) spooled_ += chunks_of_item(stored.array) * chunk_bytes(stored.array);
      }
    }
    TRY(locate_batch(jobs, threads));
    auto job = jobs.cbegin();
    for (std::size_t i = begin; i < t; ++i) {
      FragmentList chunks(tensors[i]->shape.rank());
      for (; job != jobs.cend() && job->tensor == tensors[i]; ++job)
        for (const Fragment& chunk : job->chunks) {
          chunks.add(chunk);
          has_fill_ = has_fill_ || job->stored->is_fill(chunk);
        }
      chunks.pack();
      tensors[i]->fragments = std::move(chunks);
      tensors[i]->located = true;
    }
  }
  return {};
}

Status OrbaxReader::locate_batch(std::vector<Job>& jobs, int threads) {
  TRY(may_take(std::ssize(jobs) * static_cast<Index>(sizeof(Job) + sizeof(Fragment)),
               [&] { return catalog_.root + ": the places of " + count_of(std::ssize(jobs), "chunk"); }));
  return parallel_for(std::ssize(jobs), thread_count(threads),
                      [&](int, Index i) { return locate_item(jobs[static_cast<std::size_t>(i)]); });
}

Status OrbaxReader::locate_item(Job& job) {
  const ZarrArray& array = job.stored->array;
  if (array.shards)
    TRY(locate_in_shard(job));
  else
    job.chunks.push_back(TRY(whole_chunk(*job.tensor, *job.stored, job.item.box, job.item.extent)));
  if (array.chunk.is_plain()) return {};
  if (!is_read_in_place(*job.tensor, array)) {
    for (std::size_t i = 0; i < job.chunks.size(); ++i)
      if (!job.stored->is_fill(job.chunks[i]))
        TRY(decode_to_spool(job, job.chunks[i], job.spool_at + static_cast<Index>(i) * chunk_bytes(array)));
    return {};
  }
  for (Fragment& chunk : job.chunks)
    if (!job.stored->is_fill(chunk)) chunk.encoding = job.stored->encoding;
  return {};
}

Status OrbaxReader::locate_in_shard(Job& job) {
  const ZarrArray& array = job.stored->array;
  const Extent& shard = job.item.extent;
  const auto file = TRY(files_.open(catalog_.file_path(shard.file)));
  const std::string place = at(file->path(), shard.offset) + ": " + text_of(*job.tensor, job.item.box);
  const IndexPlace where = TRY(place_of_index(array, shard.length).context(place));
  TRY(may_take(2 * where.length, [&] { return place; }));
  std::vector<std::byte> index(static_cast<std::size_t>(where.length));
  TRY(file->read_at(shard.offset + where.offset, index));
  const std::vector<InnerChunk> inner = TRY(parse_shard_index(array, index, shard.length).context(place));
  for (const InnerChunk& chunk : inner) {
    Box box = chunk.box;
    for (int d = 0; d < box.rank(); ++d) box.origin[d] += job.item.box.origin[d];
    bool is_outside = false;  // beyond the end of the array
    for (int d = 0; d < box.rank(); ++d) is_outside = is_outside || box.origin[d] >= array.shape[d];
    if (is_outside) continue;
    box = intersect(box, whole(array.shape));
    if (!chunk.bytes)
      job.chunks.push_back(TRY(missing_chunk(*job.tensor, *job.stored, box)));
    else
      job.chunks.push_back(TRY(whole_chunk(*job.tensor, *job.stored, box,
                                           {shard.file, shard.offset + chunk.bytes->first, chunk.bytes->second})));
  }
  return {};
}

// Removes the CRC-32C at the end of an extent, after checking it against the bytes before it.
Status take_crc(const File& file, Extent& extent, const std::string& place) {
  constexpr Index kPiece = Index{1} << 20, kChecksum = 4;
  if (extent.length < kChecksum) return corrupt(place + ": crc32c: expected a checksum");
  extent.length -= kChecksum;
  std::vector<std::byte> buffer(static_cast<std::size_t>(std::min(extent.length, kPiece)));
  std::uint32_t crc = 0, recorded = 0;
  for (Index done = 0; done < extent.length;) {
    const auto piece = MutableBytes(buffer).first(static_cast<std::size_t>(std::min(kPiece, extent.length - done)));
    TRY(file.read_at(extent.offset + done, piece));
    crc = crc32c(crc, piece);
    done += std::ssize(piece);
  }
  TRY(file.read_at(extent.offset + extent.length, std::as_writable_bytes(std::span(&recorded, 1))));
  if (crc == recorded) return {};
  return corrupt(place + ": crc32c: expected " + std::to_string(recorded) + ", got " + std::to_string(crc) +
                 ": the bytes changed after they were saved");
}

Status OrbaxReader::decode_to_spool(const Job& job, Fragment& chunk, Index at) {
  const ZarrArray& array = job.stored->array;
  const auto file = TRY(files_.open(catalog_.file_path(chunk.extent.file)));
  const std::string place = reshard::at(file->path(), chunk.extent.offset) + ": " + text_of(*job.tensor, chunk.box);
  ChunkLayout layout = array.chunk;
  std::vector<ChunkFilter>& filters = layout.filters;
  while (!filters.empty() && filters.back().kind == ChunkFilter::Kind::kCrc32c) {
    TRY(take_crc(*file, chunk.extent, place));
    filters.pop_back();
  }
  const Index bytes = chunk_bytes(array);
  const bool is_frame = filters.size() == 1 && filters[0].kind == ChunkFilter::Kind::kZstd;
  Index length = chunk.extent.length;
  if (is_frame)
    length = TRY(decode_frame(*file, chunk.extent, bytes, at).context(text_of(*job.tensor, chunk.box)));
  else if (!layout.is_plain())
    return decode_whole(layout, *file, chunk, bytes, at, place);
  if (length != bytes)
    return corrupt(place + ": chunk: expected " + bytes_of(static_cast<std::uint64_t>(bytes)) + ", got " +
                   std::to_string(length));
  if (is_frame) chunk.extent = {spool_file_, at, bytes};
  return {};
}

// Decodes a zstd frame into the spool, piece by piece. Returns its decoded size.
Result<Index> OrbaxReader::decode_frame(const File& file, const Extent& frame, Index limit, Index at) {
  constexpr Index kSmallWindow = Index{8} << 20, kStart = 18;
  std::vector<std::byte> start(static_cast<std::size_t>(std::min(frame.length, kStart)));
  TRY(file.read_at(frame.offset, start));
  const Index window = zstd::window_bytes(start);
  std::unique_lock lock(large_window_, std::defer_lock);
  if (window > kSmallWindow) {
    lock.lock();
    TRY(may_take(std::min(window, limit), [&] { return reshard::at(file.path(), frame.offset) + ": a zstd frame"; }));
  }
  return zstd::decode(file, frame.offset, frame.length, limit, *spool_, at);
}

// Decodes a chunk of other codecs in memory, then writes it to the spool.
Status OrbaxReader::decode_whole(const ChunkLayout& layout, const File& file, Fragment& chunk, Index bytes, Index at,
                                 const std::string& place) {
  constexpr Index kMaxWhole = Index{1} << 30;
  if (bytes > kMaxWhole || chunk.extent.length > 2 * kMaxWhole)
    return unsupported(place + ": a chunk of " + human_bytes(bytes) + "; of these codecs, at most " +
                       human_bytes(kMaxWhole) + " are read");
  const std::unique_lock lock(large_window_);
  TRY(may_take(chunk.extent.length + 2 * bytes, [&] { return place; }));
  std::vector<std::byte> stored(static_cast<std::size_t>(chunk.extent.length));
  TRY(file.read_at(chunk.extent.offset, stored));
  if (layout.is_blosc) {
    std::vector<std::byte> decoded(static_cast<std::size_t>(bytes));
    if (const std::size_t length = TRY(unblosc_chunk(stored, decoded, place)); length != decoded.size())
      return corrupt(place + ": chunk: expected " + bytes_of(decoded.size()) + ", got " + std::to_string(length));
    TRY(spool_->write_at(at, decoded));
  } else {
    ChunkDecoder decoder;
    TRY(spool_->write_at(at, TRY(decoder.decode(stored, {layout.filters, bytes}, place))));
  }
  chunk.extent = {spool_file_, at, bytes};
  return {};
}

// ---- Objects

// Returns a random key in the form of jax.random.wrap_key_data: its numbers, their shape, and the generator's name.
Result<Json> OrbaxReader::value_of(const RandomKey& key) {
  Catalog alone;
  alone.root = catalog_.root;
  Tensor tensor = key.tensor;
  if (!tensor.located) TRY(locate_tensors({&tensor}, 1, "."));
  alone.files = catalog_.files;
  TRY(alone.add(tensor));
  std::vector<std::uint32_t> numbers(static_cast<std::size_t>(tensor.elements()));
  std::vector<std::byte> scratch(static_cast<std::size_t>(kMaxRandomKey));
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
    std::string bytes(static_cast<std::size_t>(blob.extent.length), '\0');
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
