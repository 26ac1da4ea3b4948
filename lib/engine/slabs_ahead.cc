// SPDX-License-Identifier: Apache-2.0
#include "lib/engine/slabs_ahead.h"

namespace reshard {

Index SlabsAhead::bytes_of(const WalkSlab& slab) const {
  const Tensor& tensor = walk_.source.catalog().tensors()[walk_.items[slab.item].tensor];
  return volume(slab.box) * byte_size(tensor.dtype);
}

void SlabsAhead::begin() {
  if (walk_.most == 0 || !walk_.source.is_remote()) return;
  const std::lock_guard lock(mutex_);
  if (ahead_ > walk_.most / 2 || fetched_bytes() > walk_.most) return;
  std::vector<FileRange> ranges;
  for (; next_ < walk_.end; ++next_) {
    const WalkSlab slab = walk_.list.get(next_);
    const Index bytes = bytes_of(slab);
    if (ahead_ + bytes > walk_.most) break;
    ahead_ += bytes;
    walk_.source.add_ranges(walk_.items[slab.item].tensor, slab.box, walk_.scratch, ranges);
  }
  fetched_.fetch(ranges);
}

void SlabsAhead::end(const WalkSlab& slab) {
  if (walk_.most == 0 || !walk_.source.is_remote()) return;
  const std::lock_guard lock(mutex_);
  ahead_ -= bytes_of(slab);
}

}  // namespace reshard
