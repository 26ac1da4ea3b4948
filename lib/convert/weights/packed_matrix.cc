// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/packed_matrix.h"

#include <algorithm>
#include <cstring>

#include "lib/base/text.h"
#include "lib/device/convert.h"

namespace reshard {
namespace {

constexpr Index kAtOnce = Index{1} << 16;  // elements that are computed at once

using Open = OpenedMatrix (*)(const PackedInput&);
struct Opener {
  Packing packing;
  Open open;
};
constexpr Opener kOpeners[] = {{Packing::kBitsandbytes4, open_bitsandbytes4},
                               {Packing::kBitsandbytes8, open_bitsandbytes8},
                               {Packing::kGptq, open_gptq},
                               {Packing::kAwq, open_awq},
                               {Packing::kCompressedPacked, open_packed_integers},
                               {Packing::kInteger, open_scaled_integers},
                               {Packing::kCompressedNvfp4, open_compressed_nvfp4},
                               {Packing::kCompressedMxfp4, open_compressed_mxfp4},
                               {Packing::kCompressedMxfp6, open_compressed_mxfp6},
                               {Packing::kCompressedMxfp8, open_compressed_mxfp8},
                               {Packing::kModeloptNvfp4, open_modelopt_nvfp4}};

Open opener_of(Packing packing) {
  const auto* const found =
      std::find_if(std::begin(kOpeners), std::end(kOpeners), [&](const Opener& o) { return o.packing == packing; });
  return found == std::end(kOpeners) ? nullptr : found->open;
}

std::string part_text(const PackedInput& in, std::string_view role) {
  return in.catalog.where() + ": " + tensor_text(in.tensor(role).name) + ": ";
}

// Calls visit(box) for boxes of at most kAtOnce elements that this one is cut into, in row-major order.
template <class Visit>
Status for_blocks(const Box& box, const Visit& visit) {
  const Index rows = std::max<Index>(1, kAtOnce / box.shape[1]), columns = std::min(box.shape[1], kAtOnce);
  for (Index r = box.begin(0); r < box.end(0); r += rows)
    for (Index c = box.begin(1); c < box.end(1); c += columns)
      TRY(visit({{r, c}, {std::min(rows, box.end(0) - r), std::min(columns, box.end(1) - c)}}));
  return {};
}

class TransposedMatrix : public PackedMatrix {
 public:
  explicit TransposedMatrix(std::unique_ptr<PackedMatrix> matrix) : matrix_(std::move(matrix)) {
    shape_ = {matrix_->shape()[1], matrix_->shape()[0]};
    rounded_to_ = matrix_->rounded_to();
    worker_bytes_ = matrix_->worker_bytes() + kAtOnce * Index{sizeof(float)};
  }

  Status values(TensorSource& stored, const Box& box, std::span<float> out, MutableBytes scratch) const override {
    const Index rows = box.shape[0], columns = box.shape[1];
    std::vector<float> values(out.size());
    TRY(matrix_->values(stored, {{box.begin(1), box.begin(0)}, {columns, rows}}, values, scratch));
    for (Index r = 0; r < rows; ++r)
      for (Index c = 0; c < columns; ++c) out[r * columns + c] = values[c * rows + r];
    return {};
  }

 private:
  const std::unique_ptr<PackedMatrix> matrix_;
};

}  // namespace

std::unique_ptr<PackedMatrix> transposed(std::unique_ptr<PackedMatrix> matrix) {
  return std::make_unique<TransposedMatrix>(std::move(matrix));
}

Error PackedInput::corrupt_part(std::string_view role, const std::string& what) const {
  return corrupt(part_text(*this, role) + what);
}

Error PackedInput::unsupported_part(std::string_view role, const std::string& what) const {
  return unsupported(part_text(*this, role) + what);
}

Status PackedInput::check(std::string_view role, const Dims& shape, std::span<const DType> dtypes) const {
  const Tensor& t = tensor(role);
  if (t.shape == shape && std::find(dtypes.begin(), dtypes.end(), t.dtype) != dtypes.end()) return {};
  std::vector<std::string> names;
  for (const DType dtype : dtypes) names.emplace_back(info(dtype).torch_name);
  return corrupt_part(role, "expected " + to_string(shape) + " of " + join(names, " or ") + ", got " +
                                to_string(t.shape) + " of " + std::string(info(t.dtype).torch_name));
}

bool can_unpack(Packing packing) { return opener_of(packing) != nullptr; }

std::string advice_to_unpack(const PackedWeights& packed) {
  const bool is_possible =
      std::ranges::all_of(packed.weights, [](const PackedWeight& weight) { return can_unpack(weight.packing); });
  return is_possible ? "convert it with --dtype bfloat16 first"
                     : "unpacking these is not supported, so save the model without quantization first";
}

OpenedMatrix open_packed(const PackedInput& in) {
  if (const Open open = opener_of(in.weight.packing)) return open(in);
  return unsupported(in.catalog.where() + ": '" + printable(in.weight.name) + "' is packed as " +
                     std::string(packing_title(in.weight.packing)) +
                     ", and unpacking that is not supported; drop --dtype to keep it packed");
}

Status unpack(const PackedMatrix& matrix, TensorSource& stored, DType as, const Box& box, MutableBytes out,
              MutableBytes scratch) {
  if (box.empty()) return {};
  const DType between = matrix.rounded_to();
  const bool is_rounded = between != DType::kFloat32 && between != as;
  std::vector<float> values(std::min(volume(box), kAtOnce));
  std::vector<std::byte> rounded(is_rounded ? values.size() * byte_size(between) : 0);
  auto* const bytes = reinterpret_cast<std::byte*>(values.data());
  std::byte* at = out.data();
  return for_blocks(box, [&](const Box& small) -> Status {
    const Index n = volume(small);
    TRY(matrix.values(stored, small, std::span(values).first(n), scratch));
    if (is_rounded) {
      convert(DType::kFloat32, between, bytes, rounded.data(), n);
      convert(between, as, rounded.data(), at, n);
    } else {
      convert(DType::kFloat32, as, bytes, at, n);
    }
    at += n * byte_size(as);
    return {};
  });
}

Result<std::vector<std::uint32_t>> read_words(TensorSource& stored, std::size_t tensor, const Box& box,
                                              MutableBytes scratch) {
  std::vector<std::uint32_t> out(volume(box));
  TRY(stored.read(tensor, box, std::as_writable_bytes(std::span(out)), scratch));
  return out;
}

Result<std::vector<std::uint8_t>> read_bytes(TensorSource& stored, std::size_t tensor, const Box& box,
                                             MutableBytes scratch) {
  std::vector<std::uint8_t> out(volume(box));
  TRY(stored.read(tensor, box, std::as_writable_bytes(std::span(out)), scratch));
  return out;
}

std::optional<unsigned> bits_of(Index fields, Index words) {
  std::optional<unsigned> out;
  for (unsigned bits = 1; bits <= 8; ++bits) {
    const auto needed = checked_mul(fields, bits);
    if (!needed || ceil_div(*needed, 32) != words) continue;
    if (out) return std::nullopt;
    out = bits;
  }
  return out;
}

Result<Groups> Groups::make(const PackedInput& in, std::string_view role, Index columns, Index count, Index size) {
  Groups out;
  out.count_ = count;
  const std::string what = in.catalog.where() + ": '" + printable(in.weight.name) + "': " + with_commas(columns) +
                           " inputs in " + count_of(count, "group");
  if (count < 1 || count > columns) return corrupt(what);
  out.size_ = size > 0 && ceil_div(columns, size) == count ? size : columns % count == 0 ? columns / count : 0;
  if (in.has(role)) {
    TRY(in.check(role, {columns}, std::array{DType::kInt32}));
    out.index_ = in.index(role);
    out.name_ = in.catalog.where() + ": " + tensor_text(in.tensor(role).name);
    return out;
  }
  if (out.size_ > 0) return out;
  return corrupt(what + (size > 0 ? ", but quantization_config gives group_size " + with_commas(size)
                                  : ", and no quantization_config gives the group_size"));
}

Result<std::vector<Index>> Groups::of(TensorSource& stored, Index begin, Index end, MutableBytes scratch) const {
  std::vector<Index> out(end - begin);
  if (!index_) {
    for (Index i = begin; i < end; ++i) out[i - begin] = i / size_;
    return out;
  }
  const std::vector<std::uint32_t> stored_groups = TRY(read_words(stored, *index_, {{begin}, {end - begin}}, scratch));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::int32_t>(stored_groups[i]);
    if (out[i] == -1 && size_ > 0) out[i] = (begin + static_cast<Index>(i)) / size_;  // never set
    if (out[i] < 0 || out[i] >= count_)
      return corrupt(name_ + ": input " + with_commas(begin + static_cast<Index>(i)) + " is in group " +
                     with_commas(out[i]) + " of " + with_commas(count_));
  }
  return out;
}

}  // namespace reshard
