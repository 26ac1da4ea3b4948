// Random meshes, placements and shapes for property tests.
#pragma once

#include <algorithm>
#include <random>
#include <string>

#include "lib/checkpoint/format.h"

namespace reshard {

using Rng = std::mt19937;

// Returns a random number from 0 to n - 1.
inline Index below(Rng& rng, Index n) { return static_cast<Index>(rng() % static_cast<std::uint32_t>(n)); }

// Returns a mesh of up to 24 ranks on up to five axes.
inline Mesh random_mesh(Rng& rng) {
  std::vector<MeshAxis> axes;
  Index ranks = 1;
  for (const char* name : {"pp", "dp_replicate", "dp_shard", "cp", "tp"}) {
    const Index size = 1 + below(rng, 5);
    if (below(rng, 2) != 0 || ranks * size > 24) continue;
    axes.push_back({name, size});
    ranks *= size;
  }
  return Mesh(std::move(axes));
}

// Returns a placement that cuts any dimensions along any axes, in any order; some axes replicate.
inline Placement random_placement(Rng& rng, const Mesh& mesh, const Dims& shape) {
  Placement p;
  std::vector<std::string> axes;
  for (const MeshAxis& axis : mesh.axes()) {
    if (axis.name != "pp") axes.push_back(axis.name);
    if (axis.name == "pp" && below(rng, 3) != 0) p.stage = below(rng, axis.size);
  }
  std::shuffle(axes.begin(), axes.end(), rng);
  for (std::size_t i = 0; shape.rank() > 0 && i < axes.size(); ++i) {
    if (below(rng, 4) == 0) continue;
    Split s{{axes[i]}, static_cast<int>(below(rng, shape.rank()))};
    if (i + 1 < axes.size() && below(rng, 4) == 0) s.axes.push_back(axes[++i]);
    p.splits.push_back(std::move(s));
  }
  return p;
}

// Returns a shape with up to five dimensions of up to 97 and at most 20,000 elements; sometimes empty.
inline Dims random_shape(Rng& rng) {
  constexpr Index kSizes[] = {1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 31, 32, 33, 64, 67, 96, 97};
  Dims shape;
  Index elements = 1;
  for (Index d = below(rng, 6); d > 0; --d) {
    const Index size = below(rng, 40) == 0 ? 0 : kSizes[below(rng, std::size(kSizes))];
    if (elements * size > 20'000) continue;
    shape.push_back(size);
    elements *= std::max<Index>(1, size);
  }
  return shape;
}

// Returns a random box inside `shape`; rarely an empty one, unless `shape` is empty.
inline Box random_box(Rng& rng, const Dims& shape) {
  Box box = whole(shape);
  for (int d = 0; d < shape.rank(); ++d) {
    if (shape[d] == 0 || below(rng, 3) == 0) continue;
    box.origin[d] = below(rng, shape[d]);
    box.shape[d] = 1 + below(rng, shape[d] - box.origin[d]);
  }
  return box;
}

}  // namespace reshard
