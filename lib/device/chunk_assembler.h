// SPDX-License-Identifier: Apache-2.0
// Collects the parts of chunks, for outputs that encode whole chunks.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/cursor.h"

namespace reshard {

// Thread-safe.
class ChunkAssembler {
 public:
  // A part of a chunk.
  struct Part {
    Index chunk = 0;     // the chunk's number
    Index at = 0;        // offset in the chunk
    Index expected = 0;  // bytes of the chunk that arrive in all
    Index bytes = 0;     // size of the chunk: zeros follow those that arrive
  };

  // Adds a part. Returns the chunk when it is complete, and nothing before. Fails if too many chunks wait for the rest
  // of their bytes, or if they would exceed the memory granted; `what()` names the tensor.
  Result<std::vector<std::byte>> add(const Part& part, Bytes data, const std::function<std::string()>& what);

  // Returns the number of a chunk that waits for the rest of its bytes.
  std::optional<Index> incomplete() const;

 private:
  struct Partial {
    std::vector<std::byte> bytes;
    Index filled = 0;
  };
  mutable std::mutex mutex_;  // protects what follows
  std::map<Index, Partial> partials_;
  Index waiting_bytes_ = 0;
};

}  // namespace reshard
