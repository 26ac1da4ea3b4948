// SPDX-License-Identifier: Apache-2.0
// Brings the chunks of an encoded output into order.
//
// Threads and ranks encode in any order, but the file offset of a chunk is known only once all chunks before it are
// done. So the output's bytes do not depend on timing or on the number of ranks. Chunks that come too early wait, a few
// in memory and the others in a spool file; on ranks other than the first, all chunks wait.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/checkpoint/format.h"
#include "lib/transport/transport.h"

namespace reshard {

class EncodedChunks {
 public:
  // Writes bytes at an offset of the output's file. Must be thread-safe.
  using Write = std::function<Status(Index offset, Bytes bytes)>;

  // `spool` is the path of a new file. All ranks create one object. `encoder` and `ranks` must outlive it.
  EncodedChunks(DataEncoder& encoder, Transport* ranks, std::string spool, Write write);

  // Adds a chunk encoded by this rank. Thread-safe.
  Status add(const EncodedChunk& chunk, Bytes stored);

  // Writes the waiting chunks. Every rank must call it after its last add(). Fails if a chunk is missing.
  Status finish();

  // Returns the memory in bytes that one of `ranks` ranks needs for `encoder`.
  static Index memory(const DataEncoder& encoder, int ranks);

 private:
  struct Waiting {
    EncodedChunk chunk;
    std::vector<std::byte> bytes = {};  // empty: the bytes are in the spool file
    Index at = 0;                       // offset there
  };
  Result<Index> next_place(const EncodedChunk& chunk);
  Status write_what_follows(std::unique_lock<std::mutex>& lock);
  Status write_waiting(Index place, const Waiting& waiting) const;

  DataEncoder& encoder_;
  Transport* const ranks_;
  const bool is_first_;  // whether this is the rank that assigns offsets
  const std::string spool_path_;
  const Write write_;

  std::mutex mutex_;  // guards what follows
  std::map<Index, Waiting> waiting_;
  std::optional<File> spool_;
  Index spooled_ = 0, held_ = 0;  // bytes in the spool file, and in memory
  Index next_ = 0;                // number of chunks that have an offset
};

}  // namespace reshard
