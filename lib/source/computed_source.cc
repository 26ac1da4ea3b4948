// SPDX-License-Identifier: Apache-2.0
#include "lib/source/computed_source.h"

#include "lib/device/convert.h"

namespace reshard {

std::vector<StoredPiece> ComputedSource::pieces(std::size_t tensor, const Box& box) {
  return computed_.contains(tensor) ? std::vector<StoredPiece>{{box}} : stored_.pieces(tensor, box);
}

Status ComputedSource::read_pieces(std::size_t tensor, const Box& box, const PieceFilter& wanted, MutableBytes out,
                                   MutableBytes scratch) {
  const auto found = computed_.find(tensor);
  if (found == computed_.end()) return stored_.read_pieces(tensor, box, wanted, out, scratch);
  return wanted && !wanted({box}) ? Status() : found->second(box, out, scratch);
}

Result<bool> ComputedSource::read_to_device(std::size_t tensor, const Box& box, Stream& stream, MutableBytes out) {
  if (computed_.contains(tensor)) return false;
  return stored_.read_to_device(tensor, box, stream, out);
}

Result<Index> ComputedSource::read_as_stored(std::size_t tensor, const Box& box, const PieceFilter& wanted,
                                             MutableBytes out, std::vector<LaidPiece>& pieces) {
  if (computed_.contains(tensor)) return Index{0};
  return stored_.read_as_stored(tensor, box, wanted, out, pieces);
}

Result<std::vector<float>> read_floats(TensorSource& source, std::size_t tensor, const Box& box, MutableBytes scratch) {
  const DType dtype = source.catalog().tensors()[tensor].dtype;
  std::vector<std::byte> stored(volume(box) * byte_size(dtype));
  TRY(source.read(tensor, box, stored, scratch));
  std::vector<float> out(volume(box));
  convert(dtype, DType::kFloat32, stored.data(), reinterpret_cast<std::byte*>(out.data()), volume(box));
  return out;
}

}  // namespace reshard
