// SPDX-License-Identifier: Apache-2.0
// Integers of compressed-tensors (quantization/lifecycle/forward_helpers.py, _dequantize): (value - zero point) *
// scale, in the dtype of the scales, which are for the whole weight, an output, or a group of inputs of an output.
//
//   pack-quantized (compressors/pack_quantized)          int-quantized (compressors/naive_quantized)
//   weight_packed      [out, in * bits / 32] int32       weight             [out, in] int8
//   weight_scale       [out, groups], [out, 1] or [1]    weight_scale       likewise
//   weight_zero_point  [out * bits / 32, groups] int32   weight_zero_point  as the scales, int8
//   weight_shape       [2], the weight's shape
//   weight_g_idx       [in], the group of each input
//
// Packed values and zero points are stored plus half their range.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "lib/base/text.h"
#include "lib/convert/weights/packed_matrix.h"
#include "lib/source/computed_source.h"

namespace reshard {
namespace {

class ScaledIntegers : public PackedMatrix {
 public:
  // `bits` is the size of a packed value; 0: a value takes a byte.
  ScaledIntegers(const PackedInput& in, std::string_view values, const Dims& shape, unsigned bits, Groups groups)
      : bits_(bits),
        values_(in.index(values)),
        scales_(in.index("scale")),
        zeros_(in.weight.find("zero_point")),
        groups_(std::move(groups)) {
    shape_ = shape;
    rounded_to_ = in.tensor("scale").dtype;
    const Dims& scales = in.tensor("scale").shape;
    is_by_row_ = scales.rank() == 2 && scales[0] == shape[0];
    columns_ = scales.rank() == 2 ? scales[1] : 1;
    are_zeros_packed_ = zeros_ && in.tensor("zero_point").dtype == DType::kInt32;
  }

  Status values(TensorSource& stored, const Box& box, std::span<float> out, MutableBytes scratch) const override {
    const std::vector<Index> groups = TRY(groups_.of(stored, box.begin(1), box.end(1), scratch));
    const std::vector<int> values = TRY(read_values(stored, box, scratch));
    const Index rows = is_by_row_ ? box.shape[0] : 1;
    const Box of_scales = scales_box(stored.catalog().tensors()[scales_].shape, box);
    const std::vector<float> scales = TRY(read_floats(stored, scales_, of_scales, scratch));
    const std::vector<int> zeros = TRY(read_zeros(stored, of_scales, rows, scratch));
    for (Index r = 0; r < box.shape[0]; ++r)
      for (Index c = 0; c < box.shape[1]; ++c) {
        const std::size_t s = (is_by_row_ ? r : 0) * columns_ + groups[c];
        const std::size_t i = r * box.shape[1] + c;
        out[i] = static_cast<float>(values[i] - (zeros.empty() ? 0 : zeros[s])) * scales[s];
      }
    return {};
  }

 private:
  int half() const { return bits_ == 0 ? 0 : 1 << (bits_ - 1); }

  Box scales_box(const Dims& scales, const Box& box) const {
    return is_by_row_ ? Box{{box.begin(0), 0}, {box.shape[0], columns_}} : whole(scales);
  }

  Result<std::vector<int>> read_values(TensorSource& stored, const Box& box, MutableBytes scratch) const {
    std::vector<int> out(volume(box));
    if (bits_ == 0) {
      const std::vector<std::uint8_t> bytes = TRY(read_bytes(stored, values_, box, scratch));
      std::transform(bytes.begin(), bytes.end(), out.begin(),
                     [](std::uint8_t b) { return static_cast<std::int8_t>(b); });
      return out;
    }
    const Index first = box.begin(1) * bits_ / 32, words = ceil_div(box.end(1) * bits_, 32) - first;
    const std::vector<std::uint32_t> packed =
        TRY(read_words(stored, values_, {{box.begin(0), first}, {box.shape[0], words}}, scratch));
    for (Index r = 0; r < box.shape[0]; ++r)
      for (Index c = 0; c < box.shape[1]; ++c)
        out[r * box.shape[1] + c] =
            static_cast<int>(bit_field(packed.data() + r * words, 1, (box.begin(1) + c) * bits_ - first * 32, bits_)) -
            half();
    return out;
  }

  // Reads the zero points of `rows` rows of scales; empty if all are 0.
  Result<std::vector<int>> read_zeros(TensorSource& stored, const Box& scales, Index rows, MutableBytes scratch) const {
    std::vector<int> out;
    if (!zeros_) return out;
    out.resize(rows * columns_);
    if (!are_zeros_packed_) {
      const std::vector<std::uint8_t> bytes = TRY(read_bytes(stored, *zeros_, scales, scratch));
      std::transform(bytes.begin(), bytes.end(), out.begin(),
                     [](std::uint8_t b) { return static_cast<std::int8_t>(b); });
      return out;
    }
    const Index first = scales.begin(0) * bits_ / 32, words = ceil_div(scales.end(0) * bits_, 32) - first;
    const std::vector<std::uint32_t> packed =
        TRY(read_words(stored, *zeros_, {{first, 0}, {words, columns_}}, scratch));
    for (Index r = 0; r < rows; ++r)
      for (Index c = 0; c < columns_; ++c)
        out[r * columns_ + c] = static_cast<int>(bit_field(packed.data() + c, columns_,
                                                           (scales.begin(0) + r) * bits_ - first * 32, bits_)) -
                                half();
    return out;
  }

  const unsigned bits_;
  const std::size_t values_, scales_;
  const std::optional<std::size_t> zeros_;
  const Groups groups_;
  bool is_by_row_ = false, are_zeros_packed_ = false;
  Index columns_ = 1;  // of the scales
};

// Checks the scales of a matrix and returns the number of groups that its inputs form.
Result<Index> check_scales(const PackedInput& in, const Dims& matrix) {
  const Tensor& t = in.tensor("scale");
  const bool is_one = t.elements() == 1;
  if (std::find(std::begin(kPackedFloats), std::end(kPackedFloats), t.dtype) == std::end(kPackedFloats) ||
      !(is_one || (t.shape.rank() == 2 && t.shape[0] == matrix[0] && t.shape[1] >= 1)))
    return in.corrupt_part("scale", to_string(t.shape) + " of " + std::string(info(t.dtype).torch_name) +
                                        " for a weight of " + to_string(matrix) +
                                        "; expected floats, one per weight, output or group of inputs");
  return t.shape.rank() == 2 ? t.shape[1] : 1;
}

// Returns a number from the first of compressed-tensors' groups of modules that has it; 0 if none does.
Index group_number(const Json& config, std::string_view member) {
  const Json* const groups = config.find("config_groups");
  const auto members = groups ? groups->as_object() : Result<std::span<const Json::Member>>(corrupt("none"));
  if (!members) return 0;
  for (const Json::Member& group : *members) {
    const Json* const weights = group.value.find("weights");
    const Json* const value = weights ? weights->find(member) : nullptr;
    if (const auto n = value ? value->as_index() : Result<Index>(corrupt("none")); n && *n > 0) return *n;
  }
  return 0;
}

Result<Groups> groups_of(const PackedInput& in, const Dims& matrix, Index count) {
  return Groups::make(in, "g_idx", matrix[1], count, group_number(in.config, "group_size"));
}

Result<Dims> stored_shape(const PackedInput& in) {
  const Tensor& t = in.tensor("shape");
  const bool is_wide = t.dtype == DType::kInt64;
  if (t.shape != Dims{2} || !(is_wide || t.dtype == DType::kInt32))
    return in.unsupported_part("shape", "expected [2] of int64, which is the shape of a matrix; got " +
                                            to_string(t.shape) + " of " + std::string(info(t.dtype).torch_name));
  const std::vector<std::byte> bytes = TRY(in.read(in.index("shape")));
  std::array<std::int64_t, 2> wide{};
  std::array<std::int32_t, 2> narrow{};
  if (is_wide)
    std::memcpy(wide.data(), bytes.data(), sizeof wide);
  else
    std::memcpy(narrow.data(), bytes.data(), sizeof narrow);
  return is_wide ? Dims{wide[0], wide[1]} : Dims{narrow[0], narrow[1]};
}

}  // namespace

OpenedMatrix open_packed_integers(const PackedInput& in) {
  const Dims shape = TRY(stored_shape(in));
  const Dims& packed = in.tensor("packed").shape;
  if (packed.rank() != 2 || shape[0] != packed[0] || shape[1] < 1 || !checked_volume(shape))
    return in.corrupt_part("shape", to_string(shape) + " contradicts the packed shape " + to_string(packed));
  const Index configured = group_number(in.config, "num_bits");
  auto bits = bits_of(shape[1], packed[1]);
  const auto needed = checked_mul(shape[1], configured);
  if (!bits && configured <= 8 && needed && ceil_div(*needed, 32) == packed[1])
    bits = static_cast<unsigned>(configured);
  if (!bits)
    return in.corrupt_part("packed", "expected 1 to 8 bits for each of " + with_commas(shape[1]) + " inputs, got " +
                                         to_string(packed) + " of int32");
  TRY(in.check("packed", packed, std::array{DType::kInt32}));
  const Index count = TRY(check_scales(in, shape));
  if (in.has("zero_point")) {
    const Dims &scales = in.tensor("scale").shape, &zeros = in.tensor("zero_point").shape;
    const bool is_byte = in.tensor("zero_point").dtype == DType::kInt8;  // as early versions have them
    if (is_byte || scales.rank() != 2 || scales[0] != shape[0])
      TRY(in.check("zero_point", scales, std::array{DType::kInt8}));
    else if (zeros != Dims{ceil_div(shape[0] * *bits, 32), count})
      TRY(in.check("zero_point", {ceil_div(shape[0] * *bits, 32), count}, std::array{DType::kInt32}));
  }
  return opened<ScaledIntegers>(in, "packed", shape, *bits, TRY(groups_of(in, shape, count)));
}

OpenedMatrix open_scaled_integers(const PackedInput& in) {
  const Tensor& weight = in.tensor("weight");
  if (weight.dtype != DType::kInt8 || weight.shape.rank() != 2)
    return in.unsupported_part("weight", "expected a matrix of int8, got " + to_string(weight.shape) + " of " +
                                             std::string(info(weight.dtype).torch_name));
  const Index count = TRY(check_scales(in, weight.shape));
  if (in.has("zero_point")) TRY(in.check("zero_point", in.tensor("scale").shape, std::array{DType::kInt8}));
  return opened<ScaledIntegers>(in, "weight", weight.shape, 0, TRY(groups_of(in, weight.shape, count)));
}

}  // namespace reshard
