// SPDX-License-Identifier: Apache-2.0
#include "lib/engine/run.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "lib/base/text.h"
#include "lib/engine/exchange.h"
#include "lib/engine/finished_check.h"

namespace reshard {
namespace {

// The items of a copy, and the memory it needs in addition to a slab, in slabs.
struct CopyItems {
  std::vector<WalkItem> items;
  Index extra = 0;
};
CopyItems copy_items(const Plan& plan, const Catalog& source, const Catalog& target) {
  CopyItems out;
  out.items.reserve(plan.tensors.size());
  for (const PlannedTensor& p : plan.tensors) {
    const Tensor &from = source.tensors()[p.from], &to = target.tensors()[p.to];
    out.items.push_back({p.from, to.dtype, std::max(from.row_group, to.row_group), column_count(to.fragments), nullptr,
                         orders_of(to.fragments, from.fragments)});
    if (from.dtype != to.dtype) out.extra = std::max(out.extra, growth(from.dtype, to.dtype));
  }
  return out;
}

}  // namespace

Result<MemoryPlan> copy_memory(const Plan& plan, const Catalog& source, const Catalog& target,
                               const RunOptions& options) {
  const CopyItems copy = copy_items(plan, source, target);
  const Index group = largest_group(copy.items, source);
  return plan_memory(options, group, copy.extra, decoding_memory(source),
                     Staging::plan(options, group).total() + kept_bytes(copy.items, source));
}

Result<std::vector<TensorProof>> copy_tensors(const Plan& plan, TensorSource& source, const Catalog& target,
                                              Output& output, const RunOptions& options) {
  CopyItems copy = copy_items(plan, source.catalog(), target);
  std::vector<StoredItem> stored;
  stored.reserve(copy.items.size());
  SharedIndexes indexes;
  for (std::size_t i = 0; i < copy.items.size(); ++i) {
    copy.items[i].columns = std::max(copy.items[i].columns, source.columns(copy.items[i].tensor));
    const Tensor& to = target.tensors()[plan.tensors[i].to];
    stored.push_back({&to, indexes.of(to.fragments), indexes.of(to.replicas)});
  }
  if (output.journal()) {
    const MemoryPlan memory = TRY(copy_memory(plan, source.catalog(), target, options));
    if (const auto changed =
            TRY(find_changed(copy.items, stored, source.catalog(), output, memory, copy.extra, options)))
      TRY(output.start_over("the data that the killed run wrote of " + tensor_text(*changed) + " has changed since"));
  }
  auto proofs = run_walk(
      {copy.items, source, copy.extra, output.keeps_tensors_whole(), &output}, options,
      [&](const SeenSlab& seen, Bytes elements, const Buffers& buffers) -> Status {
        const auto& [i, box, number] = seen.slab;
        const auto& [tensor, index, copies] = stored[i];
        const Tensor& to = *tensor;
        const Index eb = byte_size(to.dtype);
        std::vector<CrcPiece> sums;
        bool is_written = TRY(output.write(to.fragments, *index, box, eb, elements, buffers.scratch, &sums));
        if (!to.replicas.empty())
          is_written &= TRY(output.write(to.replicas, *copies, box, eb, elements, buffers.scratch, &sums));
        if (!is_written || !output.journal()) return {};
        return output.journal()->add(number, static_cast<Index>(i), seen.bytes, {seen.source, seen.target}, sums);
      });
  if (proofs) TRY(output.finish_data());
  return proofs;
}

Result<std::vector<TensorProof>> digest_tensors(const std::vector<DigestRequest>& requests, TensorSource& source,
                                                const RunOptions& options, const BoxVisit& visit) {
  std::vector<WalkItem> items;
  items.reserve(requests.size());
  Index extra = 0;
  for (const DigestRequest& r : requests) {
    const Tensor& t = source.catalog().tensors()[r.tensor];
    items.push_back(
        {r.tensor, r.as, t.row_group, source.columns(r.tensor), nullptr, orders_of(t.fragments, t.fragments)});
    if (t.dtype != r.as) extra = std::max(extra, growth(t.dtype, r.as));
  }
  if (!visit) return run_walk({items, source, extra}, options, nullptr);
  const SlabSink sink = [&](const SeenSlab& seen, Bytes elements, const Buffers&) -> Status {
    visit(seen.slab.item, seen.slab.box, elements);
    return {};
  };
  return run_walk({items, source, extra, true}, options, sink);
}

Status visit_pairs(const std::vector<PairRequest>& requests, TensorSource& a, TensorSource& b,
                   const RunOptions& options, const PairVisit& visit) {
  std::vector<WalkItem> items;
  Index extra = 1;
  for (const PairRequest& r : requests) {
    const Tensor &ta = a.catalog().tensors()[r.a], &tb = b.catalog().tensors()[r.b];
    const Index columns = r.box ? 1 : std::max(a.columns(r.a), b.columns(r.b));
    items.push_back({r.a, ta.dtype, std::max(ta.row_group, tb.row_group), columns,
                     r.box ? std::make_shared<const Box>(*r.box) : nullptr, orders_of(ta.fragments, tb.fragments)});
    extra = std::max(extra, growth(ta.dtype, tb.dtype));
  }
  TRY(run_walk({items, a, extra}, options, [&](const SeenSlab& seen, Bytes elements, const Buffers& buffers) -> Status {
    const std::size_t i = seen.slab.item;
    const Box& box = seen.slab.box;
    const Tensor& tb = b.catalog().tensors()[requests[i].b];
    const auto other = buffers.extra.host.first(volume(box) * byte_size(tb.dtype));
    if (const Status read = b.read(requests[i].b, box, other, buffers.scratch); !read)
      return skips_damage(options, read.error()) ? Status() : read;
    visit(i, box, elements, other);
    return {};
  }));
  std::vector<std::byte> scratch(std::size_t{kMinSlab});
  const Status finished = b.finish(scratch, options.ranks);
  return finished || skips_damage(options, finished.error()) ? Status() : finished;
}

}  // namespace reshard
