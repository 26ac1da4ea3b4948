// SPDX-License-Identifier: Apache-2.0
#include "lib/engine/walk.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <span>
#include <utility>

#include "lib/base/text.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/engine/exchange.h"
#include "lib/engine/finished_check.h"
#include "lib/engine/read_slabs.h"
#include "lib/engine/slabs_ahead.h"
#include "lib/output/small_write_buffer.h"
#include "lib/source/crc_ledger.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

// The proofs of all tensors. Thread-safe.
class Proofs {
 public:
  explicit Proofs(std::size_t n) : proofs_(n) {}
  void add(std::size_t i, const Digest& source, const Digest& target) {
    const std::lock_guard lock(mutex_);
    proofs_[i] += {source, target};
  }
  // Adds up the proofs of all ranks.
  Result<std::vector<TensorProof>> take(Transport* ranks) {
    TRY(add_up(ranks, proofs_));
    return std::move(proofs_);
  }

 private:
  std::mutex mutex_;
  std::vector<TensorProof> proofs_;
};

}  // namespace

TensorProof& TensorProof::operator+=(const TensorProof& other) {
  source += other.source;
  target += other.target;
  return *this;
}

Status add_up(Transport* ranks, std::span<TensorProof> proofs) {
  return combine_values(ranks, proofs, [](TensorProof& mine, const TensorProof& theirs) { mine += theirs; });
}

Index kept_bytes(const std::vector<WalkItem>& items, const Catalog& source) {
  constexpr Index kWalked = SlabList::item_bytes() + sizeof(TensorProof);
  Index out = 0, held = 0;
  RecentBoxes indexed;
  for (const WalkItem& item : items) {
    const Tensor& tensor = source.tensors()[item.tensor];
    const FragmentList& fragments = tensor.fragments;
    if (const Index bytes = tensor.bytes(); bytes <= SmallWriteBuffer::kLongest)
      held += SmallWriteBuffer::bytes_of(bytes);
    out += kWalked + (fragments.has_crcs() ? std::ssize(fragments) * CrcLedger::kExtentBytes : 0);
    if (indexed.place_of(fragments).second) out += SharedIndexes::bytes(fragments);
  }
  return out + std::min(held, SmallWriteBuffer::kMemory);
}

namespace {

// The work on each slab: conversion, digests, the sink.
class SlabWork {
 public:
  SlabWork(const Walk& walk, const RunOptions& options, const SlabSink& sink)
      : walk_(walk), options_(options), sink_(sink), proofs_(walk.items.size()) {}

  // Starts the journal of the output, and takes over what an earlier run recorded about the slabs it finished.
  void resume(Journal& journal, const JournalText* recorded, const SlabCut& cut, bool any_finished) {
    TensorSource& source = walk_.source;
    journal.begin(cut, [&source] { return source.take_seen(); });
    std::vector<std::size_t> tensors;
    if (any_finished)
      for (const WalkItem& item : walk_.items) tensors.push_back(item.tensor);
    source.keep_seen(recorded ? recorded->finished.read : std::vector<CrcPiece>(), tensors);
    if (!recorded) return;
    for (const auto& [item, digests] : recorded->finished.digests)
      if (item < std::ssize(walk_.items)) proofs_.add(static_cast<std::size_t>(item), digests.source, digests.target);
    done_ = recorded->finished.bytes;
  }

  // Processes a slab whose elements are at the beginning of `in`, on `side`. Thread-safe.
  Status process(const WalkSlab& slab, const DeviceBuffer& in, Side side, const Buffers& buffers) {
    const WalkItem& item = walk_.items[slab.item];
    const Tensor& t = walk_.source.catalog().tensors()[item.tensor];
    const Index n = volume(slab.box), bytes = n * byte_size(t.dtype), out_bytes = n * byte_size(item.as);
    const bool converts = t.dtype != item.as;
    Stream& stream = *buffers.stream;
    const DeviceBuffer out = TRY(convert_on_device(in, side, t.dtype, item.as, n, buffers));
    Digest before, after;  // the conversion
    TRY(stream.digest_box(t.shape, slab.box, byte_size(t.dtype), in.device.data(), &before));
    if (converts) TRY(stream.digest_box(t.shape, slab.box, byte_size(item.as), out.device.data(), &after));
    if (sink_ && (converts || side == Side::kDevice)) TRY(stream.download(out, out_bytes));
    TRY(stream.wait());
    if (!converts) after = before;
    if (sink_) TRY(sink_({slab, bytes, before, after}, out.host.first(out_bytes), buffers));
    proofs_.add(slab.item, before, after);
    const Index so_far = done_ += bytes;
    if (options_.progress) options_.progress(so_far);
    return {};
  }

  Result<std::vector<TensorProof>> take_proofs() { return proofs_.take(options_.ranks); }

 private:
  const Walk& walk_;
  const RunOptions& options_;
  const SlabSink& sink_;
  Proofs proofs_;
  std::atomic<Index> done_{0};  // bytes of the source
};

// Returns how many threads to run for `slabs` slabs with buffers of `slab_bytes`. Slabs that an earlier run cut may be
// larger than those of `memory`, so there may be room for fewer threads.
int thread_count_for(Index slabs, Index slab_bytes, const MemoryPlan& memory, const RunOptions& options) {
  const Index workers = worker_count(options);
  const Index room = std::max<Index>(1, memory.slab_bytes * workers / slab_bytes);
  return static_cast<int>(std::clamp<Index>(slabs, 1, std::min(room, workers)));
}

}  // namespace

Result<std::vector<TensorProof>> run_walk(const Walk& walk, const RunOptions& options, const SlabSink& sink) {
  const std::vector<WalkItem>& items = walk.items;
  TensorSource& source = walk.source;
  const Catalog& catalog = source.catalog();

  // 1. Memory, and the size of slabs.
  const Index group = largest_group(items, catalog);
  Staging staging{TRY(minimum(options.ranks, Staging::plan(options, group).bytes))};
  const MemoryPlan memory = TRY(
      plan_memory(options, group, walk.extra, decoding_memory(catalog), staging.total() + kept_bytes(items, catalog)));
  const Index limit = exchanges(options) ? std::min(memory.slab_bytes, staging.bytes) : memory.slab_bytes;
  SlabCut cut;
  cut.usual = TRY(minimum(options.ranks, device_of(options).slab_bytes()));
  cut.limit = TRY(minimum(options.ranks, limit));

  // 2. Take over what an earlier run finished.
  Journal* const journal = walk.journaled ? walk.journaled->journal() : nullptr;
  std::map<Index, Index> finished;
  if (journal) {
    FinishedWork from = TRY(read_finished_work(cut, *walk.journaled, options.ranks));
    cut = from.cut;
    finished = std::move(from.finished);
  }

  // 3. Slabs and shares.
  const SlabList list(items, catalog, cut.usual, cut.limit, finished);
  staging.bytes = std::max(staging.bytes, list.largest());
  const std::vector<Index> shares = list.shares(rank_count(options.ranks), walk.whole_tensors);
  const std::size_t me = rank_of(options.ranks);

  // 4. The work.
  const Index slab = std::max(kMinSlab, list.largest());
  const Index slabs = exchanges(options) ? list.total() : shares[me + 1] - shares[me];
  const int threads = thread_count_for(slabs, slab, memory, options);
  const ThreadBuffers thread_buffers =
      TRY(ThreadBuffers::make(device_of(options), threads, slab, walk.extra, std::max(kMinSlab, memory.scratch_bytes)));
  const std::vector<Buffers>& buffers = thread_buffers.buffers();
  source.expect_once();
  SlabWork work(walk, options, sink);
  if (journal) work.resume(*journal, walk.journaled->earlier_work(), cut, !finished.empty());
  const SlabVisit process = [&work](const WalkSlab& s, const DeviceBuffer& in, Side side, const Buffers& b) {
    return work.process(s, in, side, b);
  };
  if (exchanges(options))
    TRY(exchange_slabs(items, list, shares, source, staging, options, buffers, process));
  else
    TRY(read_slabs(items, list, shares[me], shares[me + 1], source, options, buffers, process,
                   std::clamp<Index>(options.memory - memory.peak - kConnections, 0, kMostAhead)));

  // 5. Checksums, and the proofs of all ranks.
  const Status checked = source.finish(buffers.front().scratch, options.ranks);
  if (!checked && !skips_damage(options, checked.error())) return checked.error();
  return work.take_proofs();
}

}  // namespace reshard
