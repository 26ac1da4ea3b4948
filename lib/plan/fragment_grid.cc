#include "lib/plan/fragment_grid.h"

#include <algorithm>

namespace reshard {
namespace {

using Begins = std::vector<Index>;  // of the intervals of one dimension, in order

// Nothing when there are not as many boxes as cells.
std::optional<std::vector<Begins>> find_begins(const FragmentList& fragments, int rank) {
  std::vector<Begins> begins(static_cast<std::size_t>(rank));
  Index boxes = 0;
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    const Box box = fragments.box(i);
    if (box.empty()) continue;
    ++boxes;
    for (int d = 0; d < rank; ++d) begins[static_cast<std::size_t>(d)].push_back(box.begin(d));
  }
  Index cells = 1;
  for (Begins& list : begins) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    const auto product = checked_mul(cells, static_cast<Index>(list.size()));
    if (!product || *product > boxes) return std::nullopt;
    cells = *product;
  }
  if (cells != boxes) return std::nullopt;
  return begins;
}

std::vector<std::vector<Cut>> cuts_between(const std::vector<Begins>& begins, const Dims& shape, Index cells) {
  std::vector<std::vector<Cut>> dims;
  for (const Begins& list : begins) {
    const Index extent = shape[static_cast<int>(dims.size())];
    auto& cuts = dims.emplace_back();
    if (list.empty()) continue;
    cells /= static_cast<Index>(list.size());
    for (std::size_t k = 0; k < list.size(); ++k) {
      const auto number = static_cast<Index>(k);
      cuts.push_back({list[k], k + 1 < list.size() ? list[k + 1] : extent, 0, number, number * cells});
    }
  }
  return dims;
}

// The cell that a box is, nothing where it is none.
std::optional<Index> cell_of(const std::vector<std::vector<Cut>>& dims, const Box& box) {
  Index cell = 0;
  for (int d = 0; d < box.rank(); ++d) {
    const auto& cuts = dims[static_cast<std::size_t>(d)];
    const auto cut = std::lower_bound(cuts.begin(), cuts.end(), box.begin(d),
                                      [](const Cut& c, Index begin) { return c.begin < begin; });
    if (cut->end != box.end(d)) return std::nullopt;
    cell += cut->add;
  }
  return cell;
}

}  // namespace

std::optional<FragmentGrid> FragmentGrid::find(const FragmentList& fragments, const Dims& shape) {
  const auto begins = find_begins(fragments, shape.rank());
  if (!begins) return std::nullopt;
  Index cells = 1;
  for (const Begins& list : *begins) cells *= static_cast<Index>(list.size());
  FragmentGrid grid{cuts_between(*begins, shape, cells), {}};
  grid.fragment.resize(static_cast<std::size_t>(cells));
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    const Box box = fragments.box(i);
    if (box.empty()) continue;
    const auto cell = cell_of(grid.dims, box);
    if (!cell) return std::nullopt;
    grid.fragment[static_cast<std::size_t>(*cell)] = static_cast<std::uint32_t>(i);
  }
  return grid;
}

}  // namespace reshard
