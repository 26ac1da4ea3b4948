// SPDX-License-Identifier: Apache-2.0
// Fetching the slabs of a source behind a URL before the threads of a walk read them.
#pragma once

#include <mutex>
#include <vector>

#include "lib/base/storage/read_ahead.h"
#include "lib/engine/slabs.h"

namespace reshard {

inline constexpr Index kMostAhead = Index{64} << 20;    // bytes fetched ahead: 32 requests of 2 MiB
inline constexpr Index kConnections = Index{32} << 20;  // bytes of 32 connections, their threads, and short reads

// Requests slabs ahead of the reads. Does nothing for a local source. Thread-safe.
class SlabsAhead {
 public:
  struct Source {
    const std::vector<WalkItem>& items;
    const SlabList& list;
    Index end = 0;  // the number after the last slab
    TensorSource& source;
    Index scratch = 0;  // bytes of a thread's scratch memory
    Index most = 0;     // the most bytes to fetch ahead
  };
  SlabsAhead(const Source& walk, Index first) : walk_(walk), next_(first) {}

  // Call before reading a slab. Requests the slabs that follow, at least half of `most` at a time, so that adjacent
  // bytes of a file become one request.
  void begin();
  // Call after reading it.
  void end(const WalkSlab& slab);

 private:
  Index bytes_of(const WalkSlab& slab) const;

  const Source walk_;
  std::mutex mutex_;
  Index next_;       // the first slab that was not requested
  Index ahead_ = 0;  // bytes requested and not read yet
  ReadAhead fetched_;
};

}  // namespace reshard
