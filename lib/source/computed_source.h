// SPDX-License-Identifier: Apache-2.0
// A source in which some tensors are computed from others when they are read: weights with an adapter added, float8
// matrices times their scales.
#pragma once

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "lib/source/tensor_source.h"

namespace reshard {

class ComputedSource : public TensorSource {
 public:
  // Fills `out` with the elements of `box`, like TensorSource::read(). Must be thread-safe.
  using Fill = std::function<Status(const Box& box, MutableBytes out, MutableBytes scratch)>;

  // Tensors without a Fill are read from `stored`. `catalog` must have the same tensors in the same order; computed
  // ones may have another dtype. Both must outlive this object.
  ComputedSource(const Catalog& catalog, TensorSource& stored) : catalog_(catalog), stored_(stored) {}
  void set(std::size_t tensor, Fill fill) { computed_[tensor] = std::move(fill); }

  const Catalog& catalog() const override { return catalog_; }
  std::vector<StoredPiece> pieces(std::size_t tensor, const Box& box) override;
  Status read_pieces(std::size_t tensor, const Box& box, const PieceFilter& wanted, MutableBytes out,
                     MutableBytes scratch) override;
  Result<bool> read_to_device(std::size_t tensor, const Box& box, Stream& stream, MutableBytes out) override;
  Result<Index> read_as_stored(std::size_t tensor, const Box& box, const PieceFilter& wanted, MutableBytes out,
                               std::vector<LaidPiece>& pieces) override;
  Status finish(MutableBytes scratch, Transport* ranks) override { return stored_.finish(scratch, ranks); }
  bool is_remote() const override { return stored_.is_remote(); }
  // Adds nothing for computed tensors.
  void add_ranges(std::size_t tensor, const Box& box, Index scratch, std::vector<FileRange>& out) override {
    if (!computed_.contains(tensor)) stored_.add_ranges(tensor, box, scratch, out);
  }
  Index columns(std::size_t tensor) const override { return stored_.columns(tensor); }

 private:
  const Catalog& catalog_;
  TensorSource& stored_;
  std::unordered_map<std::size_t, Fill> computed_;
};

// Reads a box of a tensor as row-major elements of `dtype`, which are rounded to the dtype that the model computes in
// before. `scratch` as in TensorSource::read().
Status read_as(DType dtype, TensorSource& source, std::size_t tensor, const Box& box, MutableBytes out,
               MutableBytes scratch);
// Does the same as float32, the input of computed tensors.
Result<std::vector<float>> read_floats(TensorSource& source, std::size_t tensor, const Box& box, MutableBytes scratch);

}  // namespace reshard
