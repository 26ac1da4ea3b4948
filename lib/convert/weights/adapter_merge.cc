// SPDX-License-Identifier: Apache-2.0
// Computes weights with an adapter added. See adapter.h.
#include <algorithm>
#include <utility>
#include <vector>

#include "lib/base/text.h"
#include "lib/convert/weights/adapter.h"
#include "lib/device/low_rank.h"

namespace reshard {
namespace {

std::vector<float> transposed(const std::vector<float>& matrix, Index rows) {
  const Index columns = std::ssize(matrix) / rows;
  std::vector<float> out(matrix.size());
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < columns; ++j) out[j * rows + i] = matrix[i * columns + j];
  return out;
}

// Returns the columns of an expert's matrix in a `b` of all experts, whose rows are `rank * experts` long.
std::vector<float> columns_of_expert(const std::vector<float>& b, const LowRank& m, Index expert) {
  if (m.experts == 1) return b;
  std::vector<float> out(b.size() / static_cast<std::size_t>(m.experts));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = b[i * static_cast<std::size_t>(m.experts) + static_cast<std::size_t>(expert)];
  return out;
}

// Adds the product of an expert's matrices to a box of its weight, [rows, columns], at `out`.
Status add_to_matrix(const LowRank& m, Index expert, const Box& box, DType dtype, TensorSource& operands,
                     std::byte* out, MutableBytes scratch) {
  const int rows = m.is_transposed ? 1 : 0,
            columns = 1 - rows;  // the weight's dimensions that are the product's rows and columns
  Dims origin = box.origin;
  origin[0] += m.first_row;
  const Box of_a = {{expert * m.rank, origin[columns]}, {m.rank, box.shape[columns]}};
  const Box of_b = {{origin[rows], 0}, {box.shape[rows], m.rank * m.experts}};
  const auto a = TRY(read_floats(operands, m.a, of_a, scratch));
  const auto b = columns_of_expert(TRY(read_floats(operands, m.b, of_b, scratch)), m, expert);
  const bool is_plain = !m.is_transposed;
  const auto left = is_plain ? b : transposed(a, m.rank), right = is_plain ? a : transposed(b, box.shape[rows]);
  add_low_rank(out, dtype, left.data(), right.data(), box.shape[0], box.shape[1], m.rank, m.scaling,
               m.is_rounded_to_weight);
  return {};
}

// Adds the product to a box of the weight, which is one matrix or has one for each expert.
Status add_product(const LowRank& m, const Box& box, DType dtype, TensorSource& operands, MutableBytes out,
                   MutableBytes scratch) {
  if (m.expert >= 0) return add_to_matrix(m, m.expert, box, dtype, operands, out.data(), scratch);
  const Box matrix = {Dims(box.origin.span().subspan(1)), Dims(box.shape.span().subspan(1))};
  for (Index e = 0; e < box.shape[0]; ++e)
    TRY(add_to_matrix(m, box.origin[0] + e, matrix, dtype, operands, out.data() + e * volume(matrix) * byte_size(dtype),
                      scratch));
  return {};
}

// Fails unless the adapter replaces a box of two tied weights by the same values, which are in `values`.
Status check_tied(const Replaced& r, DType dtype, TensorSource& operands, const Box& box, Bytes values,
                  MutableBytes scratch) {
  std::vector<std::byte> others(values.size());
  TRY(read_as(dtype, operands, *r.equal, box, others, scratch));
  if (std::equal(values.begin(), values.end(), others.begin())) return {};
  const Catalog& catalog = operands.catalog();
  return unsupported(catalog.where() + ": " + tensor_text(catalog.tensors()[r.by].name) + " and " +
                     tensor_text(catalog.tensors()[*r.equal].name) + " differ in " + to_string(box) +
                     ": embedding and head of the model are tied, so the merged model would not match its " +
                     "config.json; add --exclude to leave both out");
}

}  // namespace

void merge_adapter(const Adapter& adapter, TensorSource& stored, TensorSource& operands, ComputedSource& source) {
  for (const LowRank& m : adapter.added) {
    source.set(m.weight, [&stored, &operands, m](const Box& box, MutableBytes out, MutableBytes scratch) -> Status {
      const DType dtype = stored.catalog().tensors()[m.weight].dtype;
      TRY(m.onto ? read_as(dtype, operands, *m.onto, box, out, scratch) : stored.read(m.weight, box, out, scratch));
      return box.empty() ? Status() : add_product(m, box, dtype, operands, out, scratch);
    });
  }
  for (const Replaced& r : adapter.replaced) {
    const DType dtype = stored.catalog().tensors()[r.weight].dtype;
    source.set(r.weight, [&operands, r, dtype](const Box& box, MutableBytes out, MutableBytes scratch) -> Status {
      TRY(read_as(dtype, operands, r.by, box, out, scratch));
      return r.equal ? check_tied(r, dtype, operands, box, out, scratch) : Status();
    });
  }
  for (const TrainedRows& r : adapter.trained_rows) {
    source.set(r.weight, [&stored, &operands, r](const Box& box, MutableBytes out, MutableBytes scratch) -> Status {
      TRY(stored.read(r.weight, box, out, scratch));
      const DType dtype = stored.catalog().tensors()[r.weight].dtype;
      const Index row_bytes = box.shape[1] * byte_size(dtype);
      for (std::size_t i = 0; i < r.rows.size(); ++i) {
        const Index at = r.rows[i] - box.origin[0];
        if (at < 0 || at >= box.shape[0] || row_bytes == 0) continue;
        const Box row = {{static_cast<Index>(i), box.origin[1]}, {1, box.shape[1]}};
        const std::size_t begin = at * row_bytes;
        TRY(read_as(dtype, operands, r.by, row, out.subspan(begin, row_bytes), scratch));
      }
      return {};
    });
  }
}

}  // namespace reshard
