// SPDX-License-Identifier: Apache-2.0
// GPTQ (GPTQModel nn_modules/qlinear/__init__.py, PackableQuantLinear.dequantize_weight; AutoGPTQ likewise) and AWQ
// (AutoAWQ awq/utils/packing_utils.py, dequantize_gemm): (value - zero point) * scale, in the dtype of the scales.
//
//             GPTQ                            AWQ (gemm)
//   qweight   [in * bits / 32, out] int32     [in, out / 8] int32, columns 0 2 4 6 1 3 5 7 of each 8 in one word
//   qzeros    [groups, out * bits / 32]       [groups, out / 8], likewise
//   scales    [groups, out]                   [groups, out]
//   g_idx     [in], the group of each input   none
//
// GPTQ's first format has zero points less 1. Fields of 5 to 7 bits are a stream in what auto-round writes
// (auto_round_extension/torch/qlinear_torch.py), and in separate planes in what GPTQModel writes, which is not read.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "lib/base/text.h"
#include "lib/convert/weights/packed_matrix.h"
#include "lib/source/computed_source.h"

namespace reshard {
namespace {

constexpr Index kBandBytes = Index{2} << 20;  // of packed values that are read at once, about
constexpr Index kBandUnit = 64;               // outputs: a band has a multiple

struct Layout {
  unsigned bits = 4;
  bool is_awq = false;
  unsigned zero_offset = 0;  // added to a stored zero point
};

// The matrix is stored by inputs and read by outputs, so a band of outputs is read for all inputs and kept.
class GroupedMatrix : public PackedMatrix {
 public:
  GroupedMatrix(const PackedInput& in, Layout layout, const Dims& shape, Groups groups)
      : layout_(layout),
        groups_(std::move(groups)),
        weight_(in.index("qweight")),
        zeros_(in.index("qzeros")),
        scales_(in.index("scales")),
        count_(in.tensor("scales").shape[0]),
        cache_(in.cache) {
    shape_ = shape;
    rounded_to_ = in.tensor("scales").dtype;
    const Index bytes_a_unit = std::max<Index>(1, shape[1] * layout.bits / 8 * kBandUnit);
    band_ = std::max<Index>(1, kBandBytes / bytes_a_unit) * kBandUnit;
    worker_bytes_ = band_ / kBandUnit * bytes_a_unit;
  }

  Status values(TensorSource& stored, const Box& box, std::span<float> out, MutableBytes scratch) const override {
    const std::vector<Index> groups = TRY(groups_.of(stored, box.begin(1), box.end(1), scratch));
    for (Index row = box.begin(0); row < box.end(0);) {
      const Index end = std::min(box.end(0), (row / band_ + 1) * band_);
      const Slab band = TRY(read_band(stored, row / band_, scratch));
      const Scales scales = TRY(read_scales(stored, row, end, scratch));
      const auto* const words = reinterpret_cast<const std::uint32_t*>(band->bytes().data());
      for (; row < end; ++row) {
        const Index at = (row - box.begin(0)) * box.shape[1];
        fill_row(words, row, box, groups, scales, out.data() + at);
      }
    }
    return {};
  }

 private:
  // The scales and zero points of some outputs, for each group of inputs.
  struct Scales {
    Index first = 0, outputs = 0;
    std::vector<float> scales;
    std::vector<int> zeros;
  };

  Index words_of(Index outputs) const { return layout_.is_awq ? ceil_div(outputs * layout_.bits, 32) : outputs; }
  Index band_outputs(Index band) const { return std::min(band_, shape_[0] - band * band_); }

  Result<Slab> read_band(TensorSource& stored, Index band, MutableBytes scratch) const {
    return cache_->get({static_cast<std::uint32_t>(weight_), band}, [&]() -> Result<Slab> {
      const Index rows = stored.catalog().tensors()[weight_].shape[0];
      const Box box{{0, words_of(band * band_)}, {rows, words_of(band_outputs(band))}};
      auto slab = std::make_shared<SlabBytes>(volume(box) * Index{sizeof(std::uint32_t)});
      TRY(stored.read(weight_, box, slab->bytes(), scratch));
      return Slab(std::move(slab));
    });
  }

  Result<Scales> read_scales(TensorSource& stored, Index begin, Index end, MutableBytes scratch) const {
    Scales out{begin, end - begin, {}, {}};
    out.scales = TRY(read_floats(stored, scales_, {{0, begin}, {count_, end - begin}}, scratch));
    // Whole units of 32 outputs begin with a word.
    const Index first = begin / 32 * 32, first_word = first * layout_.bits / 32;
    const Index words = ceil_div(end * layout_.bits, 32) - first_word;
    const std::vector<std::uint32_t> packed =
        TRY(read_words(stored, zeros_, {{0, first_word}, {count_, words}}, scratch));
    out.zeros.resize(out.scales.size());
    const unsigned mask = (1U << layout_.bits) - 1;
    for (Index g = 0; g < count_; ++g)
      for (Index o = 0; o < out.outputs; ++o) {
        const unsigned zero = bit_field(packed.data() + g * words, 1, place_of(begin - first + o), layout_.bits);
        out.zeros[g * out.outputs + o] = static_cast<int>((zero + layout_.zero_offset) & mask);
      }
    return out;
  }

  // Returns the bit at which an output's field begins, among fields that are packed along the outputs.
  Index place_of(Index output) const {
    constexpr std::array<Index, 8> kOrder = {0, 4, 1, 5, 2, 6, 3, 7};
    if (layout_.is_awq) output = output / 8 * 8 + kOrder[output % 8];
    return output * layout_.bits;
  }

  void fill_row(const std::uint32_t* words, Index row, const Box& box, const std::vector<Index>& groups,
                const Scales& s, float* out) const {
    const Index band = row / band_, output = row - band * band_, width = words_of(band_outputs(band));
    const Index place = place_of(output);
    for (Index c = 0; c < box.shape[1]; ++c) {
      const Index input = box.begin(1) + c;
      const unsigned value = layout_.is_awq ? bit_field(words + input * width, 1, place, layout_.bits)
                                            : bit_field(words + output, width, input * layout_.bits, layout_.bits);
      const std::size_t g = groups[c] * s.outputs + row - s.first;
      out[c] = static_cast<float>(static_cast<int>(value) - s.zeros[g]) * s.scales[g];
    }
  }

  const Layout layout_;
  const Groups groups_;
  const std::size_t weight_, zeros_, scales_;
  const Index count_;  // groups
  const std::shared_ptr<SlabCache> cache_;
  Index band_ = 0;  // outputs
};

Result<Index> config_number(const Json& config, std::string_view member) {
  const Json* const value = config.find(member);
  if (!value || !value->is_integer()) return Index{0};
  return TRY(value->as_index().context("quantization_config: " + std::string(member)));
}

std::string config_word(const Json& config, std::initializer_list<std::string_view> members) {
  for (const std::string_view member : members)
    if (const Json* const value = config.find(member); value && value->is_string())
      return std::string(*value->as_string());
  return {};
}

// Checks what GPTQ's and AWQ's tensors have in common: two dimensions, and int32 words.
Status check_matrices(const PackedInput& in) {
  for (const std::string_view role : {"qweight", "qzeros", "scales"})
    if (in.tensor(role).shape.rank() != 2)
      return in.corrupt_part(role, "expected a matrix, got " + to_string(in.tensor(role).shape));
  for (const std::string_view role : {"qweight", "qzeros"})
    if (in.tensor(role).dtype != DType::kInt32)
      return in.unsupported_part(role, "expected int32, got " + std::string(info(in.tensor(role).dtype).torch_name));
  return {};
}

bool is_of_auto_round(const PackedInput& in) {
  const std::string method = config_word(in.config, {"quant_method"});
  return method.ends_with("auto-round") || method.ends_with("auto_round");
}

// Returns 1 for formats whose zero points are stored less 1.
Result<unsigned> zero_offset(const PackedInput& in) {
  if (is_of_auto_round(in)) {
    const std::string packing = config_word(in.config, {"packing_format", "backend"});
    if (packing == "auto_round:auto_gptq" || packing.starts_with("auto_round:gptq:")) return 1U;
    if (packing == "auto_round" || packing == "auto_round:gptqmodel") return 0U;
    return unsupported(in.catalog.root +
                       ": quantization_config: packing_format: expected auto_round, auto_round:auto_gptq or " +
                       "auto_round:gptqmodel, got " + (packing.empty() ? "nothing" : "'" + printable(packing) + "'") +
                       "; leave out --dtype to keep its weights packed");
  }
  if (!in.config.is_object())
    return usage_error(in.catalog.where() + ": '" + printable(in.weight.name) +
                       "': no quantization_config says whether GPTQ's zero points are stored less 1; pass --config " +
                       "config.json");
  const std::string format = config_word(in.config, {"checkpoint_format", "format"});
  if (format.empty() || format == "gptq" || format == "gemm") return 1U;
  if (format == "gptq_v2") return 0U;
  return unsupported(in.catalog.where() + ": quantization_config: checkpoint_format: expected gptq or gptq_v2, got '" +
                     printable(format) + "'; drop --dtype to keep its weights packed");
}

}  // namespace

OpenedMatrix open_gptq(const PackedInput& in) {
  TRY(check_matrices(in));
  const Dims &packed = in.tensor("qweight").shape, &scales = in.tensor("scales").shape;
  const Index outputs = packed[1], count = scales[0];
  const Json* const ordered = in.config.find("desc_act");
  if (ordered && ordered->is_bool() && *ordered->as_bool() && !in.has("g_idx"))
    return in.corrupt_part("qweight",
                           "quantization_config says desc_act, and g_idx, the group of each input, is missing");
  Layout layout;
  layout.zero_offset = TRY(zero_offset(in));
  const Index configured = TRY(config_number(in.config, "bits"));
  const auto bits = bits_of(outputs, in.tensor("qzeros").shape[1]);
  layout.bits = bits ? *bits : static_cast<unsigned>(std::clamp<Index>(configured, 0, 16));
  const bool has_stream = layout.bits != 1 && (layout.bits < 5 || layout.bits == 8 || is_of_auto_round(in));
  if (layout.bits < 1 || layout.bits > 8 || !has_stream)
    return in.unsupported_part("qzeros", to_string(in.tensor("qzeros").shape) + " for " + with_commas(outputs) +
                                             " outputs, " + std::to_string(layout.bits) +
                                             " bits each; expected 2, 3, 4 or 8: leave out --dtype to keep it packed");
  const auto stream = checked_mul(packed[0], 32);
  if (!stream) return in.corrupt_part("qweight", to_string(packed) + " is not a valid shape");
  Index inputs = *stream / layout.bits;
  if (in.has("g_idx") && in.tensor("g_idx").shape.rank() == 1) inputs = in.tensor("g_idx").shape[0];
  if (ceil_div(inputs * layout.bits, 32) != packed[0] || inputs > *stream)
    return in.corrupt_part("g_idx", with_commas(inputs) + " inputs of " + std::to_string(layout.bits) +
                                        " bits do not fill the " + count_of(packed[0], "row") + " of qweight");
  TRY(in.check("qzeros", {count, ceil_div(outputs * layout.bits, 32)}, std::array{DType::kInt32}));
  TRY(in.check("scales", {count, outputs}, kPackedFloats));
  Groups groups = TRY(Groups::make(in, "g_idx", inputs, count, TRY(config_number(in.config, "group_size"))));
  return opened<GroupedMatrix>(in, layout, Dims{outputs, inputs}, std::move(groups));
}

OpenedMatrix open_awq(const PackedInput& in) {
  TRY(check_matrices(in));
  const std::string version = config_word(in.config, {"version", "checkpoint_format", "format"});
  if (!version.empty() && version != "gemm" && version != "GEMM")
    return unsupported(in.catalog.where() + ": quantization_config: version: expected gemm, got '" +
                       printable(version) + "'; drop --dtype to keep its weights packed");
  const Dims &packed = in.tensor("qweight").shape, &scales = in.tensor("scales").shape;
  const Index inputs = packed[0], outputs = scales[1], count = scales[0];
  if (outputs % 8 != 0 || packed[1] != outputs / 8)
    return in.corrupt_part("qweight", "expected " + to_string(Dims{inputs, ceil_div(outputs, 8)}) + " for the scales " +
                                          to_string(scales) + ", got " + to_string(packed));
  TRY(in.check("qzeros", {count, outputs / 8}, std::array{DType::kInt32}));
  TRY(in.check("scales", {count, outputs}, kPackedFloats));
  Groups groups = TRY(Groups::make(in, "g_idx", inputs, count, TRY(config_number(in.config, "group_size"))));
  return opened<GroupedMatrix>(in, Layout{4, true, 0}, Dims{outputs, inputs}, std::move(groups));
}

}  // namespace reshard
