// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/key_path.h"

#include "lib/base/json.h"

namespace reshard {
namespace {

constexpr std::size_t kMaxKeyPath = 256;  // parts

}  // namespace

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

}  // namespace reshard
