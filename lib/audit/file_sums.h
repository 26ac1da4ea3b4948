// SPDX-License-Identifier: Apache-2.0
// SHA-256 of the files of a checkpoint and of the config that it was verified against.
#pragma once

#include <string>
#include <vector>

#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"
#include "lib/engine/run_options.h"

namespace reshard {

struct FileSum {
  std::string path;    // relative to the checkpoint's directory, or absolute: the lines of sha256sum -c there
  std::string sha256;  // 64 hexadecimal digits
};

// Reads all files of the checkpoint, tensors and metadata, and the file `config` if it is not empty, several at a time.
// Missing files are left out. Fails if a file cannot be read or the run is interrupted.
Result<std::vector<FileSum>> file_sums(const Catalog& catalog, const std::string& config, const RunOptions& run);

}  // namespace reshard
