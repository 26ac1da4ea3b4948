// SPDX-License-Identifier: Apache-2.0
// What an item contains that is written, and the JSON files next to its arrays (item_metadata.h) that say so.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/format.h"
#include "lib/layout/box.h"

namespace reshard::orbax {

using EmitText = std::function<Status(std::string_view text)>;

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

// The arrays and objects of an item. Arrays have numbers: first those of the tensors, then those of random keys.
class ItemContent {
 public:
  // `request` and `catalog` must outlive this object. The catalog's tensors and `grids` are added later.
  ItemContent(const LayoutRequest& request, const Catalog& catalog) : request_(request), catalog_(catalog) {}

  std::vector<Dims> grids;  // of each tensor: the shape of its chunks

  // Finds the objects that JAX's tree can hold. Then sorts the arrays by their keys in the database, and fails if keys
  // of one array would be among those of another. Call it when all tensors have been added.
  Status find_tree();

  // Returns the arrays in the order of their keys.
  const std::vector<std::uint32_t>& sorted() const { return sorted_; }
  bool is_random_key(std::uint32_t array) const { return array >= catalog_.tensors().size(); }
  const RandomKey& random_key(std::uint32_t array) const { return keys_[array - catalog_.tensors().size()]; }
  const std::string& name_of(std::uint32_t array) const;
  Dims grid_of(std::uint32_t array) const;
  bool has_strings() const;
  bool has_sharding() const;

  // Emit the contents of files, or return them.
  Status write_item_metadata(int zarr_version, const EmitText& emit) const;
  Status write_array_metadata(const EmitText& emit) const;
  Status write_sharding(const EmitText& emit) const;
  std::string strings() const;
  std::string objects() const;

 private:
  void find_leaves();
  Status order_names();
  KeyPath path_of(const std::string& name, const KeyPath& path) const;
  Json sharding_of(std::uint32_t array) const;

  const LayoutRequest& request_;
  const Catalog& catalog_;
  std::vector<std::uint32_t> sorted_;
  bool is_nested_ = true;  // names form a tree: none is also the beginning of another one
  std::vector<ObjectLeaf> leaves_;
  std::vector<RandomKey> keys_;
};

}  // namespace reshard::orbax
