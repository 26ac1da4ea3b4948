// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/file_sums.h"

#include <algorithm>

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

}  // namespace

Result<std::vector<FileSum>> file_sums(const Catalog& catalog, const RunOptions& run) {
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
  return sums;
}

}  // namespace reshard
