#include "lib/plan/plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/device/digest.h"

namespace reshard {
namespace {

// Counts the moves into one target tensor and checks that they fill each of its fragments and copies exactly.
Status plan_tensor(const Tensor& from, const Tensor& to, Plan& plan) {
  if (to.fragments.empty() && to.replicas.empty()) return {};  // in a target of one rank, what others hold
  const FragmentIndex sources(from.fragments);
  const std::size_t first_copies = to.fragments.size();
  for (std::size_t i = 0; i < first_copies + to.replicas.size(); ++i) {
    const Box box = i < first_copies ? to.fragments.box(i) : to.replicas.box(i - first_copies);
    if (box.empty()) continue;
    plan.bytes_written += volume(box) * byte_size(to.dtype);
    Index filled = 0;
    sources.overlapping(box, [&](std::size_t, const Box& both) {
      filled += volume(both);
      ++plan.moves;
    });
    if (filled != volume(box))
      return internal_error("plan: " + tensor_text(to.name) + " " + to_string(box) + ": expected " +
                            with_commas(volume(box)) + " elements from the source, got " + with_commas(filled));
  }
  return {};
}

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
  plan.tensors.reserve(target.tensors().size());
  for (std::size_t to = 0; to < target.tensors().size(); ++to) {
    const Tensor& wanted = target.tensors()[to];
    const auto from = source.find(wanted.name);
    if (!from) return internal_error("plan: no source for " + tensor_text(wanted.name));
    const Tensor& given = source.tensors()[*from];
    if (given.shape != wanted.shape)
      return corrupt(tensor_text(wanted.name) + ": expected shape " + to_string(wanted.shape) + ", got " +
                     to_string(given.shape));
    TRY(plan_tensor(given, wanted, plan));
    plan.tensors.push_back({*from, to});
    plan.bytes_read += given.bytes();
  }
  return plan;
}

Slabs::Slabs(const Dims& shape, Index element_bytes, Index bytes, Index row_group)
    : shape_(shape), element_bytes_(element_bytes) {
  const int rank = shape.rank();
  if (rank == 0) return;
  Index inner = element_bytes;  // bytes of one index of dimension cut_dim_
  for (int d = 1; d < rank; ++d) inner *= std::max<Index>(1, shape[d]);
  while (cut_dim_ + 1 < rank && inner > bytes && row_group == 1) inner /= std::max<Index>(1, shape[++cut_dim_]);
  const Index room = std::max<Index>(1, bytes / inner), extent = std::max<Index>(1, shape[cut_dim_]);
  // What slabs are whole multiples of: row groups, and pages where that can be.
  const Index group = cut_dim_ == 0 ? row_group : 1;
  const Index paged = std::lcm(group, File::kDirectUnit / std::gcd(inner, File::kDirectUnit));
  const Index step = paged <= room ? paged : group;
  const Index most = std::max(step, room / step * step);
  cut_extent_ = std::min(extent, ceil_div(ceil_div(extent, ceil_div(extent, most)), step) * step);
  for (int d = 0; d < cut_dim_; ++d) count_ *= shape[d];
  count_ *= ceil_div(shape[cut_dim_], cut_extent_);
  if (volume(shape) == 0) count_ = 0;
}

Box Slabs::slab(Index k) const {
  Box box = whole(shape_);
  if (shape_.rank() == 0) return box;
  const Index pieces = ceil_div(shape_[cut_dim_], cut_extent_);
  box.origin[cut_dim_] = k % pieces * cut_extent_;
  box.shape[cut_dim_] = std::min(cut_extent_, shape_[cut_dim_] - box.origin[cut_dim_]);
  k /= pieces;
  for (int d = cut_dim_ - 1; d >= 0; --d) {
    box.origin[d] = k % shape_[d];
    box.shape[d] = 1;
    k /= shape_[d];
  }
  return box;
}

Index Slabs::max_bytes() const { return count_ == 0 ? 0 : volume(slab(0)) * element_bytes_; }

}  // namespace reshard
