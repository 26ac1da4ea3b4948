// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/chunk_grid.h"

namespace reshard::orbax {
namespace {

// Returns the smallest divisor of `n` that is at least `least`, and `least` itself (then the last part is smaller) if
// that is allowed and no divisor is near.
Index parts_of(Index n, Index least, bool may_be_uneven) {
  for (Index parts = least; parts <= n; ++parts) {
    if (may_be_uneven && parts > 2 * least) return least;
    if (n % parts == 0) return parts;
  }
  return n;
}

}  // namespace

Dims chunk_shape_of(const TargetTensor& tensor, const Mesh& mesh, Index limit) {
  Dims grid = tensor.shape;
  for (const Split& split : tensor.placement->splits) {
    Index ranks = 1;
    for (const std::string& axis : split.axes) ranks *= mesh.size(axis);
    Index& extent = grid[split.dim];
    if (split.dim == 0)
      extent = ceil_div(extent, ranks);
    else if (extent % ranks == 0)
      extent /= ranks;
  }
  if (volume(grid) == 0) return Dims::filled(grid.rank(), 1);
  for (int d = 0; d < grid.rank(); ++d) {
    const Index parts = ceil_div(volume(grid) * byte_size(tensor.dtype), limit);
    if (parts > 1) grid[d] = ceil_div(grid[d], parts_of(grid[d], std::min(parts, grid[d]), d == 0));
  }
  return grid;
}

Dims counts_of(const Dims& shape, const Dims& grid) {
  Dims out;
  for (int d = 0; d < shape.rank(); ++d) out.push_back(ceil_div(shape[d], grid[d]));
  return out;
}

bool is_before(std::string_view a, std::string_view b) {
  const std::size_t shared = std::min(a.size(), b.size());
  if (const int order = a.compare(0, shared, b.substr(0, shared)); order != 0) return order < 0;
  if (a.size() == b.size()) return false;
  // As unsigned bytes, which compare() compares: those of names that are not ASCII come after '/'.
  const auto is_less = std::char_traits<char>::lt;
  return a.size() < b.size() ? !is_less(b[shared], '/') : is_less(a[shared], '/');
}

}  // namespace reshard::orbax
