// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "lib/base/text.h"
#include "lib/convert/weights/quantizations.h"
#include "lib/device/convert.h"
#include "lib/image/slab_cache.h"

namespace reshard {
namespace {

constexpr Index kFp8Block = 128;  // rows and columns; rows that are read at once
constexpr std::string_view kBlockScales = "_scale_inv";
constexpr float kLargest = 448;                // of float8_e4m3fn
constexpr Index kKeptScales = Index{4} << 20;  // bytes of scales that are cached between the matrix and its scales

// The scale of a block.
struct BlockScale {
  float scale = 1, inverse = 1;  // elements are multiplied by `scale`; `inverse` is stored
};
// Returns the scale for a block with this largest magnitude. Below 448 / 3.4e38 float32 cannot hold that scale; 2^127
// is used instead, whose reciprocal is a denormal that float32 holds exactly, so that the values are kept as well as
// float8 can.
BlockScale scale_of(float largest) {
  constexpr float kGreatest = 0x1p127F;
  const float scale = 1 / largest * kLargest;  // as torch divides a number by a tensor
  if (largest == 0) return {};
  if (scale > std::numeric_limits<float>::max()) return {kGreatest, 1 / kGreatest};
  return {scale, 1 / scale};
}

// A matrix that becomes float8.
struct FloatMatrix {
  std::size_t tensor = 0, scales = 0;     // in the view
  Index block_rows = 0, block_width = 0;  // one scale per block
};

class BlockQuantizer {
 public:
  BlockQuantizer(TensorSource& stored, const FloatMatrix& matrix, std::shared_ptr<SlabCache> cache)
      : stored_(stored),
        matrix_(matrix),
        tensor_(stored.catalog().tensors()[matrix.tensor]),
        columns_(ceil_div(tensor_.shape[1], matrix.block_width)),
        cache_(std::move(cache)) {}

  // Computes the float8 elements of a box.
  Status fill(const Box& box, MutableBytes out, MutableBytes scratch) const {
    if (box.empty()) return {};
    std::vector<float> row(box.shape[1]);
    std::byte* at = out.data();
    for (Index r = box.begin(0); r < box.end(0);) {
      const Index first = r / kFp8Block * kFp8Block, end = std::min(box.end(0), first + kFp8Block);
      const std::vector<std::byte> band = TRY(read(first, scratch));
      const Slab slab = TRY(largest_in(r / matrix_.block_rows, &band, scratch));
      for (; r < end; ++r, at += box.shape[1]) quantize(r, box, band, *slab, row, at);
    }
    return {};
  }

  // Computes the float32 scales of a box of blocks, or the only scale.
  Status fill_scales(const Box& scales, MutableBytes out, MutableBytes scratch) const {
    std::byte* at = out.data();
    const Box box = scales.rank() == 0 ? Box{{0, 0}, {1, 1}} : scales;
    for (Index block = box.begin(0); block < box.end(0) && !box.empty(); ++block) {
      const Slab slab = TRY(largest_in(block, nullptr, scratch));
      for (Index c = box.begin(1); c < box.end(1); ++c, at += sizeof(float)) {
        const float inverse = scale_of(largest(*slab, c)).inverse;
        std::memcpy(at, &inverse, sizeof inverse);
      }
    }
    return {};
  }

 private:
  static float largest(const SlabBytes& slab, Index block) {
    float out = 0;
    std::memcpy(&out, slab.bytes().data() + block * Index{sizeof out}, sizeof out);
    return out;
  }

  // Reads rows from `first` on, in the stored dtype.
  Result<std::vector<std::byte>> read(Index first, MutableBytes scratch) const {
    const Box box{{first, 0}, {std::min(kFp8Block, tensor_.shape[0] - first), tensor_.shape[1]}};
    std::vector<std::byte> out(volume(box) * byte_size(tensor_.dtype));
    TRY(stored_.read(matrix_.tensor, box, out, scratch));
    return out;
  }

  void widen(const std::vector<std::byte>& band, Index row, Index column, Index n, float* out) const {
    const Index at = (row % kFp8Block * tensor_.shape[1] + column) * byte_size(tensor_.dtype);
    convert(tensor_.dtype, DType::kFloat32, band.data() + at, reinterpret_cast<std::byte*>(out), n);
  }

  // Returns the largest magnitude in each block of one row of blocks. `band`: these rows, if they were read already.
  Result<Slab> largest_in(Index block, const std::vector<std::byte>* band, MutableBytes scratch) const {
    const bool is_read = band != nullptr && matrix_.block_rows == kFp8Block;
    return cache_->get({static_cast<std::uint32_t>(matrix_.tensor), block}, [&]() -> Result<Slab> {
      std::vector<std::int32_t> most(columns_);  // magnitudes order as their bits do
      const Index begin = block * matrix_.block_rows, end = std::min(tensor_.shape[0], begin + matrix_.block_rows);
      if (is_read) find(*band, most);
      for (Index first = begin; first < end && !is_read; first += kFp8Block) find(TRY(read(first, scratch)), most);
      TRY(check_finite(block, most));
      auto out = std::make_shared<SlabBytes>(columns_ * Index{sizeof(float)});
      std::memcpy(out->bytes().data(), most.data(), out->bytes().size());
      return Slab(std::move(out));
    });
  }

  void find(const std::vector<std::byte>& band, std::vector<std::int32_t>& most) const {
    const Index width = tensor_.shape[1], rows = std::ssize(band) / (width * byte_size(tensor_.dtype));
    std::vector<float> row(width);
    for (Index r = 0; r < rows; ++r) {
      widen(band, r, 0, width, row.data());
      const float* at = row.data();
      for (Index b = 0; b < columns_; ++b) {
        std::int32_t largest = most[b];
        const float* const end = row.data() + std::min(width, (b + 1) * matrix_.block_width);
        for (; at != end; ++at) largest = std::max(largest, std::bit_cast<std::int32_t>(*at) & 0x7fffffff);
        most[b] = largest;
      }
    }
  }

  Status check_finite(Index block, const std::vector<std::int32_t>& most) const {
    constexpr std::int32_t kInfinite = 0x7f800000;
    for (Index b = 0; b < columns_; ++b)
      if (most[b] >= kInfinite)
        return corrupt(
            stored_.catalog().where() + ": " + tensor_text(tensor_.name) + ": the block at row " +
            with_commas(block * matrix_.block_rows) + ", column " + with_commas(b * matrix_.block_width) +
            " contains infinities or NaNs and cannot be quantized; add --keep-dtype to keep a tensor as it is");
    return {};
  }

  // Computes the part of a row that is in the box.
  void quantize(Index row, const Box& box, const std::vector<std::byte>& band, const SlabBytes& slab,
                std::vector<float>& values, std::byte* out) const {
    const Index begin = box.begin(1), end = box.end(1);
    widen(band, row, begin, end - begin, values.data());
    float* at = values.data();
    for (Index c = begin; c < end;) {
      const Index block = c / matrix_.block_width;
      const float scale = scale_of(largest(slab, block)).scale;
      c = std::min(end, (block + 1) * matrix_.block_width);
      float* const last = values.data() + (c - begin);
      for (; at != last; ++at) *at = std::clamp(*at * scale, -kLargest, kLargest);
    }
    convert(DType::kFloat32, DType::kFloat8E4M3, reinterpret_cast<const std::byte*>(values.data()), out, end - begin);
  }

  TensorSource& stored_;
  const FloatMatrix matrix_;
  const Tensor& tensor_;
  const Index columns_;  // of blocks
  const std::shared_ptr<SlabCache> cache_;
};

// Returns the modules whose matrices stay unquantized, for the loaders' configuration.
Json config_of(const SourceView& view, const std::set<std::string, std::less<>>& quantized, bool in_blocks) {
  constexpr std::string_view kWeight = ".weight";
  Json left = Json::array();
  for (const Tensor& t : view.catalog.tensors())
    if (split_state_key(t.key()).kind == StateKind::kModel && t.shape.rank() == 2 && t.name.ends_with(kWeight) &&
        !quantized.contains(t.name))
      left.push_back(t.name.substr(0, t.name.size() - kWeight.size()));
  Json sides = Json::array();
  sides.push_back(kFp8Block);
  sides.push_back(kFp8Block);
  return Json::object()
      .set("activation_scheme", "dynamic")
      .set("fmt", "e4m3")
      .set("modules_to_not_convert", std::move(left))
      .set("quant_method", "fp8")
      .set("weight_block_size", in_blocks ? std::move(sides) : Json());
}

bool becomes_float8(const NameRule& rule, bool in_blocks) {
  if (rule.quantized == Quantized::kFloat8) return true;
  return !in_blocks && rule.place == NameRule::Place::kLayer && rule.is_matrix() && rule.tp_dim >= 0;
}

}  // namespace

Result<Requantization> quantize_fp8(SourceView& view, const Model& model, const DtypeOptions& typing,
                                    ConversionNotes& notes) {
  const bool in_blocks = typing.quantize == Quantization::kFp8Block;
  Requantization out;
  std::set<std::string, std::less<>> quantized;
  for (const Tensor& t : view.catalog.tensors()) {
    const auto parsed = parse_name(*model.family, t.name);
    if (!parsed || parsed->is_of_quantized() || !becomes_float8(*parsed->rule, in_blocks) || t.shape.rank() != 2 ||
        t.elements() == 0)
      continue;
    if (typing.keeps(view.native(t.name), t.name)) continue;
    TRY(check_floats(view, t));
    out.worker_bytes = std::max(out.worker_bytes, kFp8Block * t.shape[1] * (byte_size(t.dtype) + 1));
    quantized.insert(t.name);
  }
  out.config = config_of(view, quantized, in_blocks);
  for (const std::string& name : quantized) {
    const Tensor& matrix = view.catalog.tensors()[*view.catalog.find(name)];
    Dims shape;
    if (in_blocks) shape = {ceil_div(matrix.shape[0], kFp8Block), ceil_div(matrix.shape[1], kFp8Block)};
    TRY(view.catalog.add(computed_tensor(name + std::string(kBlockScales), DType::kFloat32, shape, matrix.fragments)));
  }
  view.catalog.sort_by_name();
  out.stored = std::make_unique<Catalog>(view.catalog);
  const auto cache = std::make_shared<SlabCache>(kKeptScales);
  for (const std::string& name : quantized) {
    FloatMatrix m{*view.catalog.find(name), *view.catalog.find(name + std::string(kBlockScales)), kFp8Block, kFp8Block};
    Tensor& matrix = view.catalog.tensor(m.tensor);
    if (!in_blocks) std::tie(m.block_rows, m.block_width) = std::pair(matrix.shape[0], matrix.shape[1]);
    matrix.dtype = DType::kFloat8E4M3;
    matrix.model_dtype.reset();
    matrix.row_group = std::max(matrix.row_group, kFp8Block);
    view.computed.insert({m.tensor, m.scales});
    out.tensors.push_back({m.tensor, [m, cache](TensorSource& stored, DType) -> ComputedSource::Fill {
                             const BlockQuantizer q(stored, m, cache);
                             return [q](const Box& box, MutableBytes to, MutableBytes scratch) {
                               return q.fill(box, to, scratch);
                             };
                           }});
    out.tensors.push_back({m.scales, [m, cache](TensorSource& stored, DType) -> ComputedSource::Fill {
                             const BlockQuantizer q(stored, m, cache);
                             return [q](const Box& box, MutableBytes to, MutableBytes scratch) {
                               return q.fill_scales(box, to, scratch);
                             };
                           }});
  }
  notes.warnings.push_back(count_of(std::ssize(quantized), "tensor") + " become float8" +
                           (in_blocks ? " in blocks of 128 x 128" : "") +
                           "; their scales are separate tensors (weight_scale_inv)");
  return out;
}

}  // namespace reshard
