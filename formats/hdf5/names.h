// Tensor names as paths in an HDF5 file: model.layers.0.weight is the dataset weight in the groups /model/layers/0.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>

#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::hdf5 {

// What is not a tensor of the checkpoint lies below this.
inline constexpr std::string_view kOwnGroup = "reshard";
inline constexpr const char* kNameAttribute = "reshard_name";  // where the path does not say it
inline constexpr const char* kPathAttribute =
    "reshard_path";                                       // place in the nested state_dict, where it is not the name
inline constexpr std::size_t kMaxTextAttribute = 60'000;  // bytes; the format has room for 64 KiB

// Gives every tensor a path without a leading slash; no path is given twice, and none is a group of another.
class PathMaker {
 public:
  // `names` are all that will be asked for.
  explicit PathMaker(const std::vector<std::string_view>& names);
  // The name with slashes for dots, or reshard/tensors/N where that cannot be: the name has empty parts or slashes, is
  // in our own group, or is a group of another.
  std::string path_of(std::string_view name);

 private:
  std::unordered_set<std::string> groups_;  // every prefix of a name that ends before a dot
  Index escaped_ = 0;
};

// The name that a path stands for.
std::string name_of_path(std::string_view path);

// A place in a state_dict as JSON and back: ["optimizer", "state", 0].
std::string key_path_text(const KeyPath& path);
Result<KeyPath> parse_key_path(const std::string& text, const std::string& place);

}  // namespace reshard::hdf5
