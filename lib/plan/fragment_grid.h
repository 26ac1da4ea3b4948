// The boxes of a tensor's fragments as a grid: what a mesh of ranks leaves behind, whatever cut it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/plan/overlay.h"

namespace reshard {

struct FragmentGrid {
  // Intervals of each dimension, in order. Interval k is part k, and adds k times the number of cells behind it in a
  // row-major table: the sum over the dimensions is the number of a cell.
  std::vector<std::vector<Cut>> dims;
  std::vector<std::uint32_t> fragment;  // of each cell

  // Nothing where the boxes form no grid. The fragments cover a tensor of this shape exactly once (check_cover); empty
  // ones do not count.
  static std::optional<FragmentGrid> find(const FragmentList& fragments, const Dims& shape);
};

}  // namespace reshard
