// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/format.h"

#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"

namespace reshard {

Result<std::optional<std::string>> Reader::side_file(const std::string& name, Index limit) {
  for (const std::string& directory : side_directories())
    if (const std::string path = path_join(directory, name); path_exists(path))
      return std::optional<std::string>(TRY(read_whole_file(path, limit)));
  const auto made = name == kConfigFile ? TRY(made_config()) : std::nullopt;
  return made ? std::optional<std::string>(python_text(*made)) : std::nullopt;
}

Result<std::optional<std::string>> Reader::side_file_start(const std::string& name, Index length) {
  for (const std::string& directory : side_directories())
    if (const std::string path = path_join(directory, name); path_exists(path))
      return std::optional<std::string>(TRY(read_file_start(path, length)));
  return std::optional<std::string>();
}

}  // namespace reshard
