// SPDX-License-Identifier: Apache-2.0
// The JSON files next to an item's arrays (orbax/checkpoint/_src/metadata/tree.py, sharding.py,
// array_metadata_store.py):
//
//   _METADATA
//     {"tree_metadata": {"('params', 'w')": {
//        "key_metadata": [{"key": "params", "key_type": 2}, ...],   1: position in a list or tuple, 2: key of a dict
//        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": false}}, ...},
//      "use_ocdbt": true, "use_zarr3": true, "store_array_data_equal_to_fill_value": true}
//   _sharding
//     {base64 of a name: JSON in a string, ...}
//        {"sharding_type": "NamedSharding", "shape": [4, 2], "axis_names": ["fsdp", "tp"],
//         "partition_spec": ["fsdp", null], ...}
//   array_metadatas/process_0
//     {"array_metadatas": [{"array_metadata": {"param_name": ...,
//        "ext_metadata": {"random_key_impl": "threefry2x32"} | null, ...}}, ...]}
//   _strings.json
//     {name: string, ...}
//
// An array's name is its path in the tree, joined by dots.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/path_snapshot.h"

namespace reshard::orbax {

inline constexpr std::string_view kItemMetadata = "_METADATA", kSharding = "_sharding", kStrings = "_strings.json",
                                  kArrayMetadatas = "array_metadatas";
inline constexpr std::string_view kObjects = "_reshard_objects.json", kObjectBytes = "_reshard_objects.bin";
inline constexpr Index kPositionKey = 1, kDictKey = 2;  // key_type

struct Leaf {
  KeyPath path;
  std::string type;       // "jax.Array", "np.ndarray", "scalar", "string", "None", "Dict", ...
  bool is_empty = false;  // no data: None, or an empty container

  bool is_array() const { return !is_empty && (type == "jax.Array" || type == "np.ndarray" || type == "scalar"); }
};

struct ItemMetadata {
  std::map<std::string, Leaf, std::less<>> leaves;  // by name
  std::optional<bool> uses_database;  // false: a directory for each array; null: not said, as by old versions
  bool stores_fill_values = false;    // so a missing chunk is damage
};
// Reads _METADATA; nothing if there is none, as in old checkpoints.
Result<std::optional<ItemMetadata>> read_item_metadata(const PathSnapshot& item);

// Returns the largest mesh that arrays are sharded on, "fsdp=4, tp=2"; empty if it is not recorded.
Result<std::string> read_mesh(const PathSnapshot& item);

// Returns the kinds of random keys, by the names of the arrays that hold them.
Result<std::map<std::string, std::string, std::less<>>> read_key_kinds(const PathSnapshot& item);

}  // namespace reshard::orbax
