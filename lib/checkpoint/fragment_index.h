// Finds the fragments that meet a box without looking at all of them.
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

// The last few lists that differ in their boxes: tensors of a model's layers have few kinds. Refers to them.
class RecentBoxes {
 public:
  static constexpr std::size_t kKept = 16;  // more kinds of parameters than a layer has
  // The place, below kKept, of lists with these boxes; and whether it is theirs from now on, and was another's or free.
  std::pair<std::size_t, bool> place_of(const FragmentList& list);

 private:
  std::vector<const FragmentList*> recent_;
  std::size_t oldest_ = 0;  // among them, once there are as many as are kept
};

// Indexes of many lists, of which those with equal boxes share one. Refers to the lists.
class SharedIndexes {
 public:
  const FragmentIndex* of(const FragmentList& list);  // as long as this lives
  static Index bytes(const FragmentList& list);       // of memory that an index of its own takes

 private:
  RecentBoxes recent_;
  std::array<const FragmentIndex*, RecentBoxes::kKept> of_recent_{};
  std::deque<FragmentIndex> indexes_;
};

}  // namespace reshard
