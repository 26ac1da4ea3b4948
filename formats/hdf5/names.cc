// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5/names.h"

#include <algorithm>

#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard::hdf5 {
namespace {

constexpr std::size_t kMaxPath = 1000;  // bytes; longer names are stored in an attribute

// Returns whether each part between dots can be the name of a link.
bool is_plain(std::string_view name) {
  if (name.empty() || name.size() > kMaxPath || name.find('/') != std::string_view::npos ||
      name.find('\0') != std::string_view::npos)
    return false;
  const auto parts = split(std::string(name), '.');
  return parts.front() != kOwnGroup &&
         std::none_of(parts.begin(), parts.end(), [](const auto& p) { return p.empty(); });
}

}  // namespace

PathMaker::PathMaker(const std::vector<std::string_view>& names) {
  for (const std::string_view name : names)
    if (is_plain(name))
      for (std::size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1))
        groups_.emplace(name.substr(0, dot));
}

std::string PathMaker::path_of(std::string_view name) {
  std::string path(name);
  if (!is_plain(name) || groups_.contains(path))
    return std::string(kOwnGroup) + "/tensors/" + std::to_string(escaped_++);
  std::replace(path.begin(), path.end(), '.', '/');
  return path;
}

std::string name_of_path(std::string_view path) {
  std::string name(path);
  std::replace(name.begin(), name.end(), '/', '.');
  return name;
}

}  // namespace reshard::hdf5
