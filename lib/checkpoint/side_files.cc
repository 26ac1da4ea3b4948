// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/side_files.h"

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"

namespace reshard {

Result<std::string> SideFile::read() const { return path.empty() ? text : TRY(read_whole_file(path, kMaxSideFile)); }

Result<Index> SideFile::size() const { return path.empty() ? std::ssize(text) : TRY(TRY(File::open(path)).size()); }

Result<std::optional<std::string>> leads_out(const std::string& path, const std::string& directory) {
  using Outside = std::optional<std::string>;
  const std::string real = is_url(path) ? "" : TRY(real_path(path));
  if (real.empty() || TRY(is_at_or_below(real, directory))) return Outside();
  for (std::string at = TRY(real_path(directory)); at.size() > 1; at = parent_path(at))
    if (base_name(at) == "snapshots" && parent_path(real) == path_join(parent_path(at), "blobs")) return Outside();
  return Outside(real);
}

Result<std::vector<std::string>> files_like(const std::string& directory, std::span<const std::string_view> patterns) {
  std::vector<std::string> out;
  const auto entries = TRY(list_directory(directory));
  for (const std::string_view pattern : patterns) {
    const std::size_t slash = pattern.find('/');
    for (const DirectoryEntry& entry : entries) {
      const bool is_inside = slash != std::string_view::npos;
      if (entry.is_directory != is_inside || !glob_match(pattern.substr(0, slash), entry.name)) continue;
      if (!is_inside) {
        out.push_back(entry.name);
        continue;
      }
      const std::string_view inside[] = {pattern.substr(slash + 1)};
      for (const std::string& name : TRY(files_like(path_join(directory, entry.name), inside)))
        out.push_back(path_join(entry.name, name));
    }
  }
  return out;
}

Result<std::optional<std::vector<std::string>>> files_of_manifest(const std::string& directory) {
  const std::string path = path_join(directory, kManifestFile);
  if (!TRY(path_exists(path))) return std::optional<std::vector<std::string>>();
  const Json json = TRY(parse_json(TRY(read_whole_file(path, kMaxManifestBytes)), path));
  const Json* const files = json.find("files");
  if (files == nullptr) return std::optional<std::vector<std::string>>();
  std::vector<std::string> out = {std::string(kManifestFile), std::string(kConfigFile)};
  for (const Json::Member& member : TRY(files->as_object().context(path))) {
    if (!is_safe_relative_path(member.key)) continue;
    const auto size = member.value.as_index();
    const auto there = TRY(node_at(path_join(directory, member.key)));
    if (size && there && there->is_regular() && there->size == *size) out.push_back(member.key);
  }
  return std::optional(std::move(out));
}

}  // namespace reshard
