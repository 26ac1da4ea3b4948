// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "lib/base/text.h"
#include "lib/convert/weights/quantizations.h"
#include "lib/device/convert.h"
#include "lib/image/slab_cache.h"

namespace reshard {
namespace {

constexpr Index kKeptExperts = Index{32} << 20;  // bytes of experts as they are stored, of all matrices
constexpr std::array<float, 16> kValues = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                           -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};
constexpr int kBias = 127;

// A matrix in MXFP4: blocks [E, out, groups, 16], scales [E, out, groups].
struct PackedMatrix {
  std::string name;                    // the MXFP4 tensor's name
  std::size_t blocks = 0, scales = 0;  // in the view
  Index out = 0, groups = 0;
};

class Unpacker {
 public:
  Unpacker(TensorSource& stored, PackedMatrix m, DType as, std::shared_ptr<SlabCache> cache)
      : stored_(stored), m_(std::move(m)), as_(as), cache_(std::move(cache)) {
    constexpr int kScales = 256;
    std::vector<float> values;
    for (int scale = 0; scale < kScales; ++scale)
      for (const float value : kValues) values.push_back(std::ldexp(value, scale - kBias));
    table_.resize(values.size() * byte_size(as));
    convert(DType::kFloat32, as, reinterpret_cast<const std::byte*>(values.data()), table_.data(), std::ssize(values));
  }

  // Computes a box of the matrix, [E, in, out].
  Status fill(const Box& box, MutableBytes out, MutableBytes scratch) const {
    if (box.empty()) return {};
    std::byte* at = out.data();
    for (Index expert = box.begin(0); expert < box.end(0); ++expert) {
      const Slab slab =
          TRY(cache_->get({static_cast<std::uint32_t>(m_.blocks), expert}, [&] { return read(expert, scratch); }));
      if (byte_size(as_) == 2)
        unpack<std::uint16_t>(slab->bytes(), box, at);
      else
        unpack<std::uint32_t>(slab->bytes(), box, at);
      at += box.shape[1] * box.shape[2] * byte_size(as_);
    }
    return {};
  }

 private:
  // Reads the blocks of an expert, followed by its scales.
  Result<Slab> read(Index expert, MutableBytes scratch) const {
    const Index n = m_.out * m_.groups;
    auto slab = std::make_shared<SlabBytes>(n * (kMxfp4Bytes + 1));
    const std::size_t blocks = n * kMxfp4Bytes;
    TRY(stored_.read(m_.blocks, {{expert, 0, 0, 0}, {1, m_.out, m_.groups, kMxfp4Bytes}}, slab->bytes().first(blocks),
                     scratch));
    TRY(stored_.read(m_.scales, {{expert, 0, 0}, {1, m_.out, m_.groups}}, slab->bytes().subspan(blocks), scratch));
    return Slab(std::move(slab));
  }

  template <class Word>
  void unpack(Bytes expert, const Box& box, std::byte* out) const {
    const auto* const blocks = reinterpret_cast<const std::uint8_t*>(expert.data());
    const std::uint8_t* const scales = blocks + m_.out * m_.groups * kMxfp4Bytes;
    const Index begin = box.begin(1), end = box.end(1), columns = box.shape[2];
    for (Index group = begin / kMxfp4Group; group * kMxfp4Group < end; ++group) {
      const Index first = std::max(begin, group * kMxfp4Group), last = std::min(end, (group + 1) * kMxfp4Group);
      for (Index c = 0; c < columns; ++c) {
        const Index place = (box.begin(2) + c) * m_.groups + group;
        const std::byte* const values =
            table_.data() + Index{scales[place]} * std::ssize(kValues) * Index{sizeof(Word)};
        const std::uint8_t* const pairs = blocks + place * kMxfp4Bytes;
        std::byte* at = out + ((first - begin) * columns + c) * Index{sizeof(Word)};
        for (auto row = static_cast<unsigned>(first % kMxfp4Group), n = static_cast<unsigned>(last - first); n > 0;
             --n, ++row, at += columns * Index{sizeof(Word)}) {
          const unsigned value = pairs[row / 2] >> (row % 2 * 4) & 0xf;
          std::memcpy(at, values + value * sizeof(Word), sizeof(Word));
        }
      }
    }
  }

  TensorSource& stored_;
  const PackedMatrix m_;
  const DType as_;
  const std::shared_ptr<SlabCache> cache_;
  std::vector<std::byte> table_;  // the 16 values of each scale, in that dtype
};

// Packs a matrix, [E, in, out], into blocks and scales, the form that Unpacker reads.
class Packer {
 public:
  Packer(TensorSource& stored, std::size_t matrix, std::shared_ptr<SlabCache> cache)
      : stored_(stored), matrix_(matrix), tensor_(stored.catalog().tensors()[matrix]), cache_(std::move(cache)) {}

  // Computes a box of the blocks, [E, out, groups, 16].
  Status fill_blocks(const Box& box, MutableBytes out, MutableBytes scratch) const {
    return fill(box, kMxfp4Bytes, out, scratch);
  }
  // Computes a box of the scales, [E, out, groups].
  Status fill_scales(const Box& box, MutableBytes out, MutableBytes scratch) const {
    return fill(box, 1, out, scratch);
  }

 private:
  static constexpr float kLargest = 6;
  static constexpr unsigned kMantissa = 23;  // bits of float32

  Index columns() const { return tensor_.joined_shape()[2]; }
  Index groups() const { return tensor_.shape[1] / kMxfp4Group; }

  // Computes a box of the blocks or scales, which have `width` bytes for each group.
  Status fill(const Box& box, Index width, MutableBytes out, MutableBytes scratch) const {
    if (box.empty()) return {};
    const bool has_bytes = box.shape.rank() == 4;
    const Index first = has_bytes ? box.begin(3) : 0, count = has_bytes ? box.shape[3] : 1;
    std::byte* at = out.data();
    for (Index expert = box.begin(0); expert < box.end(0); ++expert) {
      const Slab slab =
          TRY(cache_->get({static_cast<std::uint32_t>(matrix_), expert}, [&] { return pack(expert, scratch); }));
      const std::byte* const packed = slab->bytes().data() + (has_bytes ? 0 : columns() * groups() * kMxfp4Bytes);
      for (Index o = box.begin(1); o < box.end(1); ++o)
        for (Index g = box.begin(2); g < box.end(2); ++g, at += count)
          std::memcpy(at, packed + (o * groups() + g) * width + first, count);
    }
    return {};
  }

  // Computes the blocks of an expert, followed by its scales.
  Result<Slab> pack(Index expert, MutableBytes scratch) const {
    const Index n = columns() * groups();
    const std::size_t width = columns();
    auto slab = std::make_shared<SlabBytes>(n * (kMxfp4Bytes + 1));
    auto* const blocks = reinterpret_cast<std::uint8_t*>(slab->bytes().data());
    std::uint8_t* const scales = blocks + n * kMxfp4Bytes;
    std::vector<std::byte> stored(kMxfp4Group * width * static_cast<std::size_t>(byte_size(tensor_.dtype)));
    std::vector<float> values(kMxfp4Group * width), inverse(width);
    std::vector<std::uint8_t> pairs(kMxfp4Bytes * width);  // by rows
    for (Index g = 0; g < groups(); ++g) {
      Box rows{{expert, g * kMxfp4Group}, {1, kMxfp4Group}};
      for (int d = 2; d < tensor_.shape.rank(); ++d) {
        rows.origin.push_back(0);
        rows.shape.push_back(tensor_.shape[d]);
      }
      TRY(stored_.read(matrix_, rows, stored, scratch));
      convert(tensor_.dtype, DType::kFloat32, stored.data(), reinterpret_cast<std::byte*>(values.data()),
              std::ssize(values));
      const std::vector<std::uint32_t> largest = TRY(largest_of(values, expert, g));
      for (std::size_t o = 0; o < width; ++o) {
        const std::uint32_t scale = scale_of(largest[o]);
        scales[static_cast<Index>(o) * groups() + g] = static_cast<std::uint8_t>(scale);
        inverse[o] = std::bit_cast<float>((2 * kBias - scale) << kMantissa);
      }
      for (std::size_t k = 0; k < kMxfp4Bytes; ++k)
        pack_pairs(values.data() + 2 * k * width, inverse.data(), pairs.data() + k * width, width);
      for (std::size_t o = 0; o < width; ++o) {
        std::uint8_t* const block = blocks + (static_cast<Index>(o) * groups() + g) * kMxfp4Bytes;
        for (std::size_t k = 0; k < kMxfp4Bytes; ++k) block[k] = pairs[k * width + o];
      }
    }
    return Slab(std::move(slab));
  }

  // Returns the largest magnitude in each column of a group, as bits, which are ordered like the magnitudes. Fails if
  // one is infinite or a NaN.
  Result<std::vector<std::uint32_t>> largest_of(const std::vector<float>& values, Index expert, Index group) const {
    constexpr std::uint32_t kInfinite = 0x7f800000;
    const std::size_t width = columns();
    std::vector<std::uint32_t> out(width);
    for (std::size_t i = 0; i < kMxfp4Group; ++i)
      for (std::size_t o = 0; o < width; ++o)
        out[o] = std::max(out[o], std::bit_cast<std::uint32_t>(values[i * width + o]) & 0x7fffffffU);
    for (std::size_t o = 0; o < width; ++o)
      if (out[o] >= kInfinite)
        return corrupt(stored_.catalog().where() + ": " + tensor_text(tensor_.name) + ": expert " +
                       with_commas(expert) + " contains infinities or NaNs in rows " +
                       with_commas(group * kMxfp4Group) + " to " + with_commas((group + 1) * kMxfp4Group - 1) +
                       " of column " + with_commas(o) + " and cannot be quantized");
    return out;
  }

  // Returns the biased exponent of the smallest power of two that brings this magnitude to at most 6.
  static std::uint32_t scale_of(std::uint32_t largest) {
    constexpr std::uint32_t kHalfOfLeast = 0x00400000, kBelowNext = 0x007fffff;
    const auto bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(largest) / kLargest);
    return bits <= kHalfOfLeast ? 0 : (bits + kBelowNext) >> kMantissa;
  }

  // Multiplies two rows by the columns' scales and packs the codes of the nearest of the 16 values, the first row in
  // the lower half.
  static void pack_pairs(const float* rows, const float* scales, std::uint8_t* out, std::size_t width) {
    for (std::size_t o = 0; o < width; ++o)
      out[o] = static_cast<std::uint8_t>(nearest(rows[o] * scales[o]) | nearest(rows[width + o] * scales[o]) << 4);
  }

  static std::uint32_t nearest(float value) {
    const float m = std::abs(value);
    const std::uint32_t magnitude = std::uint32_t{m >= 0.25F} + std::uint32_t{m >= 0.75F} + std::uint32_t{m >= 1.25F} +
                                    std::uint32_t{m >= 1.75F} + std::uint32_t{m >= 2.5F} + std::uint32_t{m >= 3.5F} +
                                    std::uint32_t{m >= 5.0F};
    return magnitude | std::bit_cast<std::uint32_t>(value) >> 31 << 3;
  }

  TensorSource& stored_;
  const std::size_t matrix_;
  const Tensor& tensor_;
  const std::shared_ptr<SlabCache> cache_;
};

Result<PackedMatrix> match(const Catalog& catalog, std::size_t blocks) {
  const Tensor& b = catalog.tensors()[blocks];
  PackedMatrix out;
  out.name = b.name.substr(0, b.name.size() - kMxfp4Blocks.size());
  const auto scales = catalog.find(out.name + std::string(kMxfp4Scales));
  if (!scales)
    return corrupt(catalog.where() + ": " + tensor_text(b.name) + " is in MXFP4, and its scales are missing");
  const Tensor& s = catalog.tensors()[*scales];
  if (b.dtype != DType::kUint8 || b.shape.rank() != 4 || b.shape[3] != kMxfp4Bytes)
    return corrupt(catalog.where() + ": " + tensor_text(b.name) + " " + to_string(b.shape) + " of " +
                   std::string(info(b.dtype).torch_name) + ": expected uint8 in blocks of 16");
  const Dims expected = {b.shape[0], b.shape[1], b.shape[2]};
  if (s.shape != expected || s.dtype != DType::kUint8)
    return corrupt(catalog.where() + ": " + tensor_text(s.name) + " " + to_string(s.shape) + " of " +
                   std::string(info(s.dtype).torch_name) + ": expected " + to_string(expected) +
                   " of uint8, one for each " + "block of " + to_string(b.shape));
  out.blocks = blocks;
  out.scales = *scales;
  out.out = b.shape[1];
  out.groups = b.shape[2];
  return out;
}

Result<std::vector<PackedMatrix>> find_packed(const SourceView& view, const Family& family,
                                              const DtypeOptions& typing) {
  const Catalog& catalog = view.catalog;
  std::vector<PackedMatrix> out;
  std::string kept;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    const Tensor& t = catalog.tensors()[i];
    const auto parsed = parse_name(family, t.name);
    if (!parsed || !parsed->is_of_quantized() || parsed->rule->quantized != Quantized::kMxfp4) continue;
    if (typing.keeps(view.native(t.name), t.name)) {
      kept = t.name;
    } else if (parsed->suffix == kMxfp4Blocks) {
      out.push_back(TRY(match(catalog, i)));
    } else if (!catalog.find(t.name.substr(0, t.name.size() - kMxfp4Scales.size()) + std::string(kMxfp4Blocks))) {
      return corrupt(catalog.where() + ": " + tensor_text(t.name) + " contains scales of values that are missing");
    }
  }
  if (!kept.empty() && !out.empty())
    return usage_error("--keep-dtype: " + tensor_text(kept) +
                       " would stay in MXFP4 while other matrices do not, which config.json cannot express");
  return out;
}

}  // namespace

Result<Requantization> unpack_mxfp4(SourceView& view, const Model& model, const DtypeOptions& typing,
                                    ConversionNotes& notes) {
  Requantization out;
  if (!typing.dtype || byte_size(*typing.dtype) == 1 || !model.family) return out;
  std::vector<PackedMatrix> packed = TRY(find_packed(view, *model.family, typing));
  if (packed.empty()) return out;
  OmittedState applied{"scales, applied to their 4-bit values", 0, 0, 0};
  for (const PackedMatrix& m : packed) {
    const Tensor& blocks = view.catalog.tensors()[m.blocks];
    Tensor made =
        computed_tensor(m.name, *typing.dtype, {blocks.shape[0], m.groups * kMxfp4Group, m.out}, blocks.fragments);
    ++applied.tensors;
    applied.bytes += view.catalog.tensors()[m.scales].bytes();
    out.worker_bytes = std::max(out.worker_bytes, m.out * m.groups * (kMxfp4Bytes + 1));
    TRY(view.catalog.add(std::move(made)));
  }
  view.catalog.sort_by_name();
  out.stored = std::make_unique<Catalog>(view.catalog);
  const auto cache = std::make_shared<SlabCache>(kKeptExperts);
  for (PackedMatrix& m : packed) {
    m.blocks = *view.catalog.find(m.name + std::string(kMxfp4Blocks));
    m.scales = *view.catalog.find(m.name + std::string(kMxfp4Scales));
    view.applied.insert({m.blocks, m.scales});
    const std::size_t made = *view.catalog.find(m.name);
    view.computed.insert(made);
    out.tensors.push_back({made, [m, cache](TensorSource& stored, DType as) -> ComputedSource::Fill {
                             const auto unpacker = std::make_shared<Unpacker>(stored, m, as, cache);
                             return [unpacker](const Box& box, MutableBytes to, MutableBytes scratch) {
                               return unpacker->fill(box, to, scratch);
                             };
                           }});
  }
  notes.left_out.push_back(std::move(applied));
  return out;
}

Result<Requantization> pack_mxfp4(SourceView& view, const Model& model, const DtypeOptions& typing,
                                  ConversionNotes& notes) {
  Requantization out;
  std::vector<std::string> names;
  for (const Tensor& t : view.catalog.tensors()) {
    const auto parsed = parse_name(*model.family, t.name);
    const Dims shape = t.joined_shape();
    if (!parsed || parsed->is_of_quantized() || parsed->rule->quantized != Quantized::kMxfp4 || shape.rank() != 3 ||
        t.elements() == 0)
      continue;
    if (typing.keeps(view.native(t.name), t.name))
      return usage_error("--keep-dtype: " + tensor_text(t.name) +
                         " would keep its dtype while other matrices become MXFP4, which config.json cannot express");
    TRY(check_floats(view, t));
    if (shape[1] % kMxfp4Group != 0)
      return unsupported(view.catalog.where() + ": " + tensor_text(view.native(t.name)) + " " + to_string(shape) +
                         ": expected a multiple of 32 inputs, because 32 inputs share a scale");
    out.worker_bytes =
        std::max(out.worker_bytes, shape[2] * (shape[1] / kMxfp4Group * (kMxfp4Bytes + 1) +
                                               kMxfp4Group * (byte_size(t.dtype) + Index{sizeof(float)}) + kMxfp4Bytes +
                                               2 * Index{sizeof(float)}));
    names.push_back(t.name);
  }
  for (const std::string& name : names) {
    const Tensor matrix = view.catalog.tensors()[*view.catalog.find(name)];
    const Dims shape = matrix.joined_shape();
    const Index experts = shape[0], columns = shape[2], groups = shape[1] / kMxfp4Group;
    TRY(view.catalog.add(computed_tensor(name + std::string(kMxfp4Blocks), DType::kUint8,
                                         {experts, columns, groups, kMxfp4Bytes}, matrix.fragments)));
    TRY(view.catalog.add(computed_tensor(name + std::string(kMxfp4Scales), DType::kUint8, {experts, columns, groups},
                                         matrix.fragments)));
  }
  view.catalog.sort_by_name();
  out.stored = std::make_unique<Catalog>(view.catalog);
  Json left = Json::array();  // as the published models' configs have it
  for (const char* module : {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"})
    left.push_back(module);
  out.config = Json::object().set("modules_to_not_convert", std::move(left)).set("quant_method", "mxfp4");
  const auto cache = std::make_shared<SlabCache>(kKeptExperts);
  for (const std::string& name : names) {
    const std::size_t matrix = *view.catalog.find(name);
    view.applied.insert(matrix);
    for (const bool is_scales : {false, true}) {
      const std::size_t made = *view.catalog.find(name + std::string(is_scales ? kMxfp4Scales : kMxfp4Blocks));
      view.computed.insert(made);
      out.tensors.push_back({made, [=](TensorSource& stored, DType) -> ComputedSource::Fill {
                               const Packer p(stored, matrix, cache);
                               return [=](const Box& box, MutableBytes to, MutableBytes scratch) {
                                 return is_scales ? p.fill_scales(box, to, scratch) : p.fill_blocks(box, to, scratch);
                               };
                             }});
    }
  }
  notes.warnings.push_back(count_of(std::ssize(names), "tensor") +
                           " become MXFP4: 4-bit floats, with a power-of-two scale per 32 of them (_blocks, _scales)");
  return out;
}

}  // namespace reshard
