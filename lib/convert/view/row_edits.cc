// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/view/row_edits.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/device/convert.h"
#include "lib/source/tensor_source.h"

namespace reshard {
namespace {

constexpr Index kLook = Index{4} << 20;  // bytes read at once
constexpr std::string_view kMadeUp = "(padding rows)";

// Appends a file to a catalog and returns its number; the pool knows it under its own name.
std::uint32_t append_file(Catalog& catalog, FilePool& files, std::string name, Index size, File file) {
  const auto number = static_cast<std::uint32_t>(catalog.files.size());
  catalog.files.push_back({std::move(name), size});
  files.pin(catalog.file_path(number), std::move(file));
  return number;
}

// Reads rows of one tensor in pieces and calls visit(first row, elements) until it returns false.
using VisitRows = std::function<bool(Index row, Bytes elements)>;
Status read_rows(const Catalog& view, FilePool& files, std::size_t tensor, Index begin, Index end,
                 const VisitRows& visit) {
  const Tensor& t = view.tensors()[tensor];
  FileSource source(view, files);
  const Index row_bytes = t.bytes() / std::max<Index>(1, t.shape[0]);
  const Index step = std::max<Index>(1, kLook / std::max<Index>(1, row_bytes));
  std::vector<std::byte> out(std::min(step, end - begin) * row_bytes);
  std::vector<std::byte> scratch(out.size() + std::size_t{kLook});
  for (Index row = begin; row < end; row += step) {
    Box box = whole(t.shape);
    box.origin[0] = row;
    box.shape[0] = std::min(step, end - row);
    const MutableBytes part(out.data(), volume(box) * byte_size(t.dtype));
    TRY(source.read(tensor, box, part, scratch));
    if (!visit(row, Bytes(part))) return {};
  }
  return {};
}

// Returns the mean of the rows, in the tensor's dtype.
Result<std::vector<std::byte>> mean_row(const Catalog& view, FilePool& files, std::size_t tensor) {
  const Tensor& t = view.tensors()[tensor];
  if (!can_convert(t.dtype, DType::kFloat64))
    return unsupported(tensor_text(t.name) + ": the mean of " + std::string(info(t.dtype).torch_name) +
                       " rows is undefined; choose --vocab-padding zero or repeat-last");
  const Index eb = byte_size(t.dtype), width = t.elements() / std::max<Index>(1, t.shape[0]);
  std::vector<double> sum(width), row(sum.size());
  TRY(read_rows(view, files, tensor, 0, t.shape[0], [&](Index, Bytes bytes) {
    for (std::size_t at = 0; at < bytes.size(); at += static_cast<std::size_t>(width * eb)) {
      convert(t.dtype, DType::kFloat64, bytes.data() + at, reinterpret_cast<std::byte*>(row.data()), width);
      for (std::size_t i = 0; i < row.size(); ++i) sum[i] += row[i];
    }
    return true;
  }));
  for (double& v : sum) v /= static_cast<double>(t.shape[0]);
  std::vector<std::byte> out(width * eb);
  convert(DType::kFloat64, t.dtype, reinterpret_cast<const std::byte*>(sum.data()), out.data(), width);
  return out;
}

// Returns fragments that repeat one row-major row.
Fragment repeated_row(const Tensor& t, Index begin, Index end, std::uint32_t file, Index bytes) {
  Fragment f;
  f.box = whole(t.shape);
  f.box.origin[0] = begin;
  f.box.shape[0] = end - begin;
  f.strides = row_major_strides(t.shape);
  f.strides[0] = 0;
  f.extent = {file, 0, bytes};
  return f;
}

constexpr std::array<std::pair<PaddingFill, std::string_view>, 3> kPaddings = {
    {{PaddingFill::kZero, "zero"}, {PaddingFill::kRepeatLast, "repeat-last"}, {PaddingFill::kMean, "mean"}}};

}  // namespace

FragmentList take_rows(const FragmentList& in, int rank, Index begin, Index end, Index shift, Index element_bytes) {
  FragmentList out(rank);
  for (std::size_t i = 0; i < in.size(); ++i) {
    Fragment f = in.get(i);
    const Index first = std::max(begin, f.box.begin(0)), last = std::min(end, f.box.end(0));
    if (first >= last || f.box.empty()) continue;
    f.start += (first - f.box.begin(0)) * f.strides[0] * element_bytes;
    f.box.origin[0] = first + shift;
    f.box.shape[0] = last - first;
    out.add(f);
  }
  return out;
}

void append(FragmentList& to, const FragmentList& from) {
  for (std::size_t i = 0; i < from.size(); ++i) to.add(from.get(i));
}

void cut_rows(Tensor& tensor, Index rows) {
  const Index eb = byte_size(tensor.dtype);
  const int rank = tensor.shape.rank();
  tensor.fragments = take_rows(tensor.fragments, rank, 0, rows, 0, eb);
  tensor.replicas = take_rows(tensor.replicas, rank, 0, rows, 0, eb);
  tensor.shape[0] = rows;
}

void merge_blocks(Tensor& t, Index block, Index times) {
  const Index eb = byte_size(t.dtype), blocks = t.shape[0] / (block * times);
  const int rank = t.shape.rank();
  FragmentList kept(rank), replicas(rank);
  for (Index b = 0; b < blocks; ++b)
    for (Index k = 0; k < times; ++k) {
      const Index begin = (b * times + k) * block;
      append(k == 0 ? kept : replicas, take_rows(t.fragments, rank, begin, begin + block, b * block - begin, eb));
    }
  t.fragments = kept;
  t.replicas = replicas;
  t.shape[0] /= times;
  t.row_group = std::max(t.row_group, block);
}

void repeat_blocks(Tensor& tensor, Index block, Index times) {
  const Index eb = byte_size(tensor.dtype), blocks = tensor.shape[0] / block;
  const int rank = tensor.shape.rank();
  FragmentList out(rank);
  for (Index b = 0; b < blocks; ++b)
    for (Index k = 0; k < times; ++k)
      append(out, take_rows(tensor.fragments, rank, b * block, (b + 1) * block, (b * (times - 1) + k) * block, eb));
  tensor.fragments = out;
  tensor.replicas = FragmentList(rank);
  tensor.shape[0] *= times;
  tensor.row_group = std::max(tensor.row_group, block);
}

Result<bool> are_zero(const Catalog& view, FilePool& files, std::size_t tensor, Index begin, Index end) {
  const DType dtype = view.tensors()[tensor].dtype;
  const std::size_t width = byte_size(dtype);
  bool zero = true;
  TRY(read_rows(view, files, tensor, begin, end, [&](Index, Bytes bytes) {
    for (std::size_t i = 0; i < bytes.size() && zero; ++i) {
      const bool has_sign = is_floating(dtype) && i % width == width - 1;
      zero = (bytes[i] & std::byte(has_sign ? 0x7f : 0xff)) == std::byte(0);
    }
    return zero;
  }));
  return zero;
}

Result<Index> differing_rows(const Catalog& a, FilePool& a_files, std::size_t a_tensor, const Catalog& b,
                             FilePool& b_files, std::size_t b_tensor, Index rows) {
  const Tensor& t = a.tensors()[a_tensor];
  const std::size_t row_bytes = t.bytes() / std::max<Index>(1, t.shape[0]);
  Index different = 0;
  Status failed;
  TRY(read_rows(a, a_files, a_tensor, 0, rows, [&](Index row, Bytes mine) {
    const Index count = mine.size() / std::max<std::size_t>(1, row_bytes);
    failed = read_rows(b, b_files, b_tensor, row, row + count, [&](Index at, Bytes theirs) {
      const std::byte* from = mine.data() + static_cast<std::size_t>(at - row) * row_bytes;
      for (std::size_t i = 0; i < theirs.size(); i += row_bytes)
        different += std::memcmp(from + i, theirs.data() + i, row_bytes) != 0;
      return true;
    });
    return failed.has_value();
  }));
  TRY(std::move(failed));
  return different;
}

std::string_view padding_fill_name(PaddingFill fill) {
  for (const auto& [value, text] : kPaddings)
    if (value == fill) return text;
  return "";
}

Status pad_rows(Catalog& view, std::size_t tensor, Index rows, PaddingFill fill, FilePool& files,
                const std::string& spool, bool look) {
  Tensor& t = view.tensor(tensor);
  const Index have = t.shape[0], eb = byte_size(t.dtype);
  if (rows == have) return {};
  const StateKey key = split_state_key(t.key());
  if (key.kind != StateKind::kModel && key.suffix != kMasterSuffix) fill = PaddingFill::kZero;
  FragmentList more(t.shape.rank());
  if (fill == PaddingFill::kRepeatLast && have > 0) {
    const FragmentList last = take_rows(t.fragments, t.shape.rank(), have - 1, have, 1, eb);
    for (std::size_t i = 0; i < last.size(); ++i) {
      Fragment f = last.get(i);
      f.box.shape[0] = rows - have;
      f.strides[0] = 0;
      f.crc.reset();  // its bytes are verified when the row itself is read
      more.add(f);
    }
  } else {
    const Index row_bytes = t.bytes() / std::max<Index>(1, have);
    std::vector<std::byte> row(row_bytes);
    if (fill == PaddingFill::kMean && look) row = TRY(mean_row(view, files, tensor));
    File file = TRY(File::create_anonymous(spool));
    TRY(file.write_at(0, row));
    const std::string name = std::string(kMadeUp) + " " + t.name;
    more.add(repeated_row(t, have, rows, append_file(view, files, name, row_bytes, std::move(file)), row_bytes));
  }
  append(t.fragments, more);
  t.shape[0] = rows;
  return {};
}

}  // namespace reshard
