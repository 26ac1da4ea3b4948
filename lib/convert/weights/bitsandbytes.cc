// SPDX-License-Identifier: Apache-2.0
// bitsandbytes, functional.py: dequantize_4bit and int8_vectorwise_dequant.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "lib/base/text.h"
#include "lib/convert/weights/packed_matrix.h"
#include "lib/source/computed_source.h"

namespace reshard {
namespace {

constexpr Index kMaxState = Index{64} << 10;  // bytes of a quant_state's JSON; real ones have 200
constexpr Index kMaxSpan = Index{1} << 20;    // elements that are read at once
// get_4bit_type(); fp4 is a float of 1 sign, 2 exponent and 1 mantissa bits over its largest value.
constexpr std::array<float, 16> kNf4 = {-1.0F,
                                        -0.6961928009986877F,
                                        -0.5250730514526367F,
                                        -0.39491748809814453F,
                                        -0.28444138169288635F,
                                        -0.18477343022823334F,
                                        -0.09105003625154495F,
                                        0.0F,
                                        0.07958029955625534F,
                                        0.16093020141124725F,
                                        0.24611230194568634F,
                                        0.33791524171829224F,
                                        0.44070982933044434F,
                                        0.5626170039176941F,
                                        0.7229568362236023F,
                                        1.0F};
constexpr std::array<float, 16> kFp4 = {0.0F,       0.0625F / 12, 8.0F / 12,  1.0F,          4.0F / 12,  6.0F / 12,
                                        2.0F / 12,  3.0F / 12,    0.0F,       -0.0625F / 12, -8.0F / 12, -1.0F,
                                        -4.0F / 12, -6.0F / 12,   -2.0F / 12, -3.0F / 12};

// The values of QuantState.as_dict(packed=True) that are not tensors, stored as JSON in a tensor of bytes.
struct QuantState {
  const std::array<float, 16>* code = nullptr;
  Index block = 0;
  DType dtype = DType::kFloat32;
  Dims shape;
  Index nested_block = 0;  // 0: absmax is stored as floats
  float nested_offset = 0;
};

Result<Dims> parse_shape(const Json& json) {
  Dims out;
  const std::span<const Json> list = TRY(json.get_array("shape"));
  if (std::ssize(list) > kMaxRank)
    return corrupt("shape: expected at most 8 dimensions, got " + with_commas(std::ssize(list)));
  for (const Json& item : list) out.push_back(TRY(item.as_index().context("shape")));
  if (!checked_volume(out)) return corrupt("shape: " + to_string(out) + " is not a valid shape");
  return out;
}

Result<QuantState> parse_state(const Json& json, bool is_nested) {
  QuantState out;
  const std::string_view type = TRY(json.get_string("quant_type"));
  if (type != "nf4" && type != "fp4") return corrupt("quant_type: expected nf4 or fp4, got '" + printable(type) + "'");
  out.code = type == "nf4" ? &kNf4 : &kFp4;
  out.block = TRY(json.get_index("blocksize"));
  if (out.block < 32 || out.block > 4096 || (out.block & (out.block - 1)) != 0)
    return corrupt("blocksize: expected a power of two from 32 to 4,096, got " + std::to_string(out.block));
  const std::string_view dtype = TRY(json.get_string("dtype"));
  const auto parsed = dtype_from_torch(dtype);
  if (!parsed || std::find(std::begin(kPackedFloats), std::end(kPackedFloats), *parsed) == std::end(kPackedFloats))
    return corrupt("dtype: expected bfloat16, float16 or float32, got '" + printable(dtype) + "'");
  out.dtype = *parsed;
  out.shape = TRY(parse_shape(json));
  if (!is_nested) return out;
  out.nested_block = TRY(json.get_index("nested_blocksize"));
  if (out.nested_block < 1)
    return corrupt("nested_blocksize: expected a positive number, got " + std::to_string(out.nested_block));
  const Json* const offset = json.find("nested_offset");
  if (!offset) return corrupt("nested_offset: expected a number; it is missing");
  out.nested_offset = static_cast<float>(TRY(offset->as_double().context("nested_offset")));
  return out;
}

Result<QuantState> read_state(const PackedInput& in) {
  const Tensor& t = in.tensor("quant_state");
  if (t.dtype != DType::kUint8 || t.shape.rank() != 1 || t.shape[0] > kMaxState)
    return in.corrupt_part("quant_state", "expected JSON in at most 65,536 bytes of uint8");
  const std::vector<std::byte> bytes = TRY(in.read(in.index("quant_state")));
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::string what = in.catalog.where() + ": " + tensor_text(t.name);
  return parse_state(TRY(parse_json(text, what)), in.has("nested_absmax")).context(what);
}

// Returns `count` elements from `first` on of a tensor in which at most one dimension is longer than 1.
Box stretch(const Dims& shape, Index first, Index count) {
  Box out = whole(shape);
  for (int d = 0; d < shape.rank(); ++d)
    if (shape[d] != 1 || (d + 1 == shape.rank() && volume(shape) == 1)) {
      out.origin[d] = first;
      out.shape[d] = count;
      break;
    }
  return out;
}
bool is_line(const Dims& shape) {
  return std::count_if(shape.begin(), shape.end(), [](Index extent) { return extent != 1; }) <= 1;
}

class FourBits : public PackedMatrix {
 public:
  FourBits(const PackedInput& in, const QuantState& state, std::vector<float> nested_code)
      : state_(state),
        nested_code_(std::move(nested_code)),
        weight_(in.index("weight")),
        absmax_(in.index("absmax")),
        nested_absmax_(in.weight.find("nested_absmax")) {
    shape_ = state.shape;
    rounded_to_ = state.dtype;
    worker_bytes_ = kMaxSpan * 2;
  }

  // Rows of the box that are near each other are read together.
  Status values(TensorSource& stored, const Box& box, std::span<float> out, MutableBytes scratch) const override {
    const Index width = columns(), count = box.shape[1];
    const auto begin_of = [&](Index row) { return row * width + box.begin(1); };
    float* at = out.data();
    for (Index row = box.begin(0); row < box.end(0);) {
      Index last = row;
      while (last + 1 < box.end(0) && begin_of(last + 1) + count - begin_of(row) <= kMaxSpan) ++last;
      const Index begin = begin_of(row), end = begin_of(last) + count;
      const std::vector<std::uint8_t> packed = TRY(read_packed(stored, begin / 2, ceil_div(end, 2), scratch));
      const Index block = begin / state_.block;
      const std::vector<float> absmax = TRY(read_absmax(stored, block, ceil_div(end, state_.block), scratch));
      for (; row <= last; ++row, at += count)
        for (Index i = begin_of(row); i < begin_of(row) + count; ++i) {
          const unsigned pair = packed[i / 2 - begin / 2];
          at[i - begin_of(row)] =
              (*state_.code)[i % 2 == 0 ? pair >> 4U : pair & 0xfU] * absmax[i / state_.block - block];
        }
    }
    return {};
  }

 private:
  // Reads bytes [begin, end) of the packed values, which may be stored in elements of several bytes.
  Result<std::vector<std::uint8_t>> read_packed(TensorSource& stored, Index begin, Index end,
                                                MutableBytes scratch) const {
    const Tensor& t = stored.catalog().tensors()[weight_];
    const Index width = byte_size(t.dtype), first = begin / width, count = ceil_div(end, width) - first;
    std::vector<std::uint8_t> out(count * width);
    TRY(stored.read(weight_, stretch(t.shape, first, count), std::as_writable_bytes(std::span(out)), scratch));
    out.erase(out.begin(), out.begin() + (begin - first * width));
    return out;
  }

  // Returns the largest magnitudes of blocks [begin, end).
  Result<std::vector<float>> read_absmax(TensorSource& stored, Index begin, Index end, MutableBytes scratch) const {
    if (!nested_absmax_) return read_floats(stored, absmax_, {{begin}, {end - begin}}, scratch);
    const std::vector<std::uint8_t> codes = TRY(read_bytes(stored, absmax_, {{begin}, {end - begin}}, scratch));
    const Index first = begin / state_.nested_block, count = ceil_div(end, state_.nested_block) - first;
    const std::vector<float> scales = TRY(read_floats(stored, *nested_absmax_, {{first}, {count}}, scratch));
    std::vector<float> out(codes.size());
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const Index block = (begin + static_cast<Index>(i)) / state_.nested_block - first;
      out[i] = nested_code_[codes[i]] * scales[block];
    }
    for (float& value : out) value += state_.nested_offset;
    return out;
  }

  const QuantState state_;
  const std::vector<float> nested_code_;  // 256 values
  const std::size_t weight_, absmax_;
  const std::optional<std::size_t> nested_absmax_;
};

Result<std::vector<float>> read_code(const PackedInput& in, std::string_view role, std::size_t values) {
  TRY(in.check(role, {static_cast<Index>(values)}, std::array{DType::kFloat32}));
  const std::vector<std::byte> bytes = TRY(in.read(in.index(role)));
  std::vector<float> out(values);
  std::copy(bytes.begin(), bytes.end(), std::as_writable_bytes(std::span(out)).begin());
  return out;
}

// bitsandbytes takes the 16 values from itself: those that are stored are the same ones, or the file was changed.
Status check_code(const PackedInput& in, const QuantState& state) {
  constexpr float kTolerance = 1e-6F;
  const std::vector<float> stored = TRY(read_code(in, "quant_map", 16));
  for (std::size_t i = 0; i < stored.size(); ++i)
    if (!(std::abs(stored[i] - (*state.code)[i]) <= kTolerance))
      return in.corrupt_part("quant_map", "value " + std::to_string(i) + " is " + std::to_string(stored[i]) +
                                              "; bitsandbytes has " + std::to_string((*state.code)[i]));
  return {};
}

// Reads the quant_state and fails if it describes a weight of another size.
Result<QuantState> state_of_weight(const PackedInput& in) {
  QuantState state = TRY(read_state(in));
  const Tensor& weight = in.tensor("weight");
  const Index elements = volume(state.shape);
  if (!is_line(weight.shape) || weight.bytes() != ceil_div(elements, 2))
    return in.corrupt_part("weight", "its quant_state describes a weight of " + to_string(state.shape) + ", in " +
                                         count_of(ceil_div(elements, 2), "byte") + "; got " + to_string(weight.shape) +
                                         " of " + std::string(info(weight.dtype).torch_name));
  return state;
}

}  // namespace

Result<Dims> bitsandbytes4_shape(const PackedInput& in) { return TRY(state_of_weight(in)).shape; }

OpenedMatrix open_bitsandbytes4(const PackedInput& in) {
  const QuantState state = TRY(state_of_weight(in));
  if (in.has("quant_map")) TRY(check_code(in, state));
  const Index blocks = ceil_div(volume(state.shape), state.block);
  if (state.nested_block == 0) {
    TRY(in.check("absmax", {blocks}, kPackedFloats));
    return opened<FourBits>(in, state, std::vector<float>());
  }
  TRY(in.check("absmax", {blocks}, std::array{DType::kUint8}));
  TRY(in.check("nested_absmax", {ceil_div(blocks, state.nested_block)}, std::array{DType::kFloat32}));
  return opened<FourBits>(in, state, TRY(read_code(in, "nested_quant_map", 256)));
}

namespace {

class EightBits : public PackedMatrix {
 public:
  explicit EightBits(const PackedInput& in) : weight_(in.index("weight")), scales_(in.index("SCB")) {
    shape_ = in.tensor("weight").shape;
  }

  Status values(TensorSource& stored, const Box& box, std::span<float> out, MutableBytes scratch) const override {
    constexpr auto kReciprocal = static_cast<float>(7.874015718698502e-3);  // of 127
    const std::vector<std::uint8_t> elements = TRY(read_bytes(stored, weight_, box, scratch));
    const std::vector<float> scales = TRY(read_floats(stored, scales_, {{box.begin(0)}, {box.shape[0]}}, scratch));
    for (std::size_t i = 0; i < elements.size(); ++i) {
      const float scale = scales[i / static_cast<std::size_t>(box.shape[1])];
      out[i] = static_cast<float>(static_cast<std::int8_t>(elements[i])) * scale * kReciprocal;
    }
    return {};
  }

 private:
  const std::size_t weight_, scales_;
};

}  // namespace

OpenedMatrix open_bitsandbytes8(const PackedInput& in) {
  const Tensor& weight = in.tensor("weight");
  if (weight.dtype != DType::kInt8 || weight.shape.rank() != 2)
    return in.corrupt_part("weight", "expected a matrix of int8, got " + to_string(weight.shape) + " of " +
                                         std::string(info(weight.dtype).torch_name));
  TRY(in.check("SCB", {weight.shape[0]}, std::array{DType::kFloat32}));
  if (in.has("weight_format")) {  // 0: rows; others are tiles of processors that bitsandbytes no longer supports
    const Tensor& format = in.tensor("weight_format");
    if (byte_size(format.dtype) != 1 || format.elements() != 1)
      return in.corrupt_part("weight_format", "expected one byte");
    if (TRY(in.read(in.index("weight_format")))[0] != std::byte{0})
      return in.unsupported_part("weight_format", "expected 0 (row-major)");
  }
  return opened<EightBits>(in);
}

}  // namespace reshard
