// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/fragment_index.h"

#include <algorithm>

namespace reshard {

FragmentIndex::FragmentIndex(const FragmentList& fragments) : fragments_(&fragments) {
  std::vector<Index> first_row(fragments.size());
  order_.reserve(fragments.size());
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    const Box box = fragments.box(i);
    if (box.empty()) continue;
    order_.push_back(static_cast<std::uint32_t>(i));
    first_row[i] = box.rank() > 0 ? box.begin(0) : 0;
  }
  std::stable_sort(order_.begin(), order_.end(), [&](auto a, auto b) { return first_row[a] < first_row[b]; });
  furthest_row_.reserve(order_.size());
  for (const std::uint32_t i : order_) {
    const Box box = fragments.box(i);
    const Index end = box.rank() > 0 ? box.end(0) : 1;
    furthest_row_.push_back(furthest_row_.empty() ? end : std::max(end, furthest_row_.back()));
  }
}

std::size_t FragmentIndex::first_candidate(const Box& box) const {
  const Index row = box.rank() > 0 ? box.begin(0) : 0;
  const auto it = std::upper_bound(furthest_row_.begin(), furthest_row_.end(), row);
  return it - furthest_row_.begin();
}

std::pair<std::size_t, bool> RecentBoxes::place_of(const FragmentList& list) {
  for (std::size_t i = 0; i < recent_.size(); ++i)
    if (recent_[i]->size() == list.size() && recent_[i]->has_boxes_of(list)) return {i, false};
  if (recent_.size() < kKept) {
    recent_.push_back(&list);
    return {recent_.size() - 1, true};
  }
  const std::size_t place = std::exchange(oldest_, (oldest_ + 1) % kKept);
  recent_[place] = &list;
  return {place, true};
}

const FragmentIndex* SharedIndexes::of(const FragmentList& list) {
  const auto [place, is_new] = recent_.place_of(list);
  auto& index = of_recent_[place];
  if (is_new) index = nullptr;  // if the next line runs out of memory, a later call retries
  if (!index) index = &indexes_.emplace_back(list);
  return index;
}

Index SharedIndexes::bytes(const FragmentList& list) {
  constexpr Index kBeside = sizeof(FragmentIndex) + 8 * sizeof(Index);  // overhead of the allocations
  return kBeside + static_cast<Index>(list.size() * (sizeof(std::uint32_t) + sizeof(Index)));
}

}  // namespace reshard
