// SPDX-License-Identifier: Apache-2.0
// A virtual file driver for the HDF5 library that writes into memory.
//
// The library decides where in a file things go, but our engine needs all offsets in advance and writes the payloads
// itself, in several threads. So the library writes to this driver, which keeps the metadata, which are small, and
// records only the offsets of payloads.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "lib/base/file.h"

namespace reshard::hdf5 {

// The content of such a file. Not thread-safe: protected by the library's lock.
class MemoryImage {
 public:
  void write(Index offset, Bytes bytes);
  void read(Index offset, MutableBytes out) const;  // bytes that were not written are zero
  // Calls visit for each run of written bytes, in order.
  Status each_run(const std::function<Status(Index offset, Bytes bytes)>& visit) const;

  // If set, writes of payloads are dropped and their offset is recorded in payload_at.
  bool passes_payloads = false;
  std::optional<Index> payload_at;  // of the last one

  Index end = 0;  // bytes the library has allocated

 private:
  std::map<Index, std::string> runs_;  // by offset; they neither overlap nor touch
};

// Returns a property list (hid_t) to create a file in `image`, which must outlive the file, or a negative number on
// failure. The caller must close the list.
std::int64_t memory_file_access(MemoryImage& image);

}  // namespace reshard::hdf5
