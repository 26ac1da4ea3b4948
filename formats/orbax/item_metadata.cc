// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/item_metadata.h"

#include <algorithm>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/json_parts.h"
#include "lib/base/memory_limit.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard::orbax {
namespace {

constexpr Index kMaxJsonBytes = Index{256} << 20;

// Reads a JSON file of an item member by member, and one of its members part by part. Returns false if it does not
// exist.
Result<bool> read_members(const PathSnapshot& item, std::string_view name, const OnJsonMember& member,
                          const JsonParts& parts = {}) {
  if (!item.has_file(name)) return false;
  const std::string path = path_join(item.path(), name);
  const auto entry = TRY(entry_at(path));
  const Index size = entry ? std::min(entry->size, kMaxJsonBytes) : 0;
  TRY(may_take(2 * size, [&] { return path; }));
  TRY(parse_json_parts(TRY(read_whole_file(path, kMaxJsonBytes)), path, member, parts));
  return true;
}

Result<Leaf> leaf_of(const Json& json) {
  Leaf out;
  for (const Json& part : TRY(json.get_array("key_metadata"))) {
    const std::string_view key = TRY(part.get_string("key"));
    const auto position = TRY(part.get_index("key_type")) == kPositionKey ? as_number(key) : std::nullopt;
    if (position)
      out.path.emplace_back(*position);
    else
      out.path.emplace_back(std::string(key));
  }
  if (const Json* const value = json.find("value_metadata")) {
    if (const auto type = value->get_string("value_type")) out.type = *type;
    if (const auto skipped = value->get_bool("skip_deserialize"); skipped.has_value()) out.is_empty = *skipped;
  }
  return out;
}

// Returns the number of devices and the axes of a sharding over a mesh; no devices if the sharding is of another kind.
std::pair<Index, std::string> mesh_of(const Json& sharding) {
  const auto sizes = sharding.get_array("shape");
  const auto names = sharding.get_array("axis_names");
  if (!sizes || !names || sizes->size() != names->size()) return {0, ""};
  Index devices = 1;
  std::vector<std::string> axes;
  for (std::size_t i = 0; i < sizes->size(); ++i) {
    const auto size = (*sizes)[i].as_index();
    const auto name = (*names)[i].as_string();
    const auto product = size && *size > 0 ? checked_mul(devices, *size) : std::nullopt;
    if (!name || !product) return {0, ""};
    devices = *product;
    if (*size > 1) axes.push_back(printable(*name) + "=" + std::to_string(*size));
  }
  return {devices, join(axes, ", ")};
}

}  // namespace

Result<std::optional<ItemMetadata>> read_item_metadata(const PathSnapshot& item) {
  ItemMetadata out;
  const std::string path = path_join(item.path(), kItemMetadata);
  const auto add = [&](const std::string& key, const Json& value) -> Status {
    if (key == "use_ocdbt" && value.is_bool()) out.uses_database = TRY(value.as_bool());
    if (key == "store_array_data_equal_to_fill_value" && value.is_bool()) out.stores_fill_values = TRY(value.as_bool());
    if (key == "tree_metadata" && !value.is_object())
      return corrupt(path + ": tree_metadata: expected an object, got " + std::string(value.kind()));
    return {};
  };
  const auto add_leaf = [&](const std::string& key, const Json& value) -> Status {
    Leaf leaf = TRY(leaf_of(value).context(path + ": '" + printable(key) + "'"));
    std::string name = dotted_name(leaf.path);
    if (!out.leaves.emplace(name, std::move(leaf)).second)
      return unsupported(path + ": '" + printable(key) + "': another leaf also has the name '" + printable(name) +
                         "': keys with dots cannot be told apart");
    return {};
  };
  if (!TRY(read_members(item, kItemMetadata, add, {"tree_metadata", add_leaf}))) return std::optional<ItemMetadata>();
  return std::optional(std::move(out));
}

Result<std::string> read_mesh(const PathSnapshot& item) {
  std::pair<Index, std::string> most = {0, ""};
  const std::string path = path_join(item.path(), kSharding);
  TRY(read_members(item, kSharding, [&](const std::string&, const Json& value) -> Status {
    const auto text = value.as_string();
    const auto sharding = text ? parse_json(*text, path) : Result<Json>(Json());
    if (!sharding) return {};
    auto mesh = mesh_of(*sharding);
    if (mesh.first > most.first) most = std::move(mesh);
    return {};
  }));
  return most.second;
}

Result<std::map<std::string, std::string, std::less<>>> read_key_kinds(const PathSnapshot& item) {
  std::map<std::string, std::string, std::less<>> out;
  if (!item.has_directory(kArrayMetadatas)) return out;
  const PathSnapshot& directory = *TRY(item.inside(kArrayMetadatas));
  const auto add = [&](const std::string&, const Json& value) -> Status {
    const Json* const array = value.find("array_metadata");
    const Json* const more = array ? array->find("ext_metadata") : nullptr;
    const auto kind = more ? more->get_string("random_key_impl") : Result<std::string_view>(std::string_view());
    if (kind && !kind->empty()) out.emplace(TRY(array->get_string("param_name").context(directory.path())), *kind);
    return {};
  };
  const auto ignore = [](const std::string&, const Json&) { return Status(); };
  // Each process lists the arrays that it wrote a part of, and all random keys, so one file is enough.
  for (const DirectoryEntry& entry : directory.entries())
    if (!entry.is_directory) return TRY(read_members(directory, entry.name, ignore, {"array_metadatas", add})), out;
  return out;
}

}  // namespace reshard::orbax
