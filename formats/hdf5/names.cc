// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5/names.h"

#include <algorithm>

#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard::hdf5 {
namespace {

constexpr std::size_t kMaxPath = 1000;    // bytes; longer names are stored in an attribute
constexpr std::size_t kMaxKeyPath = 256;  // parts

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

std::string key_path_text(const KeyPath& path) {
  Json parts = Json::array();
  for (const auto& part : path) {
    if (const auto* key = std::get_if<std::string>(&part))
      parts.push_back(*key);
    else
      parts.push_back(std::get<Index>(part));
  }
  return to_text(parts);
}

Result<KeyPath> parse_key_path(const std::string& text, const std::string& place) {
  const Json json = TRY(parse_json(text, place));
  const auto parts = TRY(json.as_array().context(place));
  if (parts.size() > kMaxKeyPath)
    return corrupt(place + ": expected at most " + std::to_string(kMaxKeyPath) + " parts, got " +
                   std::to_string(parts.size()));
  KeyPath path;
  for (const Json& part : parts) {
    if (const auto key = part.as_string())
      path.emplace_back(std::string(*key));
    else
      path.emplace_back(TRY(part.as_index().context(place)));
  }
  return path;
}

}  // namespace reshard::hdf5
