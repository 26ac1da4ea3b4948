// The slabs of many boxes of tensors as one numbered list, none of them written down.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "lib/plan/plan.h"

namespace reshard {

class SlabList {
 public:
  // The slabs of a box that begins at `origin`.
  void add(Slabs slabs, const Dims& origin) {
    items_.push_back({slabs, origin, count_});
    count_ += slabs.count();
    largest_ = std::max(largest_, slabs.max_bytes());
  }

  Index count() const { return count_; }
  Index max_bytes() const { return largest_; }  // of the largest slab

  // Which box (in order of add) slab `k` is of, and its place in the tensor.
  std::pair<std::size_t, Box> get(Index k) const {
    auto it = std::upper_bound(items_.begin(), items_.end(), k, [](Index n, const Item& i) { return n < i.first; });
    --it;
    Box box = it->slabs.slab(k - it->first);
    for (int d = 0; d < box.rank(); ++d) box.origin[d] += it->origin[d];
    return {static_cast<std::size_t>(it - items_.begin()), box};
  }

 private:
  struct Item {
    Slabs slabs;
    Dims origin;
    Index first;  // number of its first slab
  };
  std::vector<Item> items_;
  Index count_ = 0;
  Index largest_ = 0;
};

}  // namespace reshard
