// SPDX-License-Identifier: Apache-2.0
// Boxes in a tensor's index space. All mesh, shard and copy arithmetic is expressed in them.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>

#include "lib/base/checked.h"

namespace reshard {

// The highest rank supported. Readers refuse tensors of more dimensions; none are known in practice.
inline constexpr int kMaxRank = 8;

// One number for each dimension: a shape, an origin, strides. Does not allocate, so kernels can take it by value.
class Dims {
 public:
  constexpr Dims() = default;
  constexpr Dims(std::initializer_list<Index> values) : Dims(std::span<const Index>(values.begin(), values.size())) {}
  explicit constexpr Dims(std::span<const Index> values) : rank_(static_cast<int>(values.size())) {
    for (int d = 0; d < rank_; ++d) v_[static_cast<std::size_t>(d)] = values[static_cast<std::size_t>(d)];
  }
  static constexpr Dims filled(int rank, Index value) {
    Dims d;
    d.rank_ = rank;
    for (int i = 0; i < rank; ++i) d[i] = value;
    return d;
  }

  constexpr int rank() const { return rank_; }
  constexpr Index& operator[](int d) { return v_[static_cast<std::size_t>(d)]; }
  constexpr Index operator[](int d) const { return v_[static_cast<std::size_t>(d)]; }
  constexpr const Index* begin() const { return v_.data(); }
  constexpr const Index* end() const { return v_.data() + rank_; }
  std::span<const Index> span() const { return {begin(), static_cast<std::size_t>(rank_)}; }
  void push_back(Index value) { v_[static_cast<std::size_t>(rank_++)] = value; }

  friend constexpr bool operator==(const Dims& a, const Dims& b) {
    return a.rank_ == b.rank_ && std::equal(a.begin(), a.end(), b.begin());
  }
  friend constexpr bool operator<(const Dims& a, const Dims& b) {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::array<Index, kMaxRank> v_{};
  int rank_ = 0;
};

std::string to_string(const Dims& dims);  // "[128256, 2048]"

// Returns the product of a shape's extents (1 for rank 0). Only for shapes that were checked when they were read.
Index volume(const Dims& shape);
// Returns the product for an unchecked shape, or nothing if an extent is negative or the product overflows.
std::optional<Index> checked_volume(const Dims& shape);
// Returns the element strides of a row-major tensor.
Dims row_major_strides(const Dims& shape);

// The half-open region [origin, origin + shape).
struct Box {
  Dims origin;
  Dims shape;

  int rank() const { return shape.rank(); }
  Index begin(int d) const { return origin[d]; }
  Index end(int d) const { return origin[d] + shape[d]; }
  bool empty() const;  // no elements; never true for rank 0

  friend bool operator==(const Box&, const Box&) = default;
  // Orders by origin, then by shape.
  friend bool operator<(const Box& a, const Box& b) {
    return a.origin == b.origin ? a.shape < b.shape : a.origin < b.origin;
  }
};

Box whole(const Dims& shape);  // from the origin
Index volume(const Box& box);
Box intersect(const Box& a, const Box& b);  // empty if they do not overlap; both must have the same rank
bool contains(const Box& outer, const Box& inner);
std::string to_string(const Box& box);  // "[0:512, 0:2048]"

}  // namespace reshard
