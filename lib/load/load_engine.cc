// SPDX-License-Identifier: Apache-2.0
#include "lib/load/load_engine.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "lib/device/copy.h"
#include "lib/engine/read_slabs.h"
#include "lib/engine/rounds.h"
#include "lib/engine/slabs.h"
#include "lib/load/exchange_schedule.h"
#include "lib/source/pieces.h"
#include "lib/source/tensor_source.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr Index kMaxSlab = Index{8} << 20;
constexpr Index kMaxRound = Index{64} << 20;  // bytes per round: many rounds overlap better than few

// Returns the item for planned tensor `planned`: a box of it, or all if `box` is null.
WalkItem item_of(const LoadJob& job, std::size_t planned, std::shared_ptr<const Box> box) {
  const std::size_t tensor = job.plan.tensors[planned].from;
  const Tensor &from = job.from(planned), &to = job.to(planned);
  return {tensor, to.dtype, std::max(from.row_group, to.row_group),
          std::max(job.source.columns(tensor), column_count(to.fragments)), std::move(box)};
}

// Returns the largest factor by which elements grow, or 0 if no tensor changes its dtype.
Index largest_growth(const LoadJob& job) {
  Index most = 0;
  for (std::size_t p = 0; p < job.plan.tensors.size(); ++p)
    if (const DType from = job.from(p).dtype, to = job.to(p).dtype; from != to) most = std::max(most, growth(from, to));
  return most;
}

struct LoadMemory {
  int threads = 1;
  Index slab_bytes = 0;  // largest slab, in the source's dtype
};

// Chooses as many threads and as large slabs as fit into the memory. Each thread needs `per_thread` slabs, and all
// threads together `shared` more.
Result<LoadMemory> plan_load_memory(const LoadJob& job, const std::vector<WalkItem>& items, Index per_thread,
                                    Index shared) {
  const Index smallest = std::max(kMinSlab, largest_group(items, job.source.catalog()));
  const Index decoding = decoding_memory(job.source.catalog());
  const auto room = [&](int threads) {
    return (job.run.memory - threads * decoding) / (threads * per_thread + shared);
  };
  LoadMemory out;
  out.threads = worker_count(job.run);
  while (out.threads > 1 && room(out.threads) < smallest) --out.threads;
  if (room(out.threads) < smallest)
    return usage_error("loading needs at least " + human_bytes(decoding + (per_thread + shared) * smallest) +
                       " of memory for buffers, got " + human_bytes(job.run.memory));
  out.slab_bytes = std::clamp(room(out.threads), smallest, std::max(smallest, kMaxSlab));
  return out;
}

// Sums the digests of several threads.
class Account {
 public:
  Account(const LoadJob& job, std::vector<Digest>& digests) : job_(job), digests_(digests) {}
  void add(std::size_t planned, const Digest& digest) {
    const std::lock_guard lock(mutex_);
    digests_[planned] += digest;
  }
  void add_read(Index bytes) {
    const Index so_far = bytes_ += bytes;
    if (job_.run.progress) job_.run.progress(so_far);
  }
  Index bytes_read() const { return bytes_; }

 private:
  const LoadJob& job_;
  std::vector<Digest>& digests_;
  std::mutex mutex_;
  std::atomic<Index> bytes_{0};
};

Index bytes_of(const Box& box, DType dtype) { return volume(box) * byte_size(dtype); }

// Work queued on a slab's elements on their device, in the target's dtype. Its destination may be the caller's memory.
using Use = std::function<Status(const std::byte* elements)>;

// Waits for queued work, even if queueing it has failed in part.
Status wait_for(const Status& queued, Stream& stream) {
  Status done = stream.wait();
  return queued ? done : queued;
}

// Moves a slab of planned tensor `planned` to the device, digests and uses it, and always waits for that work.
Status use_slab(const LoadJob& job, std::size_t planned, const Box& box, const DeviceBuffer& stored, Side side,
                const Buffers& b, Account& account, const Use& use) {
  const Tensor &from = job.from(planned), &to = job.to(planned);
  Digest digest;
  const auto queue = [&]() -> Status {
    const DeviceBuffer elements = TRY(convert_on_device(stored, side, from.dtype, to.dtype, volume(box), b));
    TRY(b.stream->digest_box(to.shape, box, byte_size(to.dtype), elements.device.data(), &digest));
    return use(elements.device.data());
  };
  TRY(wait_for(queue(), *b.stream));
  account.add(planned, digest);
  account.add_read(bytes_of(box, from.dtype));
  return {};
}

// ---- Each rank for itself

// The items that this rank holds, and the planned tensor of each. If the boxes of a tensor fill their common box they
// are joined, such as the two stored halves of a head's rows.
struct LocalItems {
  std::vector<WalkItem> items;
  std::vector<std::size_t> planned;
};
LocalItems items_of_rank(const LoadJob& job) {
  LocalItems out;
  for (std::size_t p = 0; p < job.plan.tensors.size(); ++p) {
    const FragmentList& boxes = job.destinations.boxes(p);
    if (boxes.empty()) continue;
    Box hull = boxes.box(0);
    Index elements = 0;
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const Box box = boxes.box(i);
      elements += volume(box);
      for (int d = 0; d < box.rank(); ++d) {
        const Index end = std::max(hull.end(d), box.end(d));
        hull.origin[d] = std::min(hull.begin(d), box.begin(d));
        hull.shape[d] = end - hull.begin(d);
      }
    }
    WalkItem item = item_of(job, p, std::make_shared<const Box>(hull));
    const bool is_filled = volume(hull) == elements;
    for (std::size_t i = 0; i < (is_filled ? 1 : boxes.size()); ++i) {
      if (!is_filled) item.box = std::make_shared<const Box>(boxes.box(i));
      out.items.push_back(item);
      out.planned.push_back(p);
    }
  }
  return out;
}

// ---- All ranks together

class JointLoad : public Rounds {
 public:
  JointLoad(const LoadJob& job, Transport& data, Index extra)
      : job_(job), extra_(extra), device_(device_of(job.run)), data_(data), on_device_(data_.moves_device_memory()) {}

  Result<LoadDigests> run() {
    const Index limit = TRY(prepare());
    TRY(run_rounds(*this, device_, data_, limit));
    out_.bytes_read = read_.bytes_read();
    return std::move(out_);
  }

 private:
  // Agrees on the size of slabs and rounds: the smallest that any rank has room for. Returns that of a round, in bytes.
  Result<Index> prepare() {
    std::vector<WalkItem> items;
    for (std::size_t p = 0; p < job_.plan.tensors.size(); ++p) items.push_back(item_of(job_, p, nullptr));
    const Index larger = std::max<Index>(1, extra_);
    const LoadMemory memory = TRY(plan_load_memory(job_, items, 2 + extra_, 4 * larger));
    const Index usual = TRY(minimum(job_.run.ranks, device_.slab_bytes()));
    SlabList slabs(items, job_.source.catalog(), usual, TRY(minimum(job_.run.ranks, memory.slab_bytes)));
    const Index slab = std::max(kMinSlab, slabs.largest());
    const Index workers = memory.threads * ((2 + extra_) * slab + decoding_memory(job_.source.catalog()));
    const Index room = std::clamp((job_.run.memory - workers) / 4, larger * slab, std::max(larger * slab, kMaxRound));
    const Index limit = TRY(minimum(job_.run.ranks, room));
    schedule_.emplace(job_.plan, job_.target_view, job_.target, std::move(slabs), static_cast<int>(job_.rank), limit);
    readers_ = TRY(ThreadBuffers::make(on_device_ ? device_ : cpu_device(), memory.threads, slab, extra_, slab));
    for (int t = 0; t < memory.threads; ++t) placers_.push_back(TRY(device_.stream()));
    return limit;
  }

  int threads() const { return static_cast<int>(placers_.size()); }

  Result<bool> read(int half, const DeviceBuffer& sent, RoundMessages& messages) override {
    ExchangeRound& round = rounds_[half];
    if (!schedule_->next(round)) return false;
    messages = round.messages;
    out_.bytes_received += round.received_bytes;
    const MutableBytes to = moved(data_, sent);
    TRY(parallel_for(std::ssize(round.reads), threads(), [&](int thread, Index i) -> Status {
      TRY(check_not_interrupted(job_.run));
      const ExchangeRound::Read& r = round.reads[i];
      return read_and_pack(r, readers_.buffers()[thread], to);
    }));
    return true;
  }

  Status read_and_pack(const ExchangeRound::Read& r, const Buffers& b, MutableBytes sent) {
    const Side side = TRY(read_box(job_.source, job_.plan.tensors[r.planned].from, r.slab, b.slab, b));
    const Index element = byte_size(job_.to(r.planned).dtype);
    const Dims strides = row_major_strides(r.slab.shape);
    const auto pack = [&](const std::byte* elements) -> Status {
      for (const ExchangeRound::Packing& part : r.parts) {
        std::byte* packed = sent.data() + part.offset;
        for (const Box& piece : part.pieces) {
          TRY(b.stream->copy_box(piece.shape, element, elements + offset_in(r.slab, strides, piece) * element, strides,
                                 packed, row_major_strides(piece.shape)));
          packed += volume(piece) * element;
        }
      }
      return {};
    };
    return use_slab(job_, r.planned, r.slab, b.slab, side, b, read_, pack);
  }

  Status finish(int half, const DeviceBuffer& sent, const DeviceBuffer& received) override {
    const ExchangeRound& round = rounds_[half];
    return parallel_for(std::ssize(round.arrivals), threads(), [&](int thread, Index i) -> Status {
      TRY(check_not_interrupted(job_.run));
      const ExchangeRound::Arrival& a = round.arrivals[i];
      return place_arrival(a, (a.is_own ? sent : received).part(a.offset, a.bytes), *placers_[thread]);
    });
  }

  Status place_arrival(const ExchangeRound::Arrival& a, const DeviceBuffer& buffer, Stream& stream) {
    const Tensor& to = job_.to(a.planned);
    std::vector<Digest> digests(a.pieces.size());
    const auto queue = [&]() -> Status {
      if (!on_device_) TRY(stream.upload(buffer, a.bytes));
      const std::byte* elements = buffer.device.data();
      for (std::size_t i = 0; i < a.pieces.size(); ++i) {
        TRY(stream.digest_box(to.shape, a.pieces[i], byte_size(to.dtype), elements, &digests[i]));
        TRY(job_.destinations.place(a.planned, a.pieces[i], elements, stream));
        elements += bytes_of(a.pieces[i], to.dtype);
      }
      return {};
    };
    TRY(wait_for(queue(), stream));
    for (const Digest& digest : digests) placed_.add(a.planned, digest);
    return {};
  }

  const LoadJob& job_;
  Index extra_;  // slabs needed for conversion
  Device& device_;
  Transport& data_;
  bool on_device_;  // whether messages are in device memory
  LoadDigests out_{std::vector<Digest>(job_.plan.tensors.size()), std::vector<Digest>(job_.plan.tensors.size())};
  Account read_{job_, out_.read}, placed_{job_, out_.placed};
  std::optional<ExchangeSchedule> schedule_;
  ThreadBuffers readers_;  // in the memory that messages use
  std::vector<std::unique_ptr<Stream>> placers_;
  ExchangeRound rounds_[2];
};

}  // namespace

Result<LoadDigests> load_direct(const LoadJob& job) {
  const auto [items, planned] = items_of_rank(job);
  const Index extra = largest_growth(job);
  const LoadMemory memory = TRY(plan_load_memory(job, items, 2 + extra, 0));
  const SlabList slabs(items, job.source.catalog(), device_of(job.run).slab_bytes(), memory.slab_bytes);
  const auto threads = static_cast<int>(std::clamp<Index>(slabs.total(), 1, memory.threads));
  const Index slab = std::max(kMinSlab, slabs.largest());
  const ThreadBuffers buffers = TRY(ThreadBuffers::make(device_of(job.run), threads, slab, extra, slab));
  LoadDigests out;
  out.placed.resize(job.plan.tensors.size());
  Account placed(job, out.placed);
  const auto place = [&, &of = planned](const WalkSlab& s, const DeviceBuffer& stored, Side side, const Buffers& b) {
    const std::size_t p = of[s.item];
    return use_slab(job, p, s.box, stored, side, b, placed,
                    [&](const std::byte* elements) { return job.destinations.place(p, s.box, elements, *b.stream); });
  };
  TRY(read_slabs(items, slabs, 0, slabs.total(), job.source, job.run, buffers.buffers(), place));
  out.bytes_read = placed.bytes_read();
  out.read = out.placed;
  return out;
}

Result<LoadDigests> load_together(const LoadJob& job) {
  Transport* const data = job.run.data ? TRY(job.run.data()) : job.run.ranks;
  return JointLoad(job, *data, largest_growth(job)).run();
}

}  // namespace reshard
