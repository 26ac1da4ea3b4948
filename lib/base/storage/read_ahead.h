// SPDX-License-Identifier: Apache-2.0
// Fetching ranges of files behind URLs before they are read. Many are requested at once, because 32 parallel requests
// take one round trip, as one request does.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/result.h"

namespace reshard {

class StoredFile;

struct FileRange {
  std::string path;  // local files are ignored
  Index offset = 0, length = 0;
};

// Returns the first 64 KiB of each file, which contain the header of a safetensors file.
std::vector<FileRange> starts_of(const std::string& directory, const std::vector<std::string>& names);

// Fetches in the background what its owner is about to read. While it lives, reads of these ranges use the fetched
// bytes; each byte is kept until it was read as often as it was requested. Thread-safe.
class ReadAhead {
 public:
  ReadAhead();
  ~ReadAhead();  // waits for requests in flight, drops the others
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Requests ranges. Adjacent or nearly adjacent ranges of one file become one request of up to 8 MiB. If a fetch
  // fails, the range is requested again when it is read, which reports the error.
  void fetch(const std::vector<FileRange>& ranges);

 private:
  struct Fetch;
  friend class Fetches;
  std::vector<std::weak_ptr<Fetch>> own_;  // under the mutex of Fetches
};

// Copies fetched bytes of a file from `offset` on to the beginning of `out`, and waits for those in flight. Returns how
// many were copied; 0 if none were requested.
Index take_fetched(const StoredFile& file, Index offset, MutableBytes out);
// Returns the bytes that all fetches of the process hold or will hold.
Index fetched_bytes();

}  // namespace reshard
