// The plan: the boxes of one catalog cut with the boxes of another. Pure, deterministic and costed; making it is the
// proof that every element of the target has exactly one source.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

// One tensor's way: from source.tensors()[from] to target.tensors()[to]. The two agree in name and shape.
struct PlannedTensor {
  std::size_t from = 0;
  std::size_t to = 0;
};

struct Plan {
  std::vector<PlannedTensor> tensors;  // in the order of the target's files
  Index moves = 0;                     // pairs of fragments, or of a fragment and a copy, that share elements
  Index bytes_read = 0;                // tensor data, each source byte once
  Index bytes_written = 0;             // tensor data, copies included
};

// Both catalogs must be validated (their fragments cover their tensors exactly). Fails, naming the tensor, where a
// target tensor has no source, another shape, or elements that come from no fragment or from two.
Result<Plan> make_plan(const Catalog& source, const Catalog& target);

// A hash of the plan and of all that its run depends on: names, types, shapes, and every box, file and offset of both
// sides. Ranks that made the plan for themselves compare it: one that sees other files than the rest has another.
std::uint64_t fingerprint(const Plan& plan, const Catalog& source, const Catalog& target);

// How one tensor's work is cut: consecutive row-major boxes of at most about `bytes` bytes, about as many each, and
// whole pages where that can be; computed on demand.
class Slabs {
 public:
  // `bytes` is a wish: a slab is at least one row group (or one element of the innermost dimension).
  Slabs(const Dims& shape, Index element_bytes, Index bytes, Index row_group);
  Index count() const { return count_; }
  Box slab(Index k) const;  // 0 <= k < count()
  Index max_bytes() const;  // of the largest slab

 private:
  Dims shape_;
  Index element_bytes_;
  int cut_dim_ = 0;  // dimensions before it are taken one index at a time, those after it whole
  Index cut_extent_ = 1;
  Index count_ = 1;
};

}  // namespace reshard
