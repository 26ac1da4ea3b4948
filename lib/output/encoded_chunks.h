// The chunks of an output that encodes, brought into the order of their numbers.
//
// Threads and ranks encode as they come; where a chunk lies is known when all before it are there. So the output's
// bytes do not depend on who was faster, or on how many ranks there were. What comes before its turn waits, a little of
// it in memory and the rest in a file: on all ranks but the first that is everything.
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
  // Writes bytes to their place in the output's file. Thread-safe.
  using Write = std::function<Status(Index offset, Bytes bytes)>;

  // `spool` is the path of a new file. Refers to the first two arguments; all ranks make one.
  EncodedChunks(Target& target, Transport* ranks, std::string spool, Write write);

  // A chunk that this rank has encoded. Thread-safe.
  Status add(const EncodedChunk& chunk, Bytes stored);

  // By every rank once all of its chunks are there: writes those that waited. An error where a chunk is missing.
  Status finish();

  // Bytes of memory that a rank of `ranks` takes for `target`.
  static Index memory(const Target& target, int ranks);

 private:
  struct Waiting {
    EncodedChunk chunk;
    std::vector<std::byte> bytes = {};  // empty: they are in the file
    Index at = 0;                       // there
  };
  Result<Index> next_place(const EncodedChunk& chunk);
  Status write_what_follows(std::unique_lock<std::mutex>& lock);
  Status write_waiting(Index place, const Waiting& waiting) const;

  Target& target_;
  Transport* const ranks_;
  const bool is_first_;  // of the ranks: the one that says where chunks lie
  const std::string spool_path_;
  const Write write_;

  std::mutex mutex_;  // guards what follows
  std::map<Index, Waiting> waiting_;
  std::optional<File> spool_;
  Index spooled_ = 0, held_ = 0;  // bytes in the file, and in memory
  Index next_ = 0;                // of the chunks that have a place
};

}  // namespace reshard
