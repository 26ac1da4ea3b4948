// The plan: the boxes of one catalog cut with the boxes of another. Pure, deterministic and costed; making it is the
// proof that every element of the target has exactly one source.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
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

// A tensor's dimensions from the widest stride to the least.
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

// As what is written of a tensor lies, and as what is read of it does. Empty: row-major.
struct Orders {
  DimOrder written, read;
  // Whether one side has in runs what the other strides over.
  bool are_transposed() const;
};
// Those of fragments that lie as the first of their list does.
Orders orders_of(const FragmentList& written, const FragmentList& read);

// How one tensor's work is cut: boxes of at most about `bytes` bytes, in the order of what is written, computed on
// demand. They are as long as can be in that order, about as many bytes each, and whole pages where that can be; where
// the sides are transposed, tiles with runs on both.
class Slabs {
 public:
  // `bytes` is a wish: a slab is at least one row group (or one element). Groups of rows are cut in row-major order.
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
  Dims step_;  // of a slab, but for the last ones
  Index count_ = 1;
};

}  // namespace reshard
