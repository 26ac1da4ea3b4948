// SPDX-License-Identifier: Apache-2.0
// Finds the fragments that overlap a box without scanning all of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

class FragmentIndex {
 public:
  // `fragments` must outlive the index and not change. Empty fragments are ignored.
  explicit FragmentIndex(const FragmentList& fragments);

  // Calls visit(fragment number, intersection) for each fragment that overlaps `box`, ordered by first row.
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
  std::vector<std::uint32_t> order_;  // fragments ordered by first row
  std::vector<Index> furthest_row_;   // the furthest row reached by order_[0..k]; nondecreasing
};

// Remembers the last few lists with distinct boxes: the layers of a model have few kinds. Lists must outlive it.
class RecentBoxes {
 public:
  static constexpr std::size_t kKept = 16;  // more than the kinds of parameters in a layer
  // Returns a slot below kKept for lists with these boxes, and whether the slot is new to them: it was free or
  // held other boxes.
  std::pair<std::size_t, bool> place_of(const FragmentList& list);

 private:
  std::vector<const FragmentList*> recent_;
  std::size_t oldest_ = 0;  // next to be replaced, once `recent_` is full
};

// Indexes of many lists; lists with equal boxes share one. The lists must outlive it.
class SharedIndexes {
 public:
  const FragmentIndex* of(const FragmentList& list);  // valid as long as this object
  static Index bytes(const FragmentList& list);       // memory of an index that is not shared

 private:
  RecentBoxes recent_;
  std::array<const FragmentIndex*, RecentBoxes::kKept> of_recent_{};
  std::deque<FragmentIndex> indexes_;
};

}  // namespace reshard
