// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/weight_index.h"

#include <set>

#include "lib/base/file.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr Index kMaxIndexBytes = 100'000'000;

Result<std::string> file_inside(const Json& value, const std::string& where) {
  const auto file = value.as_string();
  if (!file) return Error(file.error()).context(where);
  if (!is_safe_relative_path(*file))
    return corrupt(where + ": expected a file inside the directory, got '" + printable(*file) + "'");
  return std::string(*file);
}

}  // namespace

Result<WeightIndex> WeightIndex::read(const std::string& path) {
  return parse(TRY(read_whole_file(path, kMaxIndexBytes)), path);
}

Result<WeightIndex> WeightIndex::parse(std::string_view text, const std::string& path) {
  const Json json = TRY(parse_json(text, path));
  WeightIndex index;
  index.path_ = path;
  for (const Json::Member& member : TRY(json.get_object("weight_map").context(path))) {
    const std::string where = path + ": weight_map: " + tensor_text(member.key);
    index.by_name_.emplace(member.key, index.entries_.size());
    auto file = TRY(file_inside(member.value, where));
    index.entries_.push_back({member.key, std::move(file)});
  }
  const Json* metadata = json.find("metadata");
  if (metadata == nullptr) return index;
  if (const Json* total = metadata->find("total_size")) index.total_size_ = *total;
  if (const Json* groups = metadata->find("param_groups"))
    index.param_groups_ = TRY(file_inside(*groups, path + ": metadata: param_groups"));
  if (!metadata->contains("delta_encoding")) return index;
  for (const Json::Member& member : TRY(metadata->as_object().context(path + ": metadata")))
    if (const auto value = member.value.as_string()) index.delta_.emplace_back(member.key, *value);
  return index;
}

std::optional<std::size_t> WeightIndex::find(const std::string& name) const {
  const auto it = by_name_.find(name);
  if (it == by_name_.end()) return std::nullopt;
  return it->second;
}

std::vector<std::string> WeightIndex::files() const {
  std::set<std::string> out;
  for (const Entry& entry : entries_) out.insert(entry.file);
  return {out.begin(), out.end()};
}

}  // namespace reshard
