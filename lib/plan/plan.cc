// SPDX-License-Identifier: Apache-2.0
#include "lib/plan/plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/device/digest.h"

namespace reshard {
namespace {

// The moves into one target tensor: pairs of fragments that overlap, and the number of elements written.
struct Moves {
  Index count = 0;
  Index elements = 0;
};

// Counts the moves into one target tensor, and checks that they fill each of its fragments and replicas exactly.
Result<Moves> moves_into(const Tensor& from, const Tensor& to) {
  Moves moves;
  const FragmentIndex sources(from.fragments);
  const std::size_t first_copies = to.fragments.size();
  for (std::size_t i = 0; i < first_copies + to.replicas.size(); ++i) {
    const Box box = i < first_copies ? to.fragments.box(i) : to.replicas.box(i - first_copies);
    if (box.empty()) continue;
    moves.elements += volume(box);
    Index filled = 0;
    sources.overlapping(box, [&](std::size_t, const Box& both) {
      filled += volume(both);
      ++moves.count;
    });
    if (filled != volume(box))
      return internal_error("plan: " + tensor_text(to.name) + " " + to_string(box) + ": expected " +
                            count_of(volume(box), "element") + " from the source, got " + with_commas(filled));
  }
  return moves;
}

// Counts moves of tensors. The layers of a model have equal boxes on both sides, so such pairs are counted once.
class MoveCounter {
 public:
  Result<Moves> count(const Tensor& from, const Tensor& to) {
    if (to.fragments.empty() && to.replicas.empty())
      return Moves();  // in a target of one rank, a tensor that others hold
    const std::uint64_t hash = digest_mix(digest_mix(from.fragments.hash_of_boxes()) ^ to.fragments.hash_of_boxes()) ^
                               to.replicas.hash_of_boxes();
    const auto seen = counted_.find(hash);
    if (seen != counted_.end() && seen->second.is_like(from, to)) return seen->second.moves;
    const Moves moves = TRY(moves_into(from, to));
    counted_.try_emplace(hash, Pair{&from, &to, moves});
    return moves;
  }

 private:
  struct Pair {
    const Tensor *from, *to;
    Moves moves;
    bool is_like(const Tensor& other_from, const Tensor& other_to) const {
      return from->fragments.has_boxes_of(other_from.fragments) && to->fragments.has_boxes_of(other_to.fragments) &&
             to->replicas.has_boxes_of(other_to.replicas);
    }
  };
  std::unordered_map<std::uint64_t, Pair> counted_;
};

class Fingerprint {
 public:
  void add(std::uint64_t v) { value_ = digest_mix(value_ ^ v) + 0x9e3779b97f4a7c15u; }
  void add(Index v) { add(static_cast<std::uint64_t>(v)); }
  void add(std::string_view text) {
    add(std::uint64_t{text.size()});
    for (std::size_t at = 0; at < text.size(); at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
      add(word);
    }
  }
  void add(const Tensor& t) {
    add(t.name);
    add(static_cast<std::uint64_t>(t.dtype));
    for (const Index extent : t.shape) add(extent);
    for (const FragmentList* list : {&t.fragments, &t.replicas}) {
      add(list->hash_of_boxes());
      for (std::size_t i = 0; i < list->size(); ++i) {
        const Extent& e = list->extent(i);
        add(Index{e.file});
        add(e.offset);
      }
    }
  }
  void add(const Catalog& catalog) {
    for (const CatalogFile& f : catalog.files) {
      add(f.path);
      add(f.size);
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0;
};

}  // namespace

std::uint64_t fingerprint(const Plan& plan, const Catalog& source, const Catalog& target) {
  Fingerprint print;
  print.add(source);
  print.add(target);
  for (const PlannedTensor& p : plan.tensors) {
    print.add(source.tensors()[p.from]);
    print.add(target.tensors()[p.to]);
  }
  return print.value();
}

Result<Plan> make_plan(const Catalog& source, const Catalog& target) {
  Plan plan;
  MoveCounter counter;
  plan.tensors.reserve(target.tensors().size());
  for (std::size_t to = 0; to < target.tensors().size(); ++to) {
    const Tensor& wanted = target.tensors()[to];
    auto from = source.find(wanted.name);
    if (!from && !wanted.plain_key.empty()) from = source.find(wanted.plain_key);  // a target that names trees renames
    if (!from) return internal_error("plan: no source for " + tensor_text(wanted.name));
    const Tensor& given = source.tensors()[*from];
    if (given.shape != wanted.shape)
      return corrupt(tensor_text(wanted.name) + ": expected shape " + to_string(wanted.shape) + ", got " +
                     to_string(given.shape));
    const Moves moves = TRY(counter.count(given, wanted));
    plan.tensors.push_back({*from, to});
    plan.moves += moves.count;
    plan.bytes_written += moves.elements * byte_size(wanted.dtype);
    plan.bytes_read += given.bytes();
  }
  return plan;
}

bool Orders::are_transposed() const { return written.rank() > 0 && written.innermost() != read.innermost(); }

namespace {

// Dimensions without a stride keep their positions.
DimOrder order_of(const FragmentList& list) {
  if (list.empty()) return {};
  const Fragment f = list.get(0);
  std::array<int, kMaxRank> by_stride{};
  int n = 0;
  const auto is_strided = [&](int d) { return f.box.shape[d] > 1 && f.strides[d] > 0; };
  for (int d = 0; d < f.box.rank(); ++d) {
    if (!is_strided(d)) continue;
    const auto end = by_stride.begin() + n++;
    const auto at =
        std::upper_bound(by_stride.begin(), end, d, [&](int a, int b) { return f.strides[a] > f.strides[b]; });
    std::copy_backward(at, end, end + 1);
    *at = d;
  }
  DimOrder out;
  auto next = by_stride.begin();
  for (int d = 0; d < f.box.rank(); ++d) out.push_back(is_strided(d) ? *next++ : d);
  return out;
}

}  // namespace

Orders orders_of(const FragmentList& written, const FragmentList& read) {
  Orders out{order_of(written), order_of(read)};
  if (out.written.rank() != out.read.rank()) return {};
  return out;
}

namespace {

// Returns how many units of `bytes` bytes make whole pages.
Index whole_pages(Index bytes) { return File::kDirectUnit / std::gcd(bytes, File::kDirectUnit); }

// Returns the step that divides the extent into equal parts of at most `most`. Steps are multiples of `wanted` if that
// fits, otherwise of `unit`, and at least one of these.
Index evenly(Index extent, Index most, Index wanted, Index unit = 1) {
  if (wanted <= most) unit = wanted;
  most = std::max(unit, most / unit * unit);
  return std::min(extent, ceil_div(ceil_div(extent, ceil_div(extent, most)), unit) * unit);
}

// Returns the longest slab of at most `elements` elements that is contiguous in the order. Slabs are of about equal
// size, and whole pages if possible.
Dims longest(const Dims& shape, const DimOrder& order, Index elements, Index element_bytes, Index row_group) {
  Dims step = shape;
  Index inner = volume(shape);
  for (int k = 0; k < order.rank(); ++k) {
    const int dim = order[k];
    const Index extent = std::max<Index>(1, shape[dim]);
    inner = std::max<Index>(1, inner / extent);
    step[dim] = 1;
    if (row_group == 1 && inner > elements) continue;
    // Slabs are multiples of row groups and of pages.
    const Index group = dim == 0 ? row_group : 1;
    step[dim] = evenly(extent, elements / inner, std::lcm(group, whole_pages(inner * element_bytes)), group);
    break;
  }
  return step;
}

constexpr Index kMaxWaste = 8;

// Returns a tile: runs of equal length along the innermost dimensions of both sides, and the rest of `elements` in the
// others.
Dims tile(const Dims& shape, const Orders& orders, Index elements, Index element_bytes) {
  const int rank = shape.rank();
  const int a = orders.written.innermost(), b = orders.read.innermost();
  const Index page = std::max<Index>(1, File::kDirectUnit / element_bytes);
  const auto extent = [&](int d) { return std::max<Index>(1, shape[d]); };
  const auto at_most = [&](Index n, int d) {
    return n >= extent(d) ? extent(d) : n > page ? n / page * page : std::max<Index>(1, n);
  };
  Dims step = Dims::filled(rank, 1);
  // Span all of `a`, so that writes are long runs, if an eighth of `b` then still fits into the slab: whatever else is
  // read around it stays in the page cache for the next slabs. Otherwise begin with a square.
  Index side = extent(a);
  if (elements / side < ceil_div(extent(b), kMaxWaste))
    for (side = 1; 4 * side * side <= elements;) side *= 2;
  step[a] = std::min(side, extent(a));
  step[b] = evenly(extent(b), elements / step[a], whole_pages(step[a] * element_bytes));
  step[a] = at_most(elements / step[b], a);
  Index left = std::max<Index>(1, elements / (step[a] * step[b]));
  for (int k = rank - 1; k >= 0; --k) {
    const int d = orders.written[k];
    if (d == a || d == b) continue;
    step[d] = std::clamp<Index>(left, 1, extent(d));
    left /= step[d];
  }
  return step;
}

}  // namespace

Slabs::Slabs(const Dims& shape, Index element_bytes, Index bytes, Index row_group, const Orders& orders)
    : shape_(shape), element_bytes_(element_bytes) {
  const bool is_free = row_group == 1 && orders.written.rank() > 0;
  for (int d = 0; d < shape.rank(); ++d) order_.push_back(is_free ? orders.written[d] : d);
  const Index elements = bytes / element_bytes;
  step_ = is_free && orders.are_transposed() ? tile(shape, orders, elements, element_bytes)
                                             : longest(shape, order_, elements, element_bytes, row_group);
  for (int d = 0; d < shape.rank(); ++d) count_ *= ceil_div(shape[d], std::max<Index>(1, step_[d]));
  if (volume(shape) == 0) count_ = 0;
}

Box Slabs::slab(Index k) const {
  Box box = whole(shape_);
  for (int i = shape_.rank() - 1; i >= 0; --i) {
    const int d = order_[i];
    const Index pieces = ceil_div(shape_[d], step_[d]);
    box.origin[d] = k % pieces * step_[d];
    box.shape[d] = std::min(step_[d], shape_[d] - box.origin[d]);
    k /= pieces;
  }
  return box;
}

Index Slabs::max_bytes() const { return count_ == 0 ? 0 : volume(slab(0)) * element_bytes_; }

}  // namespace reshard
