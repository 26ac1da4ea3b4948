// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/format.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lib/base/file.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"

namespace reshard {
namespace {

// Returns what one read of the first `length` bytes gives. A mount of reshard gives less where the rest of a file is
// expensive (the digests of a manifest); reading on until `length` would compute it.
Result<std::string> read_start_once(const std::string& path, Index length) {
  const File file = TRY(File::open(path));
  if (file.descriptor() < 0) return read_file_start(path, length);  // a URL
  std::string out(std::min(length, TRY(file.size())), '\0');
  ssize_t n = 0;
  do n = sys().pread(file.descriptor(), out.data(), out.size(), 0);
  while (n < 0 && errno == EINTR);
  if (n < 0) return io_error(path + ": cannot read: " + std::strerror(errno));
  out.resize(n);
  return out;
}

}  // namespace

Result<std::optional<std::string>> Reader::side_file(const std::string& name, Index limit) {
  for (const std::string& directory : side_directories())
    if (const std::string path = path_join(directory, name); TRY(path_exists(path)))
      return std::optional<std::string>(TRY(read_whole_file(path, limit)));
  const auto made = name == kConfigFile ? TRY(made_config()) : std::nullopt;
  return made ? std::optional<std::string>(python_text(*made)) : std::nullopt;
}

Result<std::optional<std::string>> Reader::side_file_start(const std::string& name, Index length) {
  for (const std::string& directory : side_directories())
    if (const std::string path = path_join(directory, name); TRY(path_exists(path)))
      return std::optional<std::string>(TRY(read_start_once(path, length)));
  return std::optional<std::string>();
}

}  // namespace reshard
