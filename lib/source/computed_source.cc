// SPDX-License-Identifier: Apache-2.0
#include "lib/source/computed_source.h"

#include <span>
#include <utility>

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

Status read_as(DType dtype, TensorSource& source, std::size_t tensor, const Box& box, MutableBytes out,
               MutableBytes scratch) {
  const Tensor& t = source.catalog().tensors()[tensor];
  const DType own = t.model_dtype.value_or(t.dtype);
  if (t.dtype == dtype && own == dtype) return source.read(tensor, box, out, scratch);
  const Index n = volume(box);
  std::vector<std::byte> elements(n * byte_size(t.dtype));
  TRY(source.read(tensor, box, elements, scratch));
  if (own != t.dtype) {
    std::vector<std::byte> rounded(n * byte_size(own));
    convert(t.dtype, own, elements.data(), rounded.data(), n);
    elements = std::move(rounded);
  }
  convert(own, dtype, elements.data(), out.data(), n);
  return {};
}

Result<std::vector<float>> read_floats(TensorSource& source, std::size_t tensor, const Box& box, MutableBytes scratch) {
  std::vector<float> out(volume(box));
  TRY(read_as(DType::kFloat32, source, tensor, box, std::as_writable_bytes(std::span(out)), scratch));
  return out;
}

}  // namespace reshard
