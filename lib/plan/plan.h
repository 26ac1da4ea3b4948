// SPDX-License-Identifier: Apache-2.0
// The plan: the intersections of the boxes of two catalogs. Making it is pure and deterministic, and proves that every
// element of the target has exactly one source.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

// A tensor to copy, from source.tensors()[from] to target.tensors()[to], which have the same name and shape.
struct PlannedTensor {
  std::size_t from = 0;
  std::size_t to = 0;
};

struct Plan {
  std::vector<PlannedTensor> tensors;  // in the order of the target's files
  Index moves = 0;                     // pairs of a source fragment and a target fragment (or replica) that overlap
  Index bytes_read = 0;                // tensor data; each source byte counts once
  Index bytes_written = 0;             // tensor data, replicas included
};

// Plans the copy of every tensor of `target`. Both catalogs must be validated, so that their fragments cover their
// tensors exactly. Fails, naming the tensor, if a target tensor has no source, a different shape, or elements that come
// from no fragment or from two.
//
// The plan is made as follows.
// 1. For each target tensor, in the order of the target's files, find the source tensor of the same name and check that
//    the shapes are equal. Names, row orders and heads have been translated before, so that this is all that must
//    match.
// 2. For each fragment and each replica of the target tensor, look up the source fragments that overlap it
//    (FragmentIndex) and intersect the boxes. Every nonempty intersection is a move.
// 3. Compare the total volume of the intersections with the volume of the target fragment. Source fragments do not
//    overlap, so if the volumes are equal, every element has exactly one source.
// 4. Tensors whose boxes are equal on both sides, such as those of a model's layers, reuse the result of steps 2 and 3.
//    Hashes of the box lists find them.
// The moves themselves are not stored, because there can be millions: copying recomputes them slab by slab (Slabs).
Result<Plan> make_plan(const Catalog& source, const Catalog& target);

// Returns a hash of the plan and of everything that running it depends on: names, dtypes, shapes, and every box, file
// and offset of both sides. Ranks compare their fingerprints before they run their plans, because a rank that sees
// different files would have a different plan.
std::uint64_t fingerprint(const Plan& plan, const Catalog& source, const Catalog& target);

// A tensor's dimensions, from the widest stride to the narrowest.
class DimOrder {
 public:
  DimOrder() = default;
  DimOrder(std::initializer_list<int> dims) {
    for (const int d : dims) push_back(d);
  }
  int rank() const { return rank_; }
  int operator[](int k) const { return dims_[static_cast<std::size_t>(k)]; }
  int innermost() const { return (*this)[rank_ - 1]; }
  void push_back(int d) { dims_[rank_++] = static_cast<std::int8_t>(d); }
  friend bool operator==(const DimOrder&, const DimOrder&) = default;

 private:
  std::array<std::int8_t, kMaxRank> dims_{};
  std::uint8_t rank_ = 0;
};

// The dimension orders in which a tensor is written and read. Empty: row-major.
struct Orders {
  DimOrder written, read;
  // Returns whether one side is contiguous along a dimension that is strided on the other.
  bool are_transposed() const;
};
// Returns the orders of the first fragment of each list.
Orders orders_of(const FragmentList& written, const FragmentList& read);

// Divides the work on one tensor into slabs, boxes of at most about `bytes` bytes, in the order in which the tensor is
// written. Slabs are computed on demand. They are contiguous in that order, of about equal size, and whole pages if
// possible. If the sides are transposed, slabs are tiles with contiguous runs on both sides.
class Slabs {
 public:
  // `bytes` is a target: a slab has at least one row group (or one element). Row groups are divided in row-major order.
  Slabs(const Dims& shape, Index element_bytes, Index bytes, Index row_group, const Orders& orders = {});
  Index count() const { return count_; }
  Box slab(Index k) const;  // 0 <= k < count()
  Index max_bytes() const;  // of the largest slab
  Index bytes() const { return volume(shape_) * element_bytes_; }
  friend bool operator==(const Slabs&, const Slabs&) = default;

 private:
  Dims shape_;
  Index element_bytes_;
  DimOrder order_;
  Dims step_;  // shape of a slab, except for the last ones
  Index count_ = 1;
};

}  // namespace reshard
