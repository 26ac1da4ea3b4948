#include "lib/engine/walk.h"

#include <algorithm>
#include <mutex>
#include <span>
#include <utility>

#include "lib/base/text.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/engine/exchange.h"
#include "lib/engine/finished_check.h"
#include "lib/output/small_write_buffer.h"
#include "lib/source/crc_ledger.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

// Digest of one box, added under a lock to its tensor's.
class Proofs {
 public:
  explicit Proofs(std::size_t n) : proofs_(n) {}
  void add(std::size_t i, const Digest& source, const Digest& target) {
    const std::lock_guard lock(mutex_);
    proofs_[i].source += source;
    proofs_[i].target += target;
  }
  // Of all ranks.
  Result<std::vector<TensorProof>> take(Transport* ranks) {
    TRY(combine_values(ranks, std::span(proofs_), [](TensorProof& mine, const TensorProof& theirs) {
      mine.source += theirs.source;
      mine.target += theirs.target;
    }));
    return std::move(proofs_);
  }

 private:
  std::mutex mutex_;
  std::vector<TensorProof> proofs_;
};

}  // namespace

Index kept_bytes(const std::vector<WalkItem>& items, const Catalog& source) {
  constexpr Index kWalked = SlabList::item_bytes() + sizeof(TensorProof);
  Index out = 0, held = 0;
  RecentBoxes indexed;
  for (const WalkItem& item : items) {
    const Tensor& tensor = source.tensors()[item.tensor];
    const FragmentList& fragments = tensor.fragments;
    if (const Index bytes = tensor.bytes(); bytes <= SmallWriteBuffer::kLongest)
      held += SmallWriteBuffer::bytes_of(bytes);
    out += kWalked + (fragments.has_crcs() ? static_cast<Index>(fragments.size()) * CrcLedger::kExtentBytes : 0);
    if (indexed.place_of(fragments).second) out += SharedIndexes::bytes(fragments);
  }
  return out + std::min(held, SmallWriteBuffer::kMemory);
}

Result<std::vector<TensorProof>> walk(const std::vector<WalkItem>& items, TensorSource& source, Index extra,
                                      const RunOptions& options, const SlabSink& sink, bool whole_tensors,
                                      Output* journaled) {
  const auto& tensors = source.catalog().tensors();
  const Index group = largest_group(items, source.catalog());
  Staging staging{TRY(minimum(options.ranks, Staging::plan(options, group).bytes))};
  const MemoryPlan memory = TRY(plan_memory(options, group, extra, decoding_memory(source.catalog()),
                                            staging.total() + kept_bytes(items, source.catalog())));
  // All ranks cut alike.
  const Index limit = exchanges(options) ? std::min(memory.slab_bytes, staging.bytes) : memory.slab_bytes;
  const Index usual = TRY(minimum(options.ranks, device_of(options).slab_bytes()));
  SlabCut cut{usual, TRY(minimum(options.ranks, limit))};
  std::map<Index, Index> finished;
  if (journaled && journaled->journal()) {
    Continued from = TRY(continued(cut, *journaled, options.ranks));
    cut = from.cut;
    finished = std::move(from.finished);
  }
  const SlabList list(items, source.catalog(), cut.usual, cut.limit, finished);
  staging.bytes = std::max(staging.bytes, list.largest());
  const std::vector<Index> shares = list.shares(rank_count(options.ranks), whole_tensors);
  const auto me = static_cast<std::size_t>(rank_of(options.ranks));
  const Index first = shares[me], count = shares[me + 1] - first;

  const Index slab = std::max(kMinSlab, list.largest());
  // Slabs that an earlier run has cut may be larger than this one would have them.
  const Index room = std::max<Index>(1, memory.slab_bytes * worker_count(options) / slab);
  const int threads = static_cast<int>(
      std::clamp<Index>(exchanges(options) ? list.total() : count, 1, std::min<Index>(room, worker_count(options))));
  const ThreadBuffers memory_of_threads =
      TRY(ThreadBuffers::make(device_of(options), threads, slab, extra, std::max(kMinSlab, memory.scratch_bytes)));
  const std::vector<Buffers>& buffers = memory_of_threads.buffers();

  Proofs proofs(items.size());
  std::atomic<Index> done{0};
  source.expect_once();
  if (Journal* const journal = journaled ? journaled->journal() : nullptr) {
    journal->begin(cut, [&source] { return source.take_seen(); });
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; !finished.empty() && i < items.size(); ++i) numbers.push_back(items[i].tensor);
    const JournalText* const text = journaled->continued();
    source.keep_seen(text ? text->finished.read : std::vector<CrcPiece>(), numbers);
    for (const auto& [item, both] : text ? text->finished.digests : std::map<Index, FinishedSlabs::Digests>())
      if (item < std::ssize(items)) proofs.add(static_cast<std::size_t>(item), both.source, both.target);
    if (text) done = text->finished.bytes;
  }
  // What is done with a slab once its elements are there.
  const SlabVisit process = [&](const WalkSlab& s, const DeviceBuffer& in, Side side, const Buffers& b) -> Status {
    const WalkItem& item = items[s.item];
    const Tensor& t = tensors[item.tensor];
    const Index n = volume(s.box), bytes = n * byte_size(t.dtype), out_bytes = n * byte_size(item.as);
    const bool converts = t.dtype != item.as;
    const DeviceBuffer out = TRY(convert_on_device(in, side, t.dtype, item.as, n, b));
    Digest before, after;  // the conversion
    TRY(b.stream->digest_box(t.shape, s.box, byte_size(t.dtype), in.device.data(), &before));
    if (converts) TRY(b.stream->digest_box(t.shape, s.box, byte_size(item.as), out.device.data(), &after));
    if (sink && (converts || side == Side::kDevice)) TRY(b.stream->download(out, out_bytes));
    TRY(b.stream->wait());
    if (!converts) after = before;
    if (sink) TRY(sink({s, bytes, before, after}, out.host.first(static_cast<std::size_t>(out_bytes)), b));
    proofs.add(s.item, before, after);
    const Index so_far = done += bytes;
    if (options.progress) options.progress(so_far);
    return {};
  };
  if (exchanges(options)) {
    TRY(exchange_slabs(items, list, shares, source, staging, options, buffers, process));
  } else {
    TRY(read_slabs(items, list, first, first + count, source, options, buffers, process));
  }
  TRY(source.finish(buffers.front().scratch, options.ranks));
  return proofs.take(options.ranks);
}

}  // namespace reshard
