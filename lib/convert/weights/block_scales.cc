// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <string_view>

#include "lib/base/text.h"
#include "lib/convert/weights/quantizations.h"
#include "lib/device/convert.h"

namespace reshard {
namespace {

struct ScaledMatrix {
  std::size_t matrix = 0, scales = 0;  // in the view
  Index block_rows = 0, block_columns = 0;
  DType product = DType::kFloat32;  // the dtype to which it is rounded first
};

Status fill(TensorSource& stored, const ScaledMatrix& m, DType as, const Box& box, MutableBytes out,
            MutableBytes scratch) {
  if (box.empty()) return {};
  const Index rows = box.shape[0], columns = box.shape[1];
  const Index first_row = box.begin(0) / m.block_rows, first_column = box.begin(1) / m.block_columns;
  const Box blocks{
      {first_row, first_column},
      {ceil_div(box.end(0), m.block_rows) - first_row, ceil_div(box.end(1), m.block_columns) - first_column}};
  const Dims& shape = stored.catalog().tensors()[m.scales].shape;
  const std::vector<float> scales =
      TRY(read_floats(stored, m.scales, shape.rank() == 2 ? blocks : whole(shape), scratch));
  const DType dtype = stored.catalog().tensors()[m.matrix].dtype;
  std::vector<std::byte> elements(volume(box) * byte_size(dtype));
  TRY(stored.read(m.matrix, box, elements, scratch));
  std::vector<float> row(columns);
  const bool is_rounded = m.product != DType::kFloat32 && m.product != as;
  std::vector<std::byte> rounded(is_rounded ? columns * byte_size(m.product) : 0);
  auto* const bytes = reinterpret_cast<std::byte*>(row.data());
  for (Index r = 0; r < rows; ++r) {
    convert(dtype, DType::kFloat32, elements.data() + r * columns * byte_size(dtype), bytes, columns);
    const float* const scale = scales.data() + ((box.begin(0) + r) / m.block_rows - first_row) * blocks.shape[1];
    float* at = row.data();
    for (Index c = 0; c < columns;) {
      const Index block = (box.begin(1) + c) / m.block_columns;
      c = std::min(columns, (block + 1) * m.block_columns - box.begin(1));
      const float s = scale[block - first_column];
      for (float* const end = row.data() + c; at != end; ++at) *at *= s;
    }
    if (is_rounded) {
      convert(DType::kFloat32, m.product, bytes, rounded.data(), columns);
      convert(m.product, DType::kFloat32, rounded.data(), bytes, columns);
    }
    convert(DType::kFloat32, as, bytes, out.data() + r * columns * byte_size(as), columns);
  }
  return {};
}

}  // namespace

Result<Requantization> apply_block_scales(SourceView& view, const std::optional<Float8Scales>& float8,
                                          const DtypeOptions& typing, ConversionNotes& notes) {
  Requantization out;
  std::vector<ScaledMatrix> matrices;
  if (!typing.dtype || byte_size(*typing.dtype) == 1 || !float8) return out;
  const Catalog& catalog = view.catalog;
  OmittedState applied{"scales, applied to their float8 matrices", 0, 0, 0};
  const auto leave_out = [&](std::size_t i) {
    view.applied.insert(i);
    ++applied.tensors;
    applied.bytes += catalog.tensors()[i].bytes();
  };
  std::string kept;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    const Tensor& t = catalog.tensors()[i];
    if (byte_size(t.dtype) != 1 || t.shape.rank() != 2 || !can_convert(t.dtype, *typing.dtype)) continue;
    if (state_kind(t.key()) != StateKind::kModel) continue;
    if (typing.keeps(view.native(t.name), t.name)) {
      kept = t.name;
      continue;
    }
    const auto scales = catalog.find(t.name + std::string(float8->suffix));
    if (!scales)
      return corrupt(catalog.where() + ": " + tensor_text(t.name) + " is float8, and its scales are missing");
    const Tensor& s = catalog.tensors()[*scales];
    const Dims expected = float8->shape(t.shape);
    const Index rows = float8->block_rows > 0 ? float8->block_rows : t.shape[0];
    const Index columns = float8->block_columns > 0 ? float8->block_columns : t.shape[1];
    if (!is_shape_of_scales(s.shape, expected) || !(is_floating(s.dtype) || s.dtype == DType::kFloat8E8M0))
      return corrupt(catalog.where() + ": " + tensor_text(s.name) + " " + to_string(s.shape) + " of " +
                     std::string(info(s.dtype).torch_name) + ": expected " + to_string(expected) + ", one for each " +
                     std::to_string(rows) + " x " + std::to_string(columns) + " of " + to_string(t.shape));
    matrices.push_back({i, *scales, rows, columns, float8->is_product_rounded ? s.dtype : DType::kFloat32});
    leave_out(*scales);
  }
  if (matrices.empty()) return out;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i)
    if (const Tensor& t = catalog.tensors()[i]; is_activation_scale(t.name) && t.elements() == 1) leave_out(i);
  if (!kept.empty())
    return usage_error("--keep-dtype: " + tensor_text(kept) +
                       " would stay float8 while other matrices do not, which config.json cannot express");
  out.stored = std::make_unique<Catalog>(catalog);
  for (const ScaledMatrix& m : matrices) {
    view.catalog.tensor(m.matrix).dtype = *typing.dtype;
    view.computed.insert(m.matrix);
    out.tensors.push_back({m.matrix, [m](TensorSource& stored, DType as) -> ComputedSource::Fill {
                             return [&stored, m, as](const Box& box, MutableBytes to, MutableBytes scratch) {
                               return fill(stored, m, as, box, to, scratch);
                             };
                           }});
  }
  notes.left_out.push_back(std::move(applied));
  return out;
}

}  // namespace reshard
