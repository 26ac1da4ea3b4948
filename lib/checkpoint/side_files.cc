#include "lib/checkpoint/side_files.h"

#include <cstdlib>

#include "lib/base/file.h"
#include "lib/base/json.h"

namespace reshard {
namespace {

std::string real_path(const std::string& path) {
  char* const real = ::realpath(path.c_str(), nullptr);
  std::string out = real == nullptr ? "" : real;
  ::free(real);
  return out;
}

}  // namespace

std::optional<std::string> leads_out(const std::string& path, const std::string& directory) {
  const std::string real = real_path(path);
  if (real.empty() || lies_in(real, directory)) return std::nullopt;
  for (std::string at = real_path(directory); at.size() > 1; at = parent_path(at))
    if (base_name(at) == "snapshots" && parent_path(real) == path_join(parent_path(at), "blobs")) return std::nullopt;
  return real;
}

std::vector<std::string> files_of_manifest(const std::string& directory) {
  std::vector<std::string> out;
  const std::string path = path_join(directory, kManifestFile);
  const auto text = read_whole_file(path, kMaxManifestBytes);
  const auto json = text ? parse_json(*text, path) : Result<Json>(text.error());
  const Json* const files = json ? json->find("files") : nullptr;
  if (files == nullptr || !files->is_object()) return out;
  const std::span<const Json::Member> members = *files->as_object();
  for (const Json::Member& member : members) {
    if (!is_safe_relative_path(member.key)) continue;
    const auto size = member.value.as_index();
    const auto there = look_at(path_join(directory, member.key));
    if (size && there && there->is_regular() && there->size == *size) out.push_back(member.key);
  }
  return out;
}

}  // namespace reshard
