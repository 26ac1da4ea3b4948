// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/renaming.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>

#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::size_t kMaxCandidates = 8;  // per tensor: similar modules, such as those for text and images
constexpr std::size_t kMaxRenamings = 64;  // of a model's modules

// Returns the positions at which the last two components of a name begin, the last three, and so on up to the whole
// name.
std::vector<std::size_t> beginnings_of_ends(std::string_view name) {
  std::vector<std::size_t> out;
  for (std::size_t at = name.rfind('.'); at != std::string_view::npos && at > 0;) {
    const std::size_t before = name.rfind('.', at - 1);
    out.push_back(before == std::string_view::npos ? 0 : before + 1);
    at = before;
  }
  return out;
}

std::vector<std::string> numbers_in(std::string_view prefix) {
  std::vector<std::string> out;
  for (std::string& part : split(prefix, '.'))
    if (is_digits(part)) out.push_back(std::move(part));
  return out;
}

}  // namespace

std::vector<Renaming> find_renamings(const Catalog& a, std::vector<std::size_t> only_a, const Catalog& b,
                                     const std::vector<std::size_t>& only_b) {
  std::unordered_map<std::string_view, std::vector<std::size_t>> by_end;
  for (const std::size_t i : only_b) {
    const std::string_view name = b.tensors()[i].name;
    for (const std::size_t begin : beginnings_of_ends(name)) by_end[name.substr(begin)].push_back(i);
  }
  std::set<std::size_t> taken;  // indices in b
  // Visits the tensors of b that share the longest suffix with this one.
  const auto candidates = [&](std::size_t i, auto&& take) {
    const std::string_view name = a.tensors()[i].name;
    const std::vector<std::size_t> begins = beginnings_of_ends(name);
    for (auto begin = begins.rbegin(); begin != begins.rend(); ++begin) {
      const auto ends = by_end.find(name.substr(*begin));
      if (ends == by_end.end()) continue;
      std::size_t count = 0;
      for (const std::size_t other : ends->second) {
        const Tensor& t = b.tensors()[other];
        if (taken.contains(other) || t.shape != a.tensors()[i].shape) continue;
        const std::string_view before = std::string_view(t.name).substr(0, t.name.size() - ends->first.size());
        if (numbers_in(before) != numbers_in(name.substr(0, *begin))) continue;
        take(name.substr(0, *begin), before, other);
        if (++count == kMaxCandidates) break;
      }
      if (count > 0) return;
    }
  };
  std::vector<Renaming> out;
  while (!only_a.empty() && out.size() < kMaxRenamings) {
    std::map<std::pair<std::string_view, std::string_view>, Renaming> found;
    for (const std::size_t i : only_a)
      candidates(i, [&](std::string_view from, std::string_view to, std::size_t other) {
        found[{from, to}].pairs.emplace_back(i, other);
      });
    const auto best = std::max_element(found.begin(), found.end(), [](const auto& x, const auto& y) {
      return x.second.pairs.size() < y.second.pairs.size();
    });
    if (best == found.end()) break;
    Renaming& renaming = best->second;
    renaming.a = best->first.first;
    renaming.b = best->first.second;
    std::set<std::size_t> found_of_a;
    for (const auto& [mine, other] : renaming.pairs) {
      found_of_a.insert(mine);
      taken.insert(other);
    }
    std::erase_if(only_a, [&](std::size_t i) { return found_of_a.contains(i); });
    out.push_back(std::move(renaming));
  }
  return out;
}

}  // namespace reshard
