// SPDX-License-Identifier: Apache-2.0
// Tensor names as paths in an HDF5 file: model.layers.0.weight is the dataset weight in the groups /model/layers/0.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>

#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::hdf5 {

// The group of everything that is not a tensor with its own path.
inline constexpr std::string_view kOwnGroup = "reshard";
inline constexpr const char* kNameAttribute = "reshard_name";  // the name, if the path does not give it
inline constexpr const char* kPathAttribute = "reshard_path";  // the key path in the state_dict, if it is not the name
inline constexpr std::size_t kMaxTextAttribute = 60'000;       // bytes; the format has room for 64 KiB

// Assigns every tensor a path without a leading slash. Paths are unique, and none is a group of another.
class PathMaker {
 public:
  // `names` are all names for which path_of() will be called.
  explicit PathMaker(const std::vector<std::string_view>& names);
  // Returns the name with slashes for dots. Returns reshard/tensors/N if the name has empty parts or slashes, is in the
  // group reshard, or is a group of another name.
  std::string path_of(std::string_view name);

 private:
  std::unordered_set<std::string> groups_;  // every prefix of a name that ends before a dot
  Index escaped_ = 0;
};

// Returns the name for a path.
std::string name_of_path(std::string_view path);

}  // namespace reshard::hdf5
