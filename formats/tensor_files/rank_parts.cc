// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/rank_parts.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard {

const RankPart* RankParts::Parts::of(Index rank) const {
  const auto it =
      std::lower_bound(parts.begin(), parts.end(), rank, [](const RankPart& part, Index r) { return part.rank < r; });
  return it != parts.end() && it->rank == rank ? &*it : nullptr;
}

bool RankParts::add(const std::string& name, Index rank, const Fragment& stored, DType dtype) {
  const auto [it, is_new] = number_.emplace(name, all_.size());
  if (is_new) all_.push_back({name, {}});
  std::vector<RankPart>& parts = all_[it->second].parts;
  if (!parts.empty() && parts.back().rank == rank) return false;
  parts.push_back({rank, {stored, dtype}});
  return true;
}

const RankParts::Parts* RankParts::find(std::string_view name) const {
  const auto it = number_.find(std::string(name));
  return it == number_.end() ? nullptr : &all_[it->second];
}

Status check_no_gap(const std::map<Index, std::string>& files) {
  constexpr std::size_t kShown = 3;
  std::vector<std::string> missing;
  Index next = 0;
  for (const auto& [rank, name] : files) {
    for (; next < rank && missing.size() < kShown; ++next) missing.push_back(std::to_string(next));
    next = rank + 1;
  }
  if (missing.empty()) return {};
  const bool is_one = missing.size() == 1;
  return io_error((is_one ? "the file of rank " : "the files of ranks ") + join(missing, ", ") +
                  (is_one ? " is" : " are") + " missing; got " + count_of(std::ssize(files), "file") +
                  ", of ranks up to " + std::to_string(files.rbegin()->first));
}

}  // namespace reshard
