// SPDX-License-Identifier: Apache-2.0
// Writes an item as the first process of a save would: a database of arrays (zarr 3) whose chunks are uncompressed, so
// that every offset is known before a byte is written.
//
//   _METADATA _sharding array_metadatas/process_0 _strings.json _CHECKPOINT_METADATA
//   _reshard_objects.json _reshard_objects.bin           objects that JAX has no type for (item_metadata.h)
//   manifest.ocdbt  d/0...1                              the database, and its nodes
//   ocdbt.process_0/d/0...1 0...2 ...                    chunks
#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <numeric>

#include "formats/encoding/key_path.h"
#include "formats/encoding/pickle.h"
#include "formats/encoding/torch_archive.h"
#include "formats/orbax/item_metadata.h"
#include "formats/orbax/ocdbt.h"
#include "formats/orbax/ocdbt_writer.h"
#include "formats/orbax/orbax.h"
#include "formats/orbax/train_state.h"
#include "formats/orbax/zarr.h"
#include "formats/tensor_files/parameter_lists.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard::orbax {
namespace {

// A chunk is read whole by JAX, even if a device needs only a part of it.
constexpr Index kMaxChunk = Index{32} << 20;
constexpr Index kAlignFrom = Index{64} << 10;  // larger chunks begin at a page
constexpr Index kMaxBytes = Index{1} << 62;    // limit for all tensors

using EmitText = std::function<Status(std::string_view text)>;

// ---- Chunks

// Returns the smallest divisor of `n` that is at least `least`, and `least` itself (then the last part is smaller) if
// that is allowed and no divisor is near.
Index parts_of(Index n, Index least, bool may_be_uneven) {
  for (Index parts = least; parts <= n; ++parts) {
    if (may_be_uneven && parts > 2 * least) return least;
    if (n % parts == 0) return parts;
  }
  return n;
}

// Returns the shape of a tensor's chunks: what one rank of the mesh holds, cut further into at most kMaxChunk bytes.
// Only rows are cut unevenly, so that the padding of a chunk follows its elements.
Dims chunk_shape_of(const TargetTensor& tensor, const Mesh& mesh) {
  Dims grid = tensor.shape;
  for (const Split& split : tensor.placement->splits) {
    Index ranks = 1;
    for (const std::string& axis : split.axes) ranks *= mesh.size(axis);
    Index& extent = grid[split.dim];
    if (split.dim == 0)
      extent = ceil_div(extent, ranks);
    else if (extent % ranks == 0)
      extent /= ranks;
  }
  if (volume(grid) == 0) return Dims::filled(grid.rank(), 1);
  for (int d = 0; d < grid.rank(); ++d) {
    const Index parts = ceil_div(volume(grid) * byte_size(tensor.dtype), kMaxChunk);
    if (parts > 1) grid[d] = ceil_div(grid[d], parts_of(grid[d], std::min(parts, grid[d]), d == 0));
  }
  return grid;
}

Dims counts_of(const Dims& shape, const Dims& grid) {
  Dims out;
  for (int d = 0; d < shape.rank(); ++d) out.push_back(ceil_div(shape[d], grid[d]));
  return out;
}

// Calls `visit` with the key of each chunk, as it follows the array's name, and with its row-major number, in the order
// of the keys.
template <class Visit>
Status each_key(const Dims& counts, int d, const std::string& key, Index number, const Visit& visit) {
  if (d == counts.rank()) return visit(key, number);
  std::vector<std::string> texts;
  for (Index i = 0; i < counts[d]; ++i) texts.push_back(std::to_string(i));
  std::sort(texts.begin(), texts.end());
  for (const std::string& text : texts)
    TRY(each_key(counts, d + 1, key + "/" + text, number * counts[d] + std::stoll(text), visit));
  return {};
}

// Returns whether all keys of array `a` come before those of `b`.
bool is_before(std::string_view a, std::string_view b) {
  const std::size_t shared = std::min(a.size(), b.size());
  if (const int order = a.compare(0, shared, b.substr(0, shared)); order != 0) return order < 0;
  if (a.size() == b.size()) return false;
  return a.size() < b.size() ? '/' <= b[shared] : a[shared] < '/';
}

// ---- Names

// Returns the text as Python's repr() shows it.
std::string python_repr(std::string_view text) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    if (c == quote || c == '\\') out += '\\';
    out += c;
  }
  return out + quote;
}

// Returns the path of a name whose place in the source's tree is unknown: its components.
KeyPath components_of(std::string_view name) {
  KeyPath out;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    out.emplace_back(std::string(name.substr(begin, end - begin)));
    begin = end + 1;
  }
  return out;
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    for (std::size_t k = 0; k < 3; ++k)
      group = group << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
    for (std::size_t k = 0; k < 4; ++k) out += i + k <= bytes.size() ? kDigits[group >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

// Emits the members of a JSON object or the items of an array, one after the other.
class JsonRun {
 public:
  JsonRun(std::string_view begin, const EmitText& emit) : next_(begin), emit_(emit) {}
  Status add(std::string_view text) {
    TRY(emit_(next_ + std::string(text)));
    next_ = ", ";
    return {};
  }
  Status end(std::string_view text) {
    TRY(next_ == ", " ? Status() : emit_(next_));
    return emit_(text);
  }

 private:
  std::string next_;
  const EmitText& emit_;
};

Json list_of(const Dims& dims) {
  Json out = Json::array();
  for (const Index n : dims) out.push_back(n);
  return out;
}

std::string member(std::string_view key, const Json& value) { return to_text(Json(key)) + ": " + to_text(value); }

// ---- The target

// An object that is a leaf of the tree without an array.
struct ObjectLeaf {
  const TargetBlob* blob = nullptr;
  std::string_view type;  // "string", "None", "Dict", ...
  std::string text;       // of a string
};

// An object that is stored as an array of jax.random's keys.
struct RandomKey {
  const TargetBlob* blob = nullptr;
  std::string kind;  // of generator
  Dims shape;
  std::string numbers;  // uint32, row-major
};

// Returns the type of a value without content; empty for others.
std::string_view empty_type_of(const pickle::Value& value) {
  if (value.is_none()) return "None";
  if (value.size() > 0) return "";
  if (value.kind() == pickle::Kind::kDict) return "Dict";
  if (value.kind() == pickle::Kind::kList) return "List";
  return value.kind() == pickle::Kind::kTuple ? "Tuple" : "";
}

// Returns the keys that an object describes as our reader does (reader.cc), if they fit into a node.
std::optional<RandomKey> random_key_of(const pickle::Value& value) {
  constexpr std::size_t kMaxNumbers = 256;
  const auto kind = value.find("random_key_impl"), shape = value.find("shape"), data = value.find("key_data");
  if (value.size() != 3 || !kind || !kind->as_string() || !shape || !shape->is_sequence() || !data ||
      !data->is_sequence() || shape->size() > static_cast<std::size_t>(kMaxRank) || data->size() > kMaxNumbers)
    return std::nullopt;
  RandomKey out{nullptr, std::string(*kind->as_string()), {}, {}};
  for (std::size_t i = 0; i < shape->size(); ++i) {
    const auto extent = (*shape)[i].as_int();
    if (!extent || *extent < 0) return std::nullopt;
    out.shape.push_back(*extent);
  }
  for (std::size_t i = 0; i < data->size(); ++i) {
    const auto number = (*data)[i].as_int();
    if (!number || *number < 0 || *number > UINT32_MAX) return std::nullopt;
    const auto stored = static_cast<std::uint32_t>(*number);
    out.numbers.append(reinterpret_cast<const char*>(&stored), sizeof stored);
  }
  const bool is_whole = checked_volume(out.shape) == static_cast<Index>(data->size()) && data->size() > 0;
  return is_whole ? std::optional(std::move(out)) : std::nullopt;
}

class OrbaxTarget : public Target {
 public:
  explicit OrbaxTarget(LayoutRequest request) : request_(std::move(request)) {}

  Status lay_out();
  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;
  Status seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const override;

 private:
  // A text file, whose content is computed each time it is needed.
  struct Text {
    std::uint32_t file = 0;
    std::function<Status(const EmitText& emit)> write;
  };

  Status add_tensor(TargetTensor& wanted);
  Extent place_chunk(Index bytes, Index stored);
  const std::string& name_of(std::uint32_t array) const;
  Dims grid_of(std::uint32_t array) const;
  bool is_random_key(std::uint32_t array) const { return array >= catalog_.tensors().size(); }
  const RandomKey& random_key(std::uint32_t array) const { return keys_[array - catalog_.tensors().size()]; }
  Status order_names();
  Status add_texts();
  Status add_text(std::string name, std::function<Status(const EmitText& emit)> write);
  void find_leaves();
  Status write_database(const EmitText& node, std::string& manifest) const;
  Status write_arrays(DatabaseWriter& database) const;
  Status write_item_metadata(const EmitText& emit) const;
  Status write_array_metadata(const EmitText& emit) const;
  Status write_sharding(const EmitText& emit) const;
  std::string strings() const;
  std::string objects() const;
  Json sharding_of(std::uint32_t array) const;
  KeyPath path_of(const std::string& name, const KeyPath& path) const;
  Status seal_gap(const Extent& gap, const EmitBytes& emit) const;

  LayoutRequest request_;     // its tensors' names move to the catalog
  std::vector<Dims> grids_;   // of each tensor
  std::vector<Extent> gaps_;  // bytes of the chunks' files that belong to no tensor, in order
  // The arrays in the order of their database keys. Numbers after those of the tensors are random keys.
  std::vector<std::uint32_t> sorted_;
  bool is_nested_ = true;  // names form a tree: none is also the beginning of another one
  std::vector<ObjectLeaf> leaves_;
  std::vector<RandomKey> keys_;
  std::uint32_t chunk_files_ = 0;
  std::vector<Text> texts_;
};

std::string hex_name(std::string_view directory, Index number) {
  std::array<char, 33> digits{};
  std::snprintf(digits.data(), digits.size(), "%032llx", static_cast<unsigned long long>(number));
  return std::string(directory) + digits.data();
}

// Returns the place of a chunk whose `stored` bytes contain `bytes` bytes of elements.
Extent OrbaxTarget::place_chunk(Index bytes, Index stored) {
  if (chunk_files_ == 0 ||
      (catalog_.files.back().size > 0 && stored > request_.max_file_bytes - catalog_.files.back().size)) {
    ++chunk_files_;
    catalog_.files.push_back({hex_name(std::string(kProcessPrefix) + "0/d/", chunk_files_), 0});
  }
  const auto file = static_cast<std::uint32_t>(catalog_.files.size() - 1);
  Index& size = catalog_.files.back().size;
  const Index begin = stored >= kAlignFrom ? ceil_div(size, File::kDirectUnit) * File::kDirectUnit : size;
  if (begin > size) gaps_.push_back({file, size, begin - size});
  size = begin + stored;
  if (stored > bytes) gaps_.push_back({file, begin + bytes, stored - bytes});
  return {file, begin, bytes};
}

Status OrbaxTarget::add_tensor(TargetTensor& wanted) {
  const auto elements = checked_volume(wanted.shape);
  const auto bytes = elements ? checked_mul(*elements, byte_size(wanted.dtype)) : std::nullopt;
  if (!bytes || *bytes > kMaxBytes) return unsupported(tensor_text(wanted.name) + ": 2^62 bytes or more");
  if (!is_utf8(wanted.name)) return unsupported(tensor_text(wanted.name) + ": the name is not UTF-8");
  const Dims grid = chunk_shape_of(wanted, request_.mesh);
  if (!zarr3_of_raw_chunks(wanted.dtype, wanted.shape, grid))
    return unsupported(tensor_text(wanted.name) + ": zarr has no dtype for " +
                       std::string(info(wanted.dtype).torch_name) + "; choose another with --dtype");
  Tensor tensor;
  tensor.dtype = wanted.dtype;
  tensor.shape = wanted.shape;
  tensor.fragments = FragmentList(wanted.shape.rank());
  const Index stored = volume(grid) * byte_size(wanted.dtype);
  const Dims counts = counts_of(wanted.shape, grid);
  const Index chunks = volume(counts);
  if (chunks == 0) tensor.fragments.add(whole(wanted.shape), place_chunk(0, 0));
  for (Index i = 0; i < chunks; ++i) {
    Box box{Dims::filled(counts.rank(), 0), grid};
    Index left = i;
    for (int d = counts.rank() - 1; d >= 0; left /= counts[d--]) box.origin[d] = left % counts[d] * grid[d];
    box = intersect(box, whole(wanted.shape));
    tensor.fragments.add(box, place_chunk(volume(box.shape) * byte_size(wanted.dtype), stored));
    if (catalog_.files.back().size > kMaxBytes)
      return unsupported(tensor_text(wanted.name) + ": 2^62 bytes or more in one file");
  }
  tensor.fragments.pack();
  tensor.name = std::move(wanted.name);
  tensor.plain_key = std::move(wanted.plain_key);
  tensor.path = std::move(wanted.path);
  grids_.push_back(grid);
  return catalog_.add(std::move(tensor));
}

// Sorts the tensors by their keys. Fails if keys of one array would be among those of another.
Status OrbaxTarget::order_names() {
  const auto name = [this](std::uint32_t i) -> const std::string& { return name_of(i); };
  sorted_.resize(catalog_.tensors().size() + keys_.size());
  std::iota(sorted_.begin(), sorted_.end(), 0U);
  std::sort(sorted_.begin(), sorted_.end(), [&](auto a, auto b) { return is_before(name(a), name(b)); });
  for (std::size_t i = 1; i < sorted_.size(); ++i)
    if (name(sorted_[i]).starts_with(name(sorted_[i - 1]) + "/"))
      return unsupported(tensor_text(name(sorted_[i])) + ": another tensor is '" + printable(name(sorted_[i - 1])) +
                         "', whose chunks have names that begin like this; choose other names with --rename");
  std::vector<std::string> dotted;
  for (const Tensor& tensor : catalog_.tensors()) dotted.push_back(tensor.name + ".");
  for (const TargetBlob& blob : request_.blobs) dotted.push_back(blob.name + ".");
  std::sort(dotted.begin(), dotted.end());
  for (std::size_t i = 1; i < dotted.size(); ++i) is_nested_ = is_nested_ && !dotted[i].starts_with(dotted[i - 1]);
  return {};
}

const std::string& OrbaxTarget::name_of(std::uint32_t array) const {
  return is_random_key(array) ? random_key(array).blob->name : catalog_.tensors()[array].name;
}

Dims OrbaxTarget::grid_of(std::uint32_t array) const {
  return is_random_key(array) ? random_key(array).shape : grids_[array];
}

// Finds the objects that JAX's tree can hold.
void OrbaxTarget::find_leaves() {
  for (const TargetBlob& blob : request_.blobs) {
    const auto document = torch_archive::read_object_item(blob.bytes);
    if (!document || !is_utf8(blob.name)) continue;
    const pickle::Value value = document->root();
    const std::string_view type = empty_type_of(value);
    if (const auto text = value.as_string(); text && is_utf8(*text)) {
      leaves_.push_back({&blob, "string", std::string(*text)});
    } else if (!type.empty()) {
      leaves_.push_back({&blob, type, {}});
    } else if (auto key = random_key_of(value)) {
      key->blob = &blob;
      keys_.push_back(*std::move(key));
    }
  }
}

Status OrbaxTarget::lay_out() {
  set_tree_names(request_.tensors);
  TRY(catalog_.reserve(request_.tensors.size()));
  grids_.reserve(request_.tensors.size());
  for (TargetTensor& tensor : request_.tensors) TRY(add_tensor(tensor));
  find_leaves();
  TRY(order_names());
  return add_texts();
}

Status OrbaxTarget::add_text(std::string name, std::function<Status(const EmitText& emit)> write) {
  Index size = 0;
  TRY(write([&](std::string_view text) -> Status {
    size += std::ssize(text);
    return {};
  }));
  texts_.push_back({static_cast<std::uint32_t>(catalog_.files.size()), std::move(write)});
  catalog_.files.push_back({std::move(name), size});
  return {};
}

Status OrbaxTarget::add_texts() {
  const auto fixed = [](std::string text) {
    return [text = std::move(text)](const EmitText& emit) { return emit(text); };
  };
  std::string manifest;
  TRY(add_text(hex_name("d/", 1), [this](const EmitText& emit) {
    std::string unused;
    return write_database(emit, unused);
  }));
  TRY(write_database([](std::string_view) { return Status(); }, manifest));
  TRY(add_text(std::string(kManifest), fixed(std::move(manifest))));
  TRY(add_text(std::string(kItemMetadata), [this](const EmitText& emit) { return write_item_metadata(emit); }));
  TRY(add_text(std::string(kArrayMetadatas) + "/process_0",
               [this](const EmitText& emit) { return write_array_metadata(emit); }));
  if (request_.mesh.ranks() > 1 || !keys_.empty())
    TRY(add_text(std::string(kSharding), [this](const EmitText& emit) { return write_sharding(emit); }));
  if (std::any_of(leaves_.begin(), leaves_.end(), [](const ObjectLeaf& leaf) { return leaf.type == "string"; }))
    TRY(add_text(std::string(kStrings), fixed(strings())));
  if (!request_.blobs.empty()) {
    TRY(add_text(std::string(kObjects), fixed(objects())));
    TRY(add_text(std::string(kObjectBytes), [this](const EmitText& emit) -> Status {
      for (const TargetBlob& blob : request_.blobs) TRY(emit(blob.bytes));
      return {};
    }));
  }
  return add_text(std::string(kCheckpointMetadata),
                  fixed(to_text(Json::object()
                                    .set("item_handlers",
                                         "orbax.checkpoint._src.handlers.standard_checkpoint_handler."
                                         "StandardCheckpointHandler")
                                    .set("metrics", Json::object())
                                    .set("performance_metrics", Json::object())
                                    .set("init_timestamp_nsecs", Json())
                                    .set("commit_timestamp_nsecs", Json())
                                    .set("custom_metadata", Json::object()))));
}

// ---- Contents of the files

Status OrbaxTarget::write_arrays(DatabaseWriter& database) const {
  for (const std::uint32_t i : sorted_) {
    const std::string& name = name_of(i);
    const Dims grid = grid_of(i);
    const bool is_key = is_random_key(i);
    const DType dtype = is_key ? DType::kUint32 : catalog_.tensors()[i].dtype;
    const Dims shape = is_key ? grid : catalog_.tensors()[i].shape;
    const Dims counts = counts_of(shape, grid);
    const auto add = [&](const std::string& key, Index number) {
      if (is_key) return database.add_inline(key, random_key(i).numbers);
      Extent place = catalog_.tensors()[i].fragments.extent(static_cast<std::size_t>(number));
      place.length = volume(grid) * byte_size(dtype);  // with its padding
      return database.add(key, place);
    };
    if (volume(counts) > 0) TRY(each_key(counts, 0, name + "/c", 0, add));
    TRY(database.add_inline(name + std::string(kZarr3), *zarr3_of_raw_chunks(dtype, shape, grid)));
  }
  return {};
}

// Writes the nodes, and sets the manifest.
Status OrbaxTarget::write_database(const EmitText& node, std::string& manifest) const {
  DatabaseWriter database(catalog_.files, hex_name("d/", 1), node);
  TRY(write_arrays(database));
  manifest = TRY(database.finish());
  return {};
}

KeyPath OrbaxTarget::path_of(const std::string& name, const KeyPath& path) const {
  const bool is_known = path.size() > 1 && dotted_name(path) == name;
  if (is_known) return path;
  return is_nested_ ? components_of(name) : KeyPath{name};
}

// Returns a member of tree_metadata: {"('params', 'w')": {"key_metadata": [...], "value_metadata": {...}}}.
std::string leaf_text(const KeyPath& path, Json value) {
  std::string repr = "(";
  Json keys = Json::array();
  for (const auto& part : path) {
    const auto* const position = std::get_if<Index>(&part);
    const std::string text = position ? std::to_string(*position) : std::get<std::string>(part);
    repr += (keys.size() > 0 ? ", " : "") + python_repr(text);
    keys.push_back(Json::object().set("key", text).set("key_type", position ? kPositionKey : kDictKey));
  }
  repr += path.size() == 1 ? ",)" : ")";
  return member(repr, Json::object().set("key_metadata", std::move(keys)).set("value_metadata", std::move(value)));
}

Status OrbaxTarget::write_item_metadata(const EmitText& emit) const {
  const std::string_view type = request_.mesh.ranks() > 1 ? "jax.Array" : "np.ndarray";
  const auto value = [](std::string_view of, bool is_empty) {
    return Json::object().set("value_type", of).set("skip_deserialize", is_empty);
  };
  JsonRun leaves("{\"tree_metadata\": {", emit);
  for (const std::uint32_t i : sorted_) {
    const KeyPath& path = is_random_key(i) ? random_key(i).blob->path : catalog_.tensors()[i].path;
    Json array = value(is_random_key(i) ? "jax.Array" : type, false).set("write_shape", list_of(grid_of(i)));
    TRY(leaves.add(leaf_text(path_of(name_of(i), path), std::move(array))));
  }
  for (const ObjectLeaf& leaf : leaves_)
    TRY(leaves.add(leaf_text(path_of(leaf.blob->name, leaf.blob->path), value(leaf.type, leaf.type != "string"))));
  return leaves.end(
      "}, \"use_ocdbt\": true, \"use_zarr3\": true, \"store_array_data_equal_to_fill_value\": true, "
      "\"custom_metadata\": null}");
}

Status OrbaxTarget::write_array_metadata(const EmitText& emit) const {
  JsonRun arrays("{\"array_metadatas\": [", emit);
  for (const std::uint32_t i : sorted_) {
    Json array = Json::object().set("param_name", name_of(i)).set("write_shape", list_of(grid_of(i)));
    array.set("chunk_shape", list_of(grid_of(i)));
    array.set("ext_metadata", is_random_key(i) ? Json::object().set("random_key_impl", random_key(i).kind) : Json());
    TRY(arrays.add(to_text(Json::object().set("array_metadata", std::move(array)))));
  }
  return arrays.end("]}");
}

// Returns which axes of the mesh shard each dimension. JAX shards evenly only, so a dimension that the axes do not
// divide has none.
Json partition_of(const Dims& shape, const Placement& placement, const Mesh& mesh) {
  std::vector<std::vector<std::string>> axes(static_cast<std::size_t>(shape.rank()));
  for (const Split& split : placement.splits)
    for (const std::string& axis : split.axes)
      if (mesh.size(axis) > 1) axes[static_cast<std::size_t>(split.dim)].push_back(axis);
  Json out = Json::array();
  for (int d = 0; d < shape.rank(); ++d) {
    const auto& by = axes[static_cast<std::size_t>(d)];
    Index parts = 1;
    for (const std::string& axis : by) parts *= mesh.size(axis);
    Json& place = out.add_item(Json());
    if (by.empty() || shape[d] % parts != 0) continue;
    if (by.size() == 1) {
      place = by[0];
      continue;
    }
    for (const std::string& axis : by) place.push_back(axis);
  }
  return out;
}

// Returns an array's NamedSharding. Random keys are replicated, or on the first device if there is no mesh.
Json OrbaxTarget::sharding_of(std::uint32_t array) const {
  Json sizes = Json::array(), names = Json::array(), types = Json::array(), partition = Json::array();
  std::vector<MeshAxis> axes = request_.mesh.axes();
  const bool is_alone = request_.mesh.ranks() == 1;
  if (is_alone) axes = {{"device", 1}};
  for (const MeshAxis& axis : axes) {
    sizes.push_back(axis.size);
    names.push_back(axis.name);
    types.push_back("AxisType.Auto");
  }
  if (!is_random_key(array))
    partition = partition_of(catalog_.tensors()[array].shape, request_.tensors[array].placement, request_.mesh);
  Json out = Json::object().set("sharding_type", "NamedSharding").set("shape", std::move(sizes));
  out.set("axis_names", std::move(names)).set("axis_types", std::move(types));
  out.set("partition_spec", std::move(partition));
  if (is_alone)
    out.set("device_mesh", Json::object().set("mesh", Json::array().push_back(Json::object().set("id", 0))));
  return out;
}

Status OrbaxTarget::write_sharding(const EmitText& emit) const {
  JsonRun members("{", emit);
  for (const std::uint32_t i : sorted_)
    if (request_.mesh.ranks() > 1 || is_random_key(i))
      TRY(members.add(member(base64(name_of(i)), to_text(sharding_of(i)))));
  return members.end("}");
}

std::string OrbaxTarget::strings() const {
  Json out = Json::object();
  for (const ObjectLeaf& leaf : leaves_)
    if (leaf.type == "string") out.set(leaf.blob->name, leaf.text);
  return to_text(out);
}

std::string OrbaxTarget::objects() const {
  Json list = Json::array();
  Index offset = 0;
  for (const TargetBlob& blob : request_.blobs) {
    const Index length = std::ssize(blob.bytes);
    Json& object = list.add_item(Json::object());
    object.set("name", blob.name).set("path", key_path_text(blob.path)).set("offset", offset).set("length", length);
    offset += length;
  }
  return to_text(Json::object().set("objects", std::move(list)));
}

Status OrbaxTarget::seal_gap(const Extent& gap, const EmitBytes& emit) const {
  static constexpr std::array<std::byte, std::size_t{64} << 10> kZeros{};
  for (Index done = 0; done < gap.length;) {
    const auto zeros = Bytes(kZeros).first(static_cast<std::size_t>(std::min(std::ssize(kZeros), gap.length - done)));
    TRY(emit(gap.file, gap.offset + done, zeros));
    done += std::ssize(zeros);
  }
  return {};
}

Status OrbaxTarget::seal(const PayloadCrc&, const EmitBytes& emit) const {
  for (const Extent& gap : gaps_) TRY(seal_gap(gap, emit));
  for (const Text& text : texts_) {
    Index at = 0;
    TRY(text.write([&](std::string_view bytes) -> Status {
      TRY(emit(text.file, at, as_bytes(bytes)));
      at += std::ssize(bytes);
      return {};
    }));
  }
  return {};
}

Status OrbaxTarget::seal_at(const Extent& place, const PayloadCrc&, const EmitBytes& emit) const {
  const Index end = place.offset + place.length;
  for (const Text& text : texts_) {
    if (text.file != place.file) continue;
    Index at = 0;
    return text.write([&](std::string_view bytes) -> Status {
      const Index begin = std::exchange(at, at + std::ssize(bytes));
      if (at <= place.offset || begin >= end) return {};
      return emit(text.file, begin, as_bytes(bytes));
    });
  }
  const auto ends_before = [](const Extent& gap, const Extent& p) {
    return std::pair(gap.file, gap.offset + gap.length) <= std::pair(p.file, p.offset);
  };
  for (auto gap = std::lower_bound(gaps_.begin(), gaps_.end(), place, ends_before);
       gap != gaps_.end() && gap->file == place.file && gap->offset < end; ++gap)
    TRY(seal_gap(*gap, emit));
  return {};
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  TRY(rename_parameter_lists(request));
  auto target = std::make_unique<OrbaxTarget>(std::move(request));
  TRY(target->lay_out());
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace reshard::orbax
