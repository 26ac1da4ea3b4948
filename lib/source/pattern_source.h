// SPDX-License-Identifier: Apache-2.0
// Synthetic tensors that can be checked anywhere: every element is a function of the tensor's name and the element's
// position, and of nothing else.
//
// The row-major bytes of a tensor are divided into 64-bit words, and word w is a hash of the name and w, with some bits
// forced so that every element is a valid value: floats are finite, of either sign, with magnitudes from 2^-7 to 2, and
// bools are 0 or 1. So any shard of any layout can be generated or checked by itself, and a misplaced value can be
// traced to its position.
#pragma once

#include <string>
#include <string_view>

#include "lib/source/tensor_source.h"

namespace reshard {

class PatternSource : public TensorSource {
 public:
  // The catalog's tensors need a name, a dtype and a shape; each gets one fragment that covers it.
  explicit PatternSource(Catalog catalog);

  const Catalog& catalog() const override { return catalog_; }
  std::vector<StoredPiece> pieces(std::size_t, const Box& box) override { return {{box}}; }
  Status read_pieces(std::size_t number, const Box& box, const PieceFilter& wanted, MutableBytes out,
                     MutableBytes scratch) override;
  Status finish(MutableBytes, Transport*) override { return {}; }
  Index columns(std::size_t) const override { return 1; }

 private:
  Catalog catalog_;
};

// Fills `out` with the row-major elements of `box` of a synthetic tensor. out.size() must be the box's size in bytes.
void fill_pattern(std::string_view name, DType dtype, const Dims& shape, const Box& box, MutableBytes out);

}  // namespace reshard
