// SPDX-License-Identifier: Apache-2.0
// Writes an item as the first process of a save would: a database of arrays (zarr.h). Every offset of an uncompressed
// chunk is known before a byte is written. Compressed chunks replace those in the files of chunks, in the same order
// and without the gaps between them.
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
#include "formats/encoding/zstd_frame.h"
#include "formats/orbax/item_metadata.h"
#include "formats/orbax/ocdbt.h"
#include "formats/orbax/ocdbt_writer.h"
#include "formats/orbax/orbax.h"
#include "formats/orbax/train_state.h"
#include "formats/orbax/zarr.h"
#include "formats/tensor_files/parameter_lists.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/device/chunk_assembler.h"

namespace reshard::orbax {
namespace {

// A chunk is read whole by JAX, even if a device needs only a part of it.
constexpr Index kMaxChunk = Index{32} << 20;
constexpr Index kMaxCompressedChunk = Index{4} << 20;  // smaller, as several wait for their bytes
constexpr Index kAlignFrom = Index{64} << 10;          // larger chunks begin at a page
constexpr Index kMaxBytes = Index{1} << 62;            // limit for all tensors

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

// Returns the shape of a tensor's chunks: what one rank of the mesh holds, cut further into at most `limit` bytes. Only
// rows are cut unevenly, so that the padding of a chunk follows its elements.
Dims chunk_shape_of(const TargetTensor& tensor, const Mesh& mesh, Index limit) {
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
    const Index parts = ceil_div(volume(grid) * byte_size(tensor.dtype), limit);
    if (parts > 1) grid[d] = ceil_div(grid[d], parts_of(grid[d], std::min(parts, grid[d]), d == 0));
  }
  return grid;
}

Dims counts_of(const Dims& shape, const Dims& grid) {
  Dims out;
  for (int d = 0; d < shape.rank(); ++d) out.push_back(ceil_div(shape[d], grid[d]));
  return out;
}

// Calls `visit` with the key of each chunk, which begins with `key`, and with its row-major number, in the order of the
// keys. `separator` precedes the position in dimension `d`; `next` those in the dimensions after it.
template <class Visit>
Status each_key(const Dims& counts, int d, const std::string& key, std::string_view separator, std::string_view next,
                Index number, const Visit& visit) {
  if (d == counts.rank()) return visit(key, number);
  std::vector<std::string> texts;
  for (Index i = 0; i < counts[d]; ++i) texts.push_back(std::to_string(i));
  std::sort(texts.begin(), texts.end());
  for (const std::string& text : texts)
    TRY(each_key(counts, d + 1, key + std::string(separator) + text, next, next, number * counts[d] + std::stoll(text),
                 visit));
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

class OrbaxTarget : public Target, private DataEncoder {
 public:
  OrbaxTarget(LayoutRequest request, int zarr_version)
      : request_(std::move(request)), form_{zarr_version, request_.compression.zstd_level} {
    if (is_compressed()) encoder_ = this;
  }

  Status lay_out();
  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;
  Status seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const override;

 private:
  // The place of a compressed chunk.
  struct Stored {
    Index offset = 0, length = 0;
  };

  Status encode(Index offset, Bytes bytes, const EmitChunk& emit) override;
  Index chunk_count() const override { return std::ssize(stored_); }
  Result<Index> place(const EncodedChunk& chunk) override;
  Index worker_bytes() const override {
    return kMaxCompressedChunk + zstd::FrameEncoder::memory(form_.zstd_level, kMaxCompressedChunk);
  }
  bool is_compressed() const { return form_.zstd_level > 0; }
  Index stored_bytes(std::size_t tensor) const {
    return volume(grids_[tensor]) * byte_size(catalog_.tensors()[tensor].dtype);
  }
  std::size_t tensor_at(Index offset) const;
  std::size_t chunk_at(std::size_t tensor, Index offset) const;
  Status measure_texts();
  Status store_chunk(Index number, Bytes chunk, const EmitChunk& emit);
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

  LayoutRequest request_;  // its tensors' names move to the catalog
  const ZarrForm form_;
  std::vector<Dims> grids_;   // of each tensor
  std::vector<Extent> gaps_;  // bytes of the chunks' files that belong to no tensor, in order
  // The arrays in the order of their database keys. Numbers after those of the tensors are random keys.
  std::vector<std::uint32_t> sorted_;
  bool is_nested_ = true;  // names form a tree: none is also the beginning of another one
  std::vector<ObjectLeaf> leaves_;
  std::vector<RandomKey> keys_;
  std::uint32_t chunk_files_ = 0;
  std::vector<Text> texts_;

  // Of compressed chunks.
  std::vector<Index> first_chunk_;       // of each tensor: the number of its first chunk
  std::vector<Stored> stored_;           // by number
  Index placed_ = 0, placed_bytes_ = 0;  // chunks that have a place
  ChunkAssembler assembler_;
  zstd::FrameEncoder frames_{form_.zstd_level, kMaxCompressedChunk};
};

std::string hex_name(std::string_view directory, Index number) {
  std::array<char, 33> digits{};
  std::snprintf(digits.data(), digits.size(), "%032llx", static_cast<unsigned long long>(number));
  return std::string(directory) + digits.data();
}

// Returns the place of a chunk whose `stored` bytes contain `bytes` bytes of elements.
Extent OrbaxTarget::place_chunk(Index bytes, Index stored) {
  if (chunk_files_ == 0 || (!is_compressed() && catalog_.files.back().size > 0 &&
                            stored > request_.max_file_bytes - catalog_.files.back().size)) {
    ++chunk_files_;
    catalog_.files.push_back({hex_name(std::string(kProcessPrefix) + "0/d/", chunk_files_), 0});
  }
  const auto file = static_cast<std::uint32_t>(catalog_.files.size() - 1);
  Index& size = catalog_.files.back().size;
  const bool is_aligned = stored >= kAlignFrom && !is_compressed();
  const Index begin = is_aligned ? ceil_div(size, File::kDirectUnit) * File::kDirectUnit : size;
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
  const Dims grid = chunk_shape_of(wanted, request_.mesh, is_compressed() ? kMaxCompressedChunk : kMaxChunk);
  if (!zarr_text(form_, wanted.dtype, wanted.shape, grid))
    return unsupported(tensor_text(wanted.name) + ": zarr has no dtype for " +
                       std::string(info(wanted.dtype).torch_name) + "; choose another with --dtype");
  Tensor tensor;
  tensor.dtype = wanted.dtype;
  tensor.shape = wanted.shape;
  tensor.fragments = FragmentList(wanted.shape.rank());
  const Index stored = volume(grid) * byte_size(wanted.dtype);
  const Dims counts = counts_of(wanted.shape, grid);
  const Index chunks = volume(counts);
  if (is_compressed()) {
    first_chunk_.push_back(std::ssize(stored_));
    stored_.resize(stored_.size() + static_cast<std::size_t>(chunks));
  }
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
  TRY(add_text(hex_name("d/", 1), [this](const EmitText& emit) {
    std::string unused;
    return write_database(emit, unused);
  }));
  TRY(add_text(std::string(kManifest), [this](const EmitText& emit) -> Status {
    std::string manifest;
    TRY(write_database([](std::string_view) { return Status(); }, manifest));
    return emit(manifest);
  }));
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
      if (is_compressed()) {
        const Stored& stored = stored_[static_cast<std::size_t>(first_chunk_[i] + number)];
        place = {0, stored.offset, stored.length};
      }
      return database.add(key, place);
    };
    // A random key's array is not compressed.
    const ZarrForm form{form_.version, is_key ? 0 : form_.zstd_level};
    const auto add_metadata = [&] {
      return database.add_inline(name + std::string(form.metadata_suffix()), *zarr_text(form, dtype, shape, grid));
    };
    if (form.version == 2) TRY(add_metadata());
    const bool is_scalar = shape.rank() == 0;
    if (volume(counts) > 0 && form.version == 3) TRY(each_key(counts, 0, name + "/c", "/", "/", 0, add));
    if (volume(counts) > 0 && form.version == 2)
      TRY(each_key(counts, 0, name + (is_scalar ? "/0" : "/"), "", ".", 0, add));
    if (form.version == 3) TRY(add_metadata());
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
  return leaves.end("}, \"use_ocdbt\": true, \"use_zarr3\": " + std::string(form_.version == 3 ? "true" : "false") +
                    ", \"store_array_data_equal_to_fill_value\": true, \"custom_metadata\": null}");
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
  if (const auto number = assembler_.incomplete())
    return internal_error("chunk " + std::to_string(*number) + " was not written completely");
  for (std::size_t i = 0; i < gaps_.size() && !is_compressed(); ++i) TRY(seal_gap(gaps_[i], emit));
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

// ---- Compression

// The uncompressed chunks are one file, the first, and so are the compressed ones, in the same order.

// Returns the tensor that has bytes at this offset of the uncompressed file.
std::size_t OrbaxTarget::tensor_at(Index offset) const {
  const auto& tensors = catalog_.tensors();
  const auto next = std::upper_bound(tensors.begin(), tensors.end(), offset, [](Index place, const Tensor& tensor) {
    return place < tensor.fragments.extent(0).offset;
  });
  return static_cast<std::size_t>(next - tensors.begin()) - 1;  // the first tensor begins at offset 0
}

// Returns the number of a tensor's chunk at this offset.
std::size_t OrbaxTarget::chunk_at(std::size_t tensor, Index offset) const {
  const FragmentList& chunks = catalog_.tensors()[tensor].fragments;
  std::size_t begin = 0, end = chunks.size();
  while (end - begin > 1) {
    const std::size_t middle = begin + (end - begin) / 2;
    (chunks.extent(middle).offset <= offset ? begin : end) = middle;
  }
  return begin;
}

Status OrbaxTarget::encode(Index offset, Bytes bytes, const EmitChunk& emit) {
  const std::size_t tensor = tensor_at(offset);
  const Index all = stored_bytes(tensor);  // of a chunk, with its padding
  const auto what = [&] { return tensor_text(catalog_.tensors()[tensor].name); };
  while (!bytes.empty()) {
    const std::size_t chunk = chunk_at(tensor, offset);
    const Extent extent = catalog_.tensors()[tensor].fragments.extent(chunk);
    const Index at = offset - extent.offset, number = first_chunk_[tensor] + static_cast<Index>(chunk);
    if (at >= extent.length) return internal_error(what() + ": bytes to encode reach past it");
    const Bytes part = bytes.first(static_cast<std::size_t>(std::min(extent.length - at, std::ssize(bytes))));
    if (std::ssize(part) == all) {
      TRY(store_chunk(number, part, emit));
    } else {
      const auto done = TRY(assembler_.add({number, at, extent.length, all}, part, what));
      if (!done.empty()) TRY(store_chunk(number, done, emit));
    }
    bytes = bytes.subspan(part.size());
    offset += std::ssize(part);
  }
  return {};
}

Status OrbaxTarget::store_chunk(Index number, Bytes chunk, const EmitChunk& emit) {
  return frames_.encode(chunk, [&](Bytes frame) { return emit({number, std::ssize(frame)}, frame); });
}

Result<Index> OrbaxTarget::place(const EncodedChunk& chunk) {
  const Index out = std::exchange(placed_bytes_, placed_bytes_ + chunk.bytes);
  stored_[static_cast<std::size_t>(chunk.number)] = {out, chunk.bytes};
  if (++placed_ == chunk_count()) TRY(measure_texts());
  return out;
}

// Sets the lengths of the files, which the sizes of all chunks decide.
Status OrbaxTarget::measure_texts() {
  catalog_.files[0].size = placed_bytes_;
  for (const Text& text : texts_) {
    Index& size = catalog_.files[text.file].size;
    size = 0;
    TRY(text.write([&](std::string_view bytes) -> Status {
      size += std::ssize(bytes);
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

namespace {

Result<std::unique_ptr<Target>> lay_out_version(LayoutRequest request, int zarr_version) {
  TRY(rename_parameter_lists(request));
  auto target = std::make_unique<OrbaxTarget>(std::move(request), zarr_version);
  TRY(target->lay_out());
  return std::unique_ptr<Target>(std::move(target));
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) { return lay_out_version(std::move(request), 3); }

Result<std::unique_ptr<Target>> lay_out_zarr2(LayoutRequest request) { return lay_out_version(std::move(request), 2); }

}  // namespace reshard::orbax
