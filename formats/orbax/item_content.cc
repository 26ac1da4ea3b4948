// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/item_content.h"

#include <algorithm>
#include <numeric>

#include "formats/encoding/key_path.h"
#include "formats/encoding/pickle.h"
#include "formats/encoding/torch_archive.h"
#include "formats/orbax/chunk_grid.h"
#include "formats/orbax/item_metadata.h"
#include "formats/orbax/zarr.h"
#include "lib/base/text.h"

namespace reshard::orbax {
namespace {

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
      !data->is_sequence() || shape->size() > std::size_t{kMaxRank} || data->size() > kMaxNumbers)
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
  const bool is_whole = checked_volume(out.shape) == std::ssize(*data) && data->size() > 0;
  return is_whole ? std::optional(std::move(out)) : std::nullopt;
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

// Returns which axes of the mesh shard each dimension. JAX shards evenly only, so a dimension that the axes do not
// divide has none.
Json partition_of(const Dims& shape, const Placement& placement, const Mesh& mesh) {
  std::vector<std::vector<std::string>> axes(shape.rank());
  for (const Split& split : placement.splits)
    for (const std::string& axis : split.axes)
      if (mesh.size(axis) > 1) axes[split.dim].push_back(axis);
  Json out = Json::array();
  for (int d = 0; d < shape.rank(); ++d) {
    const auto& by = axes[d];
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

}  // namespace

Status ItemContent::find_tree() {
  find_leaves();
  return order_names();
}

void ItemContent::find_leaves() {
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

Status ItemContent::order_names() {
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

const std::string& ItemContent::name_of(std::uint32_t array) const {
  return is_random_key(array) ? random_key(array).blob->name : catalog_.tensors()[array].name;
}

Dims ItemContent::grid_of(std::uint32_t array) const {
  return is_random_key(array) ? random_key(array).shape : grids[array];
}

bool ItemContent::has_strings() const {
  return std::any_of(leaves_.begin(), leaves_.end(), [](const ObjectLeaf& leaf) { return leaf.type == "string"; });
}

bool ItemContent::has_sharding() const { return request_.mesh.ranks() > 1 || !keys_.empty(); }

KeyPath ItemContent::path_of(const std::string& name, const KeyPath& path) const {
  const bool is_known = path.size() > 1 && dotted_name(path) == name;
  if (is_known) return path;
  return is_nested_ ? components_of(name) : KeyPath{name};
}

Status ItemContent::write_item_metadata(int zarr_version, const EmitText& emit) const {
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
  return leaves.end("}, \"use_ocdbt\": true, \"use_zarr3\": " + std::string(zarr_version == 3 ? "true" : "false") +
                    ", \"store_array_data_equal_to_fill_value\": true, \"custom_metadata\": null}");
}

Status ItemContent::write_array_metadata(const EmitText& emit) const {
  JsonRun arrays("{\"array_metadatas\": [", emit);
  for (const std::uint32_t i : sorted_) {
    Json array = Json::object().set("param_name", name_of(i)).set("write_shape", list_of(grid_of(i)));
    array.set("chunk_shape", list_of(grid_of(i)));
    array.set("ext_metadata", is_random_key(i) ? Json::object().set("random_key_impl", random_key(i).kind) : Json());
    TRY(arrays.add(to_text(Json::object().set("array_metadata", std::move(array)))));
  }
  return arrays.end("]}");
}

// Returns an array's NamedSharding. Random keys are replicated, or on the first device if there is no mesh.
Json ItemContent::sharding_of(std::uint32_t array) const {
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

Status ItemContent::write_sharding(const EmitText& emit) const {
  JsonRun members("{", emit);
  for (const std::uint32_t i : sorted_)
    if (request_.mesh.ranks() > 1 || is_random_key(i))
      TRY(members.add(member(base64(name_of(i)), to_text(sharding_of(i)))));
  return members.end("}");
}

std::string ItemContent::strings() const {
  Json out = Json::object();
  for (const ObjectLeaf& leaf : leaves_)
    if (leaf.type == "string") out.set(leaf.blob->name, leaf.text);
  return to_text(out);
}

std::string ItemContent::objects() const {
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

}  // namespace reshard::orbax
