// SPDX-License-Identifier: Apache-2.0
#include "lib/output/old_output.h"

#include <set>
#include <string_view>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/output/work_directory.h"

namespace reshard {
namespace {

// Returns the files in the directory that are not part of the checkpoint. Does not descend into foreign directories.
Result<std::vector<std::string>> foreign_files(const OutputPath& to, const std::string& destination,
                                               const OldOutput& old) {
  const auto files = to.files_of_checkpoint(destination);
  if (!files && files.error().code() == ErrorCode::kIo) return files.error();
  if (!files)
    return usage_error(destination + ": the destination is neither empty nor a checkpoint; it will not be replaced (" +
                       files.error().message() + ")");
  const std::set<std::string> own(files->begin(), files->end());
  std::vector<std::string> foreign;
  std::string foreign_directory = "/";
  for (const Node& node : old.inside) {
    if (node.name.starts_with(foreign_directory)) continue;
    const std::string below = node.name + "/";
    const auto first = own.lower_bound(below);
    const bool is_own = node.is_directory() ? first != own.end() && first->starts_with(below)
                                            : (node.is_regular() || node.is_link()) && own.contains(node.name);
    if (is_own) continue;
    foreign.push_back(printable(node.is_directory() ? below : node.name));
    if (node.is_directory()) foreign_directory = below;
  }
  return foreign;
}

}  // namespace

Result<OldOutput> look_at_old(const std::string& path) {
  OldOutput old{TRY(look_at(path)), {}};
  if (!old.self.is_directory()) return old;
  old.inside = TRY(list_tree(path));
  std::erase_if(old.inside, [](const Node& node) { return node.name.starts_with(kMarker); });
  return old;
}

namespace {

constexpr std::string_view kRefusal = "; it will not be replaced";

Status check_not_mounted(const std::string& destination) {
  if (!TRY(is_mount_point(destination))) return {};
  return usage_error(
      destination +
      ": a file system is mounted there, so nothing can be moved to this path; name a new directory inside it");
}

}  // namespace

// A link to a checkpoint cannot be replaced: only the link would be removed.
Result<OldOutput> replaceable_directory(const OutputPath& to, const std::string& destination) {
  TRY(check_not_mounted(destination));
  OldOutput old = TRY(look_at_old(destination));
  if (!old.self.is_directory())
    return usage_error(destination + ": the destination is not a directory" + std::string(kRefusal));
  if (old.inside.empty()) return old;
  const std::vector<std::string> foreign = TRY(foreign_files(to, destination, old));
  if (foreign.empty()) return old;
  return usage_error(destination + ": the destination contains files that do not belong to its checkpoint: " +
                     some_of(foreign, 5) + std::string(kRefusal));
}

Result<OldOutput> replaceable(const OutputPath& to, const std::string& destination, const Target& target) {
  const SingleFile* const file = target.single_file();
  if (!file) return replaceable_directory(to, destination);
  TRY(check_not_mounted(destination));
  OldOutput old = TRY(look_at_old(destination));
  if (old.self.is_regular() && TRY(file->is_own_file(destination))) return old;
  return usage_error(destination + ": the destination is not a file of this format" + std::string(kRefusal));
}

}  // namespace reshard
