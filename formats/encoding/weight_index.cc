// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/weight_index.h"

#include <algorithm>
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

// Takes a variant's name from the front of a text: ".fp16". Returns "" if there is none.
std::string_view take_variant(std::string_view& text) {
  const std::size_t end = text.starts_with('.') ? std::min(text.find_first_of(".-/", 1), text.size()) : 0;
  const std::string_view variant = text.substr(0, end);
  if (variant.size() < 2) return {};
  text.remove_prefix(end);
  return variant.substr(1);
}

}  // namespace

std::optional<WeightIndexName> parse_weight_index_name(std::string_view name, std::string_view ending) {
  constexpr std::string_view kIndex = ".index";
  constexpr std::string_view kJson = ".json";
  name.remove_prefix(name.rfind('/') + 1);  // npos + 1 is 0
  const std::size_t at = name.find(ending);
  if (at == std::string_view::npos) return std::nullopt;
  std::string_view rest = name.substr(at + ending.size());
  WeightIndexName out{std::string(name.substr(0, at)), {}};
  if (!rest.starts_with(kIndex)) out.variant = take_variant(rest);
  if (!take(rest, kIndex)) return std::nullopt;
  if (rest != kJson && out.variant.empty()) out.variant = take_variant(rest);
  return rest == kJson ? std::optional(std::move(out)) : std::nullopt;
}

bool is_variant_name(std::string_view name, std::string_view stem, std::string_view ending) {
  if (!take(name, stem) || !name.ends_with(ending) || name == ending) return false;
  if (take(name, "-") && (!take_number(name) || !take(name, "-of-") || !take_number(name) || name == ending))
    return false;
  return name.starts_with('.');
}

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
