// SPDX-License-Identifier: Apache-2.0
// A source that verifies an item's checksum before it returns any part of it: the first access reads the whole item. A
// damaged item stays an error.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lib/checkpoint/fragment_index.h"
#include "lib/source/tensor_source.h"

namespace reshard {

class CheckedSource : public TensorSource {
 public:
  // `stored` and `files`, the pool that `stored` reads from, must outlive this object.
  CheckedSource(TensorSource& stored, FilePool& files) : stored_(stored), files_(files) {}

  const Catalog& catalog() const override { return stored_.catalog(); }
  std::vector<StoredPiece> pieces(std::size_t tensor, const Box& box) override { return stored_.pieces(tensor, box); }
  Status read_pieces(std::size_t number, const Box& box, const PieceFilter& wanted, MutableBytes out,
                     MutableBytes scratch) override;
  Status finish(MutableBytes scratch, Transport* ranks) override { return stored_.finish(scratch, ranks); }
  bool is_remote() const override { return stored_.is_remote(); }
  void add_ranges(std::size_t tensor, const Box& box, Index scratch, std::vector<FileRange>& out) override {
    stored_.add_ranges(tensor, box, scratch, out);
  }
  Index columns(std::size_t tensor) const override { return stored_.columns(tensor); }

 private:
  struct CheckedItem {
    Extent extent;
    std::optional<Error> error;
  };
  Status check(const Tensor& tensor, std::size_t number, MutableBytes scratch);
  Result<std::uint32_t> crc_of(const Extent& extent, MutableBytes scratch);

  TensorSource& stored_;
  FilePool& files_;
  std::mutex mutex_;                                  // held while an item is checked, so that one thread reads it
  std::unordered_multimap<Index, CheckedItem> seen_;  // checked items, by offset
};

}  // namespace reshard
