// Finds the fragments that meet a box without looking at all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

class FragmentIndex {
 public:
  // Refers to `fragments`, which must outlive it and not change. Empty fragments are left out.
  explicit FragmentIndex(const FragmentList& fragments);

  // Calls visit(fragment number, intersection) for each fragment that meets `box`, in order of their first row.
  template <class Visit>
  void overlapping(const Box& box, Visit visit) const {
    for (std::size_t k = first_candidate(box); k < order_.size(); ++k) {
      const std::size_t i = order_[k];
      const Box mine = fragments_->box(i);
      if (box.rank() > 0 && mine.begin(0) >= box.end(0)) return;
      if (const Box both = intersect(mine, box); !both.empty()) visit(i, both);
    }
  }

 private:
  std::size_t first_candidate(const Box& box) const;

  const FragmentList* fragments_;
  std::vector<std::uint32_t> order_;  // by first row
  std::vector<Index> furthest_row_;   // the furthest row that order_[0..k] reach: it only grows
};

}  // namespace reshard
