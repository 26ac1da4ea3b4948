// SPDX-License-Identifier: Apache-2.0
// NVFP4: 4-bit floats (e2m1), two in a byte, the first in the lower half; a float8 (e4m3) scale for each 16 inputs of
// an output; and one number for the whole weight.
//
//   compressed-tensors (compressors/nvfp4)     scale / weight_global_scale, times the value, rounded to bfloat16
//   ModelOpt (qtensor/nvfp4_tensor.py)         scale * weight_scale_2, times the value, in float32
#include <algorithm>
#include <array>

#include "lib/base/text.h"
#include "lib/convert/weights/packed_matrix.h"
#include "lib/device/convert.h"
#include "lib/source/computed_source.h"

namespace reshard {
namespace {

constexpr std::array<float, 16> kValues = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                           -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

// ModelOpt has no negative zero.
std::array<float, 16> values_of_modelopt() {
  std::array<float, 16> out = kValues;
  out[8] = 0;
  return out;
}

float rounded(float value, DType dtype) {
  std::array<std::byte, sizeof(float)> narrow{};
  convert(DType::kFloat32, dtype, reinterpret_cast<const std::byte*>(&value), narrow.data(), 1);
  convert(dtype, DType::kFloat32, narrow.data(), reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

class Nvfp4 : public PackedMatrix {
 public:
  Nvfp4(const PackedInput& in, std::string_view values, float global, bool is_divided)
      : values_(in.index(values)),
        scales_(in.index("scale")),
        global_(global),
        is_divided_(is_divided),
        table_(is_divided ? kValues : values_of_modelopt()) {
    const Dims& packed = in.tensor(values).shape;
    shape_ = {packed[0], 2 * packed[1]};
    group_ = shape_[1] / std::max<Index>(1, in.tensor("scale").shape[1]);
    if (!is_divided) return;
    rounded_to_ = DType::kBFloat16;
    // torch rounds a bfloat16 divided by a number without dimensions to bfloat16.
    are_scales_rounded_ = in.tensor("global_scale").shape.rank() == 0;
  }

  Status values(TensorSource& stored, const Box& box, std::span<float> out, MutableBytes scratch) const override {
    const Index first = box.begin(1) / 2, bytes = ceil_div(box.end(1), 2) - first;
    const std::vector<std::uint8_t> packed =
        TRY(read_bytes(stored, values_, {{box.begin(0), first}, {box.shape[0], bytes}}, scratch));
    const Index group = box.begin(1) / group_, groups = ceil_div(box.end(1), group_) - group;
    std::vector<float> scales =
        TRY(read_floats(stored, scales_, {{box.begin(0), group}, {box.shape[0], groups}}, scratch));
    for (float& scale : scales) {
      scale = is_divided_ ? scale / global_ : scale * global_;
      if (are_scales_rounded_) scale = rounded(scale, DType::kBFloat16);
    }
    auto at = out.begin();
    for (Index r = 0; r < box.shape[0]; ++r)
      for (Index c = box.begin(1); c < box.end(1); ++c) {
        const unsigned pair = packed[r * bytes + c / 2 - first];
        *at++ = table_[c % 2 == 0 ? pair & 0xfU : pair >> 4U] * scales[r * groups + c / group_ - group];
      }
    return {};
  }

 private:
  const std::size_t values_, scales_;
  const float global_;
  const bool is_divided_;
  const std::array<float, 16> table_;
  bool are_scales_rounded_ = false;
  Index group_ = 16;
};

OpenedMatrix open(const PackedInput& in, std::string_view values, std::string_view global, bool is_divided) {
  const Tensor& packed = in.tensor(values);
  const Dims& scales = in.tensor("scale").shape;
  if (packed.dtype != DType::kUint8 || packed.shape.rank() != 2 || !checked_mul(packed.shape[1], 2))
    return in.unsupported_part(values, "expected a matrix of uint8, got " + to_string(packed.shape) + " of " +
                                           std::string(info(packed.dtype).torch_name));
  const Index inputs = 2 * packed.shape[1];
  const bool is_divisible = scales.rank() == 2 && scales[1] > 0 && inputs % scales[1] == 0;
  TRY(in.check("scale", {packed.shape[0], is_divisible ? scales[1] : ceil_div(inputs, 16)},
               std::array{DType::kFloat8E4M3}));
  if (!is_divisible)
    return in.corrupt_part("scale",
                           to_string(scales) + " for " + with_commas(inputs) + " inputs; expected one per 16 inputs");
  const Tensor& g = in.tensor(global);
  if (g.dtype != DType::kFloat32 || g.elements() != 1)
    return in.unsupported_part(
        global, "expected one float32, got " + to_string(g.shape) + " of " + std::string(info(g.dtype).torch_name));
  const std::vector<std::byte> bytes = TRY(in.read(in.index(global)));
  float value = 0;
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(&value));
  return opened<Nvfp4>(in, values, value, is_divided);
}

}  // namespace

OpenedMatrix open_compressed_nvfp4(const PackedInput& in) { return open(in, "packed", "global_scale", true); }
OpenedMatrix open_modelopt_nvfp4(const PackedInput& in) { return open(in, "weight", "scale_2", false); }

}  // namespace reshard
