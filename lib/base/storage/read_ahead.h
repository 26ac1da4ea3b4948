// SPDX-License-Identifier: Apache-2.0
// Ranges of files behind URLs that are fetched before they are read, many at a time: a round trip takes as long for one
// range as for 32.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/result.h"

namespace reshard {

class StoredFile;

struct FileRange {
  std::string path;  // local ones are ignored
  Index offset = 0, length = 0;
};

// The first 64 KiB of files in a directory: the headers of safetensors.
std::vector<FileRange> starts_of(const std::string& directory, const std::vector<std::string>& names);

// Fetches in the background what its owner is about to read. Until it is destroyed, reads of these ranges take what was
// fetched, and each byte is kept until it was read as often as it was asked for. Thread-safe.
class ReadAhead {
 public:
  ReadAhead();
  ~ReadAhead();  // waits for requests under way, drops the rest
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Asks for ranges. Those of one file that adjoin, or nearly so, become one request of up to 8 MiB. A range that
  // cannot be fetched is read, and its error reported, when it is wanted.
  void fetch(const std::vector<FileRange>& ranges);

 private:
  struct Fetch;
  friend class Fetches;
  std::vector<std::weak_ptr<Fetch>> own_;  // under the mutex of Fetches
};

// Copies what was fetched of a file from `offset` on to the beginning of `out`; returns how many bytes, 0 if nothing
// was asked for there. Waits for what is under way.
Index take_fetched(const StoredFile& file, Index offset, MutableBytes out);
// What all fetches of the process hold or will hold, bytes.
Index fetched_bytes();

}  // namespace reshard
