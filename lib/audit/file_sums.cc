// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/file_sums.h"

#include <algorithm>
#include <filesystem>

#include "lib/base/file.h"
#include "lib/base/parallel.h"
#include "lib/base/storage/sha256.h"

namespace reshard {
namespace {

constexpr Index kReadBytes = 1 << 20;  // bytes read at a time

Result<std::string> sum_of(const std::string& path, const RunOptions& run) {
  const File file = TRY(File::open(path));
  const Index size = TRY(file.size());
  file.expect(File::Reads::kInOrder);
  std::vector<std::byte> part(std::min(size, kReadBytes));
  Sha256 sum;
  for (Index at = 0; at < size; at += kReadBytes) {
    TRY(check_not_interrupted(run));
    const MutableBytes bytes = MutableBytes(part).first(std::min(kReadBytes, size - at));
    TRY(file.read_at(at, bytes));
    sum.add({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  return to_hex(sum.digest());
}

// Returns a file's path from a directory; absolute if one of the two is and the other is not.
Result<std::string> path_from(const std::string& directory, const std::string& file) {
  const std::filesystem::path relative = std::filesystem::path(file).lexically_normal().lexically_relative(
      std::filesystem::path(directory).lexically_normal());
  return relative.empty() ? real_path(file) : relative.string();
}

// Adds the config, unless it is one of the files or is no file: some formats make it of their own metadata.
Status add_config(const Catalog& catalog, const std::string& config, std::vector<FileSum>& sums,
                  const RunOptions& run) {
  if (config.empty()) return {};
  const std::string path = TRY(path_from(catalog.root, config));
  const auto place = std::lower_bound(sums.begin(), sums.end(), path,
                                      [](const FileSum& sum, const std::string& wanted) { return sum.path < wanted; });
  if (path.empty() || (place != sums.end() && place->path == path)) return {};
  const auto sum = sum_of(config, run);
  if (sum) sums.insert(place, {path, *sum});
  return check_not_interrupted(run);
}

}  // namespace

Result<std::vector<FileSum>> file_sums(const Catalog& catalog, const std::string& config, const RunOptions& run) {
  std::vector<FileSum> sums;
  for (const CatalogFile& file : catalog.files)
    if (file.size >= 0) sums.push_back({file.path, {}});
  for (const std::string& path : catalog.metadata_files) sums.push_back({path, {}});
  std::sort(sums.begin(), sums.end(), [](const FileSum& a, const FileSum& b) { return a.path < b.path; });
  sums.erase(std::unique(sums.begin(), sums.end(), [](const FileSum& a, const FileSum& b) { return a.path == b.path; }),
             sums.end());
  TRY(parallel_for(std::ssize(sums), thread_count(run.threads), [&](int, Index i) -> Status {
    FileSum& sum = sums[i];
    sum.sha256 = TRY(sum_of(path_join(catalog.root, sum.path), run));
    return {};
  }));
  TRY(add_config(catalog, config, sums, run));
  return sums;
}

}  // namespace reshard
