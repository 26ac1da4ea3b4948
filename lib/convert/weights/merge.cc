// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/merge.h"

#include <algorithm>
#include <utility>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/base/xor_bytes.h"
#include "lib/convert/weights/published_delta.h"
#include "lib/device/convert.h"
#include "lib/engine/run.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr Index kMostElements = Index{1} << 17;  // elements of each source that are computed at once

bool is_merged(const Expression& expression, const Tensor& tensor) {
  return expression.is_xor() || can_convert(tensor.dtype, DType::kFloat32);
}

Error differs(const MergeSource& a, const MergeSource& b, const std::vector<std::string>& names) {
  return unsupported(b.path + ": not the same model as " + a.path + ": lacks " + names_text(names, "tensor"));
}

std::vector<std::string> missing_in(const Catalog& there, const Catalog& here) {
  std::vector<std::string> out;
  for (const Tensor& t : there.tensors())
    if (!here.find(t.name)) out.push_back(t.name);
  return out;
}

// Finds each tensor of the first source in source `s`, whose view is `view`, and adds its number.
Status match_source(std::size_t s, const Catalog& view, Merge& out) {
  const std::vector<MergeSource>& sources = out.options.sources;
  if (const auto missing = missing_in(out.stored, view); !missing.empty())
    return differs(sources[0], sources[s], missing);
  if (const auto missing = missing_in(view, out.stored); !missing.empty())
    return differs(sources[s], sources[0], missing);
  for (std::size_t i = 0; i < out.stored.tensors().size(); ++i) {
    const Tensor& tensor = out.stored.tensors()[i];
    const std::size_t number = *view.find(tensor.name);
    const Tensor& its = view.tensors()[number];
    const bool converts = !out.expression.is_xor() && is_merged(out.expression, tensor) &&
                          is_merged(out.expression, its);  // to the precision of the arithmetic
    if (its.shape != tensor.shape || (its.dtype != tensor.dtype && !converts))
      return unsupported(sources[s].path + ": not the same model as " + sources[0].path + ": " +
                         tensor_text(tensor.name) + " is " + std::string(info(its.dtype).torch_name) + " " +
                         to_string(its.shape) + " here, " + std::string(info(tensor.dtype).torch_name) + " " +
                         to_string(tensor.shape) + " there");
    out.numbers[i].push_back(number);
  }
  return {};
}

// Divides `box` into boxes of at most kMostElements elements and calls visit() with each, in row-major order.
template <class Visit>
Status for_small_boxes(const Box& box, const Visit& visit) {
  if (volume(box) <= kMostElements) return visit(box);
  int d = 0;
  while (box.shape[d] == 1) ++d;
  const Index rows = std::max<Index>(1, kMostElements / (volume(box) / box.shape[d]));
  for (Index begin = 0; begin < box.shape[d]; begin += rows) {
    Box small = box;
    small.origin[d] += begin;
    small.shape[d] = std::min(rows, box.shape[d] - begin);
    TRY(for_small_boxes(small, visit));
  }
  return {};
}

// One tensor of the merge.
class MergedTensor {
 public:
  MergedTensor(const Merge& merge, const std::vector<TensorSource*>& sources, MergeDigests& digests, std::size_t tensor,
               DType dtype)
      : merge_(merge), sources_(sources), digests_(digests), tensor_(tensor), dtype_(dtype) {}

  Status fill(const Box& box, MutableBytes out, MutableBytes scratch) const {
    if (merge_.expression.is_xor()) return exclusive_or(box, out.data(), scratch);
    std::byte* at = out.data();
    return for_small_boxes(box, [&](const Box& small) -> Status {
      if (small.empty()) return {};
      TRY(merge_.options.in_double ? reckon<double>(DType::kFloat64, small, at, scratch)
                                   : reckon<float>(DType::kFloat32, small, at, scratch));
      at += volume(small) * byte_size(dtype_);
      return {};
    });
  }

 private:
  // Computes in `out` if the result is stored as it is computed, and otherwise in a buffer. The buffers are made once
  // for all small boxes.
  Status exclusive_or(const Box& whole, std::byte* out, MutableBytes scratch) const {
    const DType stored = merge_.stored.tensors()[tensor_].dtype;
    const std::size_t most = std::min(volume(whole), kMostElements) * byte_size(stored);
    std::vector<std::byte> next(most), sum(dtype_ == stored ? 0 : most);
    return for_small_boxes(whole, [&](const Box& box) -> Status {
      if (box.empty()) return {};
      const std::size_t bytes = volume(box) * byte_size(stored);
      const MutableBytes made(sum.empty() ? out : sum.data(), bytes), other(next.data(), bytes);
      TRY(read_stored(0, box, made, scratch));
      for (std::size_t s = 1; s < sources_.size(); ++s) {
        TRY(read_stored(s, box, other, scratch));
        xor_into(made, other);
      }
      if (!sum.empty()) convert(stored, dtype_, sum.data(), out, volume(box));
      out += volume(box) * byte_size(dtype_);
      return {};
    });
  }

  template <class Float>
  Status reckon(DType precision, const Box& box, std::byte* out, MutableBytes scratch) const {
    const Index n = volume(box);
    std::vector<std::vector<Float>> values(sources_.size());
    std::vector<const Float*> inputs;
    for (std::size_t s = 0; s < sources_.size(); ++s) {
      values[s].resize(n);
      TRY(read(s, box, precision, reinterpret_cast<std::byte*>(values[s].data()), scratch));
      inputs.push_back(values[s].data());
    }
    std::vector<Float> result(n);
    merge_.expression.evaluate(std::span(std::as_const(inputs)), n, result.data());
    convert(precision, dtype_, reinterpret_cast<const std::byte*>(result.data()), out, n);
    return {};
  }

  Status read(std::size_t s, const Box& box, DType precision, std::byte* out, MutableBytes scratch) const {
    const std::size_t number = merge_.numbers[tensor_][s];
    const Tensor& tensor = sources_[s]->catalog().tensors()[number];
    std::vector<std::byte> stored(volume(box) * byte_size(tensor.dtype));
    TRY(read_stored(s, box, stored, scratch));
    convert(tensor.dtype, precision, stored.data(), out, volume(box));
    return {};
  }

  // Fills `out` with the elements of `box` in the dtype of source `s`, and adds their digest to that of the source.
  Status read_stored(std::size_t s, const Box& box, MutableBytes out, MutableBytes scratch) const {
    const std::size_t number = merge_.numbers[tensor_][s];
    const Tensor& tensor = sources_[s]->catalog().tensors()[number];
    TRY(sources_[s]->read(number, box, out, scratch));
    digests_.add(tensor_, s, digest_box(tensor.shape, box, byte_size(tensor.dtype), out.data()));
    return {};
  }

  const Merge& merge_;
  const std::vector<TensorSource*>& sources_;
  MergeDigests& digests_;
  const std::size_t tensor_;
  const DType dtype_;  // it is written in
};

}  // namespace

Result<std::vector<OpenCheckpoint>> open_others(MergeOptions& merge, Reader& first, const Opener& open,
                                                const OpenOptions& how) {
  std::vector<OpenCheckpoint> out;
  std::vector<Reader*> before;
  for (MergeSource& source : merge.sources) {
    source.reader = &first;
    if (&source != &merge.sources.front()) {
      out.push_back(TRY(open(source.path, how)));
      if (merge.applies_deltas && PublishedDelta::is_one(out.back().reader->catalog()))
        out.back().reader = TRY(PublishedDelta::open(std::move(out.back().reader), before));
      source.reader = out.back().reader.get();
    }
    before.push_back(source.reader);
  }
  return out;
}

Result<Merge> match_sources(const MergeOptions& options, const std::vector<const Catalog*>& views) {
  Merge out;
  out.options = options;
  const std::vector<MergeSource>& sources = out.options.sources;
  std::vector<std::string> names;
  for (const MergeSource& source : sources) names.push_back(source.name);
  out.expression = TRY(Expression::parse(options.expression, names));
  if (const std::string& from = options.others_from; !from.empty()) {
    const auto found = std::find(names.begin(), names.end(), from);
    if (found == names.end()) return usage_error("--others-from: unknown source '" + printable(from) + "'");
    out.others_from = static_cast<std::size_t>(found - names.begin());
  }
  out.stored = *views.front();
  for (std::size_t i = 0; i < out.stored.tensors().size(); ++i) out.numbers.push_back({i});
  for (std::size_t s = 1; s < sources.size(); ++s) TRY(match_source(s, *views[s], out));
  return out;
}

void write_as(const Merge& merge, const Catalog& target_view, Catalog& view) {
  for (const Tensor& written : target_view.tensors())
    if (const auto i = view.find(written.name); i && is_merged(merge.expression, merge.stored.tensors()[*i]))
      view.tensor(*i).dtype = written.dtype;
}

Status check_not_merged(const Merge& merge, const std::vector<TensorSource*>& sources, RunOptions run) {
  if (merge.others_from) return {};
  run.progress = nullptr;
  std::vector<Digest> expected;
  for (std::size_t s = 0; s < sources.size(); ++s) {
    std::vector<DigestRequest> requests;
    for (std::size_t i = 0; i < merge.numbers.size(); ++i)
      if (const Tensor& t = merge.stored.tensors()[i]; !is_merged(merge.expression, t))
        requests.push_back({merge.numbers[i][s], t.dtype});
    if (requests.empty()) return {};
    const auto proofs = TRY(digest_tensors(requests, *sources[s], run));
    for (std::size_t k = 0; k < proofs.size(); ++k) {
      if (s == 0) expected.push_back(proofs[k].source);
      if (proofs[k].source == expected[k]) continue;
      const std::vector<MergeSource>& named = merge.options.sources;
      return unsupported(
          named[s].path + ": " + tensor_text(sources[s]->catalog().tensors()[requests[k].tensor].name) +
          " differs from that in " + named[0].path +
          " and is not floating-point, so it cannot be merged; add --others-from NAME to take such tensors " +
          "from one source");
    }
  }
  return {};
}

MergeDigests::MergeDigests(const Merge& merge)
    : digests_(merge.numbers.size(), std::vector<Digest>(merge.options.sources.size())) {}

void MergeDigests::add(std::size_t tensor, std::size_t source, const Digest& digest) {
  const std::lock_guard lock(mutex_);
  digests_[tensor][source] += digest;
}

Status MergeDigests::add_up(Transport* ranks) {
  for (std::vector<Digest>& of_tensor : digests_)
    TRY(combine_values(ranks, std::span(of_tensor), [](Digest& mine, const Digest& theirs) { mine += theirs; }));
  return {};
}

void set_merged(const Merge& merge, const std::vector<TensorSource*>& sources, MergeDigests& digests,
                ComputedSource& merged) {
  for (std::size_t i = 0; i < merge.numbers.size(); ++i) {
    const Tensor& tensor = merge.stored.tensors()[i];
    if (is_merged(merge.expression, tensor)) {
      const MergedTensor one(merge, sources, digests, i, merged.catalog().tensors()[i].dtype);
      merged.set(i,
                 [one](const Box& box, MutableBytes out, MutableBytes scratch) { return one.fill(box, out, scratch); });
    } else if (const std::size_t from = merge.others_from.value_or(0); from > 0) {
      merged.set(i, [&source = *sources[from], number = merge.numbers[i][from]](const Box& box, MutableBytes out,
                                                                                MutableBytes scratch) {
        return source.read(number, box, out, scratch);
      });
    }
  }
}

Index merge_bytes(const Merge& merge) {
  const Index element = merge.options.in_double ? 8 : 4;
  return kMostElements * (element * (std::ssize(merge.options.sources) + 1) + 8);
}

}  // namespace reshard
