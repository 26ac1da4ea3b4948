// A file that the HDF5 library believes it writes.
//
// The library decides by itself where in a file things go; our engine wants to know all places first and to write the
// payloads itself, from several threads. So the library gets a virtual file driver that keeps what it writes in memory
// (metadata: little) and lets payloads pass: it only notes their address.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "lib/base/file.h"

namespace reshard::hdf5 {

// What such a file holds. Not thread-safe: the library's lock is its lock.
class MemoryImage {
 public:
  void write(Index offset, Bytes bytes);
  void read(Index offset, MutableBytes out) const;  // zeros where nothing was written
  // Calls visit for each run of written bytes, in order.
  Status each_run(const std::function<Status(Index offset, Bytes bytes)>& visit) const;

  // While this is set, payload writes are not kept: their address is noted instead.
  bool passes_payloads = false;
  std::optional<Index> payload_at;  // of the last one

  Index end = 0;  // bytes the library has allocated

 private:
  std::map<Index, std::string> runs_;  // by offset; they neither overlap nor touch
};

// A property list (hid_t) to create a file in `image`, which must outlive the file; negative on failure. Closing the
// list is the caller's.
std::int64_t memory_file_access(MemoryImage& image);

}  // namespace reshard::hdf5
