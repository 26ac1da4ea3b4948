// SPDX-License-Identifier: Apache-2.0
// compressed-tensors' MX formats (compressors/mxfp4, mxfp6, mxfp8, mx_utils.py): small floats, and for each 32 inputs
// of an output the exponent of a power of two, plus 127. The product is rounded to bfloat16.
//
//          values                                     exponents
//   MXFP4  weight_packed [out, in / 2] uint8          weight_scale [out, in / 32] uint8
//   MXFP6  weight_packed [out, 3 * in / 4] uint8      likewise
//   MXFP8  weight [out, in] float8_e4m3fn             likewise
//
// The values of an output are a stream of bits, each value's least significant bit first.
#include <cmath>
#include <string_view>

#include "lib/base/text.h"
#include "lib/convert/weights/packed_matrix.h"
#include "lib/device/convert.h"

namespace reshard {
namespace {

constexpr Index kGroup = 32;  // inputs that share an exponent

// A float of few bits: sign, exponent, mantissa. The exponent 0 marks subnormal values; none marks infinities.
struct SmallFloat {
  unsigned exponent_bits = 0, mantissa_bits = 0;
  int bias = 0;

  unsigned bits() const { return 1 + exponent_bits + mantissa_bits; }
  float value(unsigned code) const {
    const unsigned mantissa = code & ((1U << mantissa_bits) - 1);
    const unsigned exponent = (code >> mantissa_bits) & ((1U << exponent_bits) - 1);
    const unsigned significand = exponent == 0 ? mantissa : mantissa | 1U << mantissa_bits;
    const int scale = static_cast<int>(exponent == 0 ? 1 : exponent) - bias - static_cast<int>(mantissa_bits);
    const float magnitude = std::ldexp(static_cast<float>(significand), scale);
    return (code >> (exponent_bits + mantissa_bits) & 1) != 0 ? -magnitude : magnitude;
  }
};
constexpr SmallFloat kE2M1 = {2, 1, 1}, kE2M3 = {2, 3, 1};

// Returns the value of each code.
std::vector<float> values_of(const SmallFloat& type) {
  std::vector<float> out(std::size_t{1} << type.bits());
  for (std::size_t code = 0; code < out.size(); ++code) out[code] = type.value(static_cast<unsigned>(code));
  return out;
}

std::vector<float> values_of_float8() {
  std::vector<std::uint8_t> codes(256);
  for (std::size_t code = 0; code < codes.size(); ++code) codes[code] = static_cast<std::uint8_t>(code);
  std::vector<float> out(codes.size());
  convert(DType::kFloat8E4M3, DType::kFloat32, reinterpret_cast<const std::byte*>(codes.data()),
          reinterpret_cast<std::byte*>(out.data()), std::ssize(out));
  return out;
}

class MxMatrix : public PackedMatrix {
 public:
  // `table` has the value of each code of `bits` bits.
  MxMatrix(const PackedInput& in, std::string_view values, unsigned bits, Index inputs, std::vector<float> table)
      : values_(in.index(values)), exponents_(in.index("scale")), bits_(bits), table_(std::move(table)) {
    shape_ = {in.tensor(values).shape[0], inputs};
    rounded_to_ = DType::kBFloat16;
  }

  Status values(TensorSource& stored, const Box& box, std::span<float> out, MutableBytes scratch) const override {
    const Index first = box.begin(1) * bits_ / 8, bytes = ceil_div(box.end(1) * bits_, 8) - first;
    const std::vector<std::uint8_t> codes =
        TRY(read_bytes(stored, values_, {{box.begin(0), first}, {box.shape[0], bytes}}, scratch));
    const Index group = box.begin(1) / kGroup, groups = ceil_div(box.end(1), kGroup) - group;
    const std::vector<std::uint8_t> exponents =
        TRY(read_bytes(stored, exponents_, {{box.begin(0), group}, {box.shape[0], groups}}, scratch));
    auto at = out.begin();
    for (Index r = 0; r < box.shape[0]; ++r)
      for (Index c = box.begin(1); c < box.end(1); ++c) {
        const int exponent = exponents[r * groups + c / kGroup - group];
        *at++ = table_[code_at(codes.data() + r * bytes, c * bits_ - first * 8)] * std::ldexp(1.0F, exponent - 127);
      }
    return {};
  }

 private:
  // Returns the code from bit `bit` on. It is in one byte or two.
  std::size_t code_at(const std::uint8_t* bytes, Index bit) const {
    const auto shift = static_cast<unsigned>(bit % 8);
    unsigned both = bytes[bit / 8];
    if (shift + bits_ > 8) both |= unsigned{bytes[bit / 8 + 1]} << 8U;
    return both >> shift & ((1U << bits_) - 1);
  }

  const std::size_t values_, exponents_;
  const unsigned bits_;
  const std::vector<float> table_;
};

OpenedMatrix open(const PackedInput& in, std::string_view values, DType dtype, unsigned bits,
                  std::vector<float> table) {
  const Tensor& packed = in.tensor(values);
  const bool is_matrix = packed.dtype == dtype && packed.shape.rank() == 2;
  const auto stream = is_matrix ? checked_mul(packed.shape[1], 8) : std::nullopt;
  if (!stream)
    return in.unsupported_part(values, "expected a matrix of " + std::string(info(dtype).torch_name) + ", got " +
                                           to_string(packed.shape) + " of " +
                                           std::string(info(packed.dtype).torch_name));
  const Index inputs = *stream / bits;
  if (inputs % kGroup != 0 || *stream % bits != 0)
    return in.corrupt_part(
        values, to_string(packed.shape) + ": expected inputs of " + std::to_string(bits) + " bits in groups of 32");
  TRY(in.check("scale", {packed.shape[0], inputs / kGroup}, std::array{DType::kUint8}));
  return opened<MxMatrix>(in, values, bits, inputs, std::move(table));
}

}  // namespace

OpenedMatrix open_compressed_mxfp4(const PackedInput& in) {
  return open(in, "packed", DType::kUint8, kE2M1.bits(), values_of(kE2M1));
}
OpenedMatrix open_compressed_mxfp6(const PackedInput& in) {
  return open(in, "packed", DType::kUint8, kE2M3.bits(), values_of(kE2M3));
}
OpenedMatrix open_compressed_mxfp8(const PackedInput& in) {
  return open(in, "weight", DType::kFloat8E4M3, 8, values_of_float8());
}

}  // namespace reshard
