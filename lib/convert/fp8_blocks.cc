#include "lib/convert/fp8_blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "lib/engine/slab_cache.h"

namespace reshard {
namespace {

constexpr Index kFp8Block = 128;  // rows and columns
constexpr std::string_view kBlockScales = "_scale_inv";
constexpr float kLargest = 448;                // of float8_e4m3fn
constexpr Index kKeptScales = Index{4} << 20;  // bytes of scales that are remembered from matrix to scales

// Scales of the blocks of one matrix beside another.
struct BlockScale {
  float scale = 1, inverse = 1;  // elements are multiplied by the one, the other is stored
};
// Of the largest magnitude. Where float32 has no such scale the block becomes zeros.
BlockScale scale_of(float largest) {
  const float scale = 1 / largest * kLargest;  // as torch divides a number by a tensor
  if (largest == 0 || scale > std::numeric_limits<float>::max()) return {};
  return {scale, 1 / scale};
}

class BlockQuantizer {
 public:
  BlockQuantizer(TensorSource& stored, std::size_t matrix, std::shared_ptr<SlabCache> cache)
      : stored_(stored),
        matrix_(matrix),
        tensor_(stored.catalog().tensors()[matrix]),
        columns_(ceil_div(tensor_.shape[1], kFp8Block)),
        cache_(std::move(cache)) {}

  // Elements, float8.
  Status fill(const Box& box, MutableBytes out, MutableBytes scratch) const {
    if (box.empty()) return {};
    std::vector<std::byte> band;
    std::vector<float> row(static_cast<std::size_t>(box.shape[1]));
    std::byte* at = out.data();
    for (Index r = box.begin(0); r < box.end(0);) {
      const Index block = r / kFp8Block, end = std::min(box.end(0), (block + 1) * kFp8Block);
      band = TRY(read(block, scratch));
      const Slab slab = TRY(cache_->get(key(block), [&] { return find(block, band); }));
      for (; r < end; ++r, at += box.shape[1]) quantize(r, box, band, *slab, row, at);
    }
    return {};
  }

  // Scales, float32, of a box of blocks.
  Status fill_scales(const Box& box, MutableBytes out, MutableBytes scratch) const {
    std::byte* at = out.data();
    for (Index block = box.begin(0); block < box.end(0) && !box.empty(); ++block) {
      const Slab slab =
          TRY(cache_->get(key(block), [&]() -> Result<Slab> { return find(block, TRY(read(block, scratch))); }));
      for (Index c = box.begin(1); c < box.end(1); ++c, at += sizeof(float)) {
        const float inverse = scale_of(largest(*slab, c)).inverse;
        std::memcpy(at, &inverse, sizeof inverse);
      }
    }
    return {};
  }

 private:
  SlabCache::Key key(Index block) const { return {static_cast<std::uint32_t>(matrix_), block}; }

  static float largest(const SlabBytes& slab, Index block) {
    float out = 0;
    std::memcpy(&out, slab.bytes().data() + block * static_cast<Index>(sizeof out), sizeof out);
    return out;
  }

  // A row of blocks, as it is stored.
  Result<std::vector<std::byte>> read(Index block, MutableBytes scratch) const {
    const Index begin = block * kFp8Block, end = std::min(tensor_.shape[0], begin + kFp8Block);
    const Box box{{begin, 0}, {end - begin, tensor_.shape[1]}};
    std::vector<std::byte> out(static_cast<std::size_t>(volume(box) * byte_size(tensor_.dtype)));
    TRY(stored_.read(matrix_, box, out, scratch));
    return out;
  }

  void widen(const std::vector<std::byte>& band, Index row, Index column, Index n, float* out) const {
    const Index at = (row % kFp8Block * tensor_.shape[1] + column) * byte_size(tensor_.dtype);
    convert(tensor_.dtype, DType::kFloat32, band.data() + at, reinterpret_cast<std::byte*>(out), n);
  }

  // The largest magnitude of each block of a row of them.
  Result<Slab> find(Index block, const std::vector<std::byte>& band) const {
    const Index width = tensor_.shape[1], rows = std::ssize(band) / (width * byte_size(tensor_.dtype));
    std::vector<std::int32_t> most(static_cast<std::size_t>(columns_));  // magnitudes order as their bits do
    std::vector<float> row(static_cast<std::size_t>(width));
    for (Index r = 0; r < rows; ++r) {
      widen(band, r, 0, width, row.data());
      const float* at = row.data();
      for (Index b = 0; b < columns_; ++b) {
        std::int32_t largest = most[static_cast<std::size_t>(b)];
        const float* const end = row.data() + std::min(width, (b + 1) * kFp8Block);
        for (; at != end; ++at) largest = std::max(largest, std::bit_cast<std::int32_t>(*at) & 0x7fffffff);
        most[static_cast<std::size_t>(b)] = largest;
      }
    }
    constexpr std::int32_t kInfinite = 0x7f800000;
    for (Index b = 0; b < columns_; ++b)
      if (most[static_cast<std::size_t>(b)] >= kInfinite)
        return corrupt(stored_.catalog().root + ": " + tensor_text(tensor_.name) + ": the block at row " +
                       with_commas(block * kFp8Block) + ", column " + with_commas(b * kFp8Block) +
                       " holds infinities or NaNs: it cannot be quantized; --keep-dtype leaves a tensor as it is");
    auto out = std::make_shared<SlabBytes>(columns_ * static_cast<Index>(sizeof(float)));
    std::memcpy(out->bytes().data(), most.data(), out->bytes().size());
    return Slab(std::move(out));
  }

  // What of a row lies in the box.
  void quantize(Index row, const Box& box, const std::vector<std::byte>& band, const SlabBytes& slab,
                std::vector<float>& values, std::byte* out) const {
    const Index begin = box.begin(1), end = box.end(1);
    widen(band, row, begin, end - begin, values.data());
    float* at = values.data();
    for (Index c = begin; c < end;) {
      const Index block = c / kFp8Block;
      const float scale = scale_of(largest(slab, block)).scale;
      c = std::min(end, (block + 1) * kFp8Block);
      float* const last = values.data() + (c - begin);
      for (; at != last; ++at) *at = std::clamp(*at * scale, -kLargest, kLargest);
    }
    convert(DType::kFloat32, DType::kFloat8E4M3, reinterpret_cast<const std::byte*>(values.data()), out, end - begin);
  }

  TensorSource& stored_;
  const std::size_t matrix_;
  const Tensor& tensor_;
  const Index columns_;  // of blocks
  const std::shared_ptr<SlabCache> cache_;
};

Status check(const SourceView& view, const Translation& names, const Selection& selection, const Typing& typing,
             const Format& format) {
  const std::string what = "--quantize fp8-block: ";
  if (!names.renames() || names.to != Convention::kHf || format.holds == Holds::kAdam)
    return unsupported(what + "scales have names beside their matrices among Hugging Face names only; --to hf, or " +
                       "--names hf");
  const Model& model = names.model;
  if (!model.is_described())
    return usage_error(
        view.catalog.root + ": " + what +
        "a config.json has to say that the model is quantized, and none is there; give it with --config");
  if (std::none_of(model.family->rules.begin(), model.family->rules.end(),
                   [](const NameRule& rule) { return rule.quantized == Quantized::kFloat8; }))
    return unsupported(what + "models of family " + model.family->name + " have no matrices in float8 blocks");
  if (!model.config->quantization.empty())
    return unsupported(model.config->path + ": " + what + "the model is quantized already (" +
                       printable(model.config->quantization) + "); --dtype bfloat16 first");
  if (selection.merge_adapter) return usage_error(what + "merge the adapter first, and quantize what comes out");
  if (typing.dtype && byte_size(*typing.dtype) == 1)
    return usage_error(what + "--dtype says what the other tensors become, and it is no float8");
  return {};
}

// What loaders are told: which modules have matrices that are as they were.
Json config_of(const SourceView& view, const std::set<std::string, std::less<>>& quantized) {
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
      .set("weight_block_size", std::move(sides));
}

}  // namespace

Result<Requantization> quantize_fp8_blocks(SourceView& view, const Translation& names, const Selection& selection,
                                           const Typing& typing, const Format& format, Notes& notes) {
  TRY(check(view, names, selection, typing, format));
  Requantization out;
  std::set<std::string, std::less<>> quantized;
  for (const Tensor& t : view.catalog.tensors()) {
    const auto parsed = parse_name(*names.model.family, t.name);
    if (!parsed || parsed->is_of_quantized() || parsed->rule->quantized != Quantized::kFloat8 || t.shape.rank() != 2 ||
        t.elements() == 0)
      continue;
    if (any_glob_matches(typing.keep_dtype, view.native(t.name)) || any_glob_matches(typing.keep_dtype, t.name))
      continue;
    if (byte_size(t.dtype) < 2 || !can_convert(t.dtype, DType::kFloat32))
      return unsupported(view.catalog.root + ": " + tensor_text(view.native(t.name)) + " is " +
                         std::string(info(t.dtype).torch_name) + ": --quantize takes floating-point matrices");
    out.worker_bytes = std::max(out.worker_bytes, kFp8Block * t.shape[1] * (byte_size(t.dtype) + 1));
    quantized.insert(t.name);
  }
  if (quantized.empty())
    return usage_error(view.catalog.root + ": --quantize: no matrix of the selection is quantized");
  out.config = config_of(view, quantized);
  for (const std::string& name : quantized) {
    const Tensor& matrix = view.catalog.tensors()[*view.catalog.find(name)];
    Tensor scales;
    scales.name = name + std::string(kBlockScales);
    scales.shape = {ceil_div(matrix.shape[0], kFp8Block), ceil_div(matrix.shape[1], kFp8Block)};
    scales.fragments = FragmentList(2);
    scales.fragments.add(whole(scales.shape), matrix.fragments.extent(0));  // never read
    TRY(view.catalog.add(std::move(scales)));
  }
  view.catalog.sort_by_name();
  out.stored = std::make_unique<Catalog>(view.catalog);
  const auto cache = std::make_shared<SlabCache>(kKeptScales);
  for (const std::string& name : quantized) {
    const std::size_t m = *view.catalog.find(name), s = *view.catalog.find(name + std::string(kBlockScales));
    Tensor& matrix = view.catalog.tensor(m);
    matrix.dtype = DType::kFloat8E4M3;
    matrix.model_dtype.reset();
    matrix.row_group = std::max(matrix.row_group, kFp8Block);
    view.computed.insert(m);
    view.computed.insert(s);
    out.tensors.push_back({m, [m, cache](TensorSource& stored, DType) -> ComputedSource::Fill {
                             const BlockQuantizer q(stored, m, cache);
                             return [q](const Box& box, MutableBytes to, MutableBytes scratch) {
                               return q.fill(box, to, scratch);
                             };
                           }});
    out.tensors.push_back({s, [m, cache](TensorSource& stored, DType) -> ComputedSource::Fill {
                             const BlockQuantizer q(stored, m, cache);
                             return [q](const Box& box, MutableBytes to, MutableBytes scratch) {
                               return q.fill_scales(box, to, scratch);
                             };
                           }});
  }
  notes.warnings.push_back(count_of(std::ssize(quantized), "tensor") + " become float8 in blocks of 128 x 128, with " +
                           "their scales in tensors beside them (weight_scale_inv)");
  return out;
}

}  // namespace reshard
