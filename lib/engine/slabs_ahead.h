// SPDX-License-Identifier: Apache-2.0
// Slabs of a source behind a URL, fetched before the threads of a walk come to them.
#pragma once

#include <mutex>
#include <vector>

#include "lib/base/storage/read_ahead.h"
#include "lib/engine/slabs.h"

namespace reshard {

inline constexpr Index kMostAhead = Index{64} << 20;  // bytes fetched before their turn: 32 requests of 2 MiB

inline constexpr Index kConnections = Index{16} << 20;  // bytes that 32 connections and their threads take

// Does nothing for a local source. Thread-safe.
class SlabsAhead {
 public:
  struct Source {
    const std::vector<WalkItem>& items;
    const SlabList& list;
    Index end = 0;  // the number after the last slab
    TensorSource& source;
    Index scratch = 0;  // bytes of a thread's scratch memory
    Index most = 0;     // bytes to be ahead
  };
  SlabsAhead(const Source& walk, Index first) : walk_(walk), next_(first) {}

  // Before a slab is read: asks for those that follow, half of the bytes or more at a time, so that what adjoins in a
  // file is one request.
  void begin();
  // After it was read.
  void end(const WalkSlab& slab);

 private:
  Index bytes_of(const WalkSlab& slab) const;

  const Source walk_;
  std::mutex mutex_;
  Index next_;       // the first slab that was not asked for
  Index ahead_ = 0;  // bytes that were asked for and are not read
  ReadAhead fetched_;
};

}  // namespace reshard
