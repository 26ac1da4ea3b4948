#include "lib/reshard/load_engine.h"

#include <algorithm>
#include <functional>
#include <mutex>

#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "lib/device/copy.h"
#include "lib/reshard/exchange_schedule.h"
#include "lib/reshard/left_behind.h"
#include "lib/reshard/pieces.h"
#include "lib/reshard/slab_walk.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr Index kMaxSlab = Index{8} << 20;
constexpr Index kMaxRound = Index{64} << 20;  // bytes of a round: many rounds overlap better than few

// What is walked over of planned tensor `planned`: a box of it, or all.
WalkItem item_of(const LoadJob& job, std::size_t planned, std::optional<Box> part) {
  const std::size_t tensor = job.plan.tensors[planned].from;
  const Tensor &from = job.from(planned), &to = job.to(planned);
  return {tensor, to.dtype, std::max(from.row_group, to.row_group),
          std::max(job.source.columns(tensor), column_count(to.fragments)), part};
}

// How many times larger elements become at most, and 0 where no tensor changes its dtype.
Index growth(const LoadJob& job) {
  Index most = 0;
  for (std::size_t p = 0; p < job.plan.tensors.size(); ++p)
    if (const DType from = job.from(p).dtype, to = job.to(p).dtype; from != to)
      most = std::max({most, Index{1}, ceil_div(byte_size(to), byte_size(from))});
  return most;
}

struct LoadMemory {
  int threads = 1;
  Index slab_bytes = 0;  // at most, of the source's elements
};

// As many threads and as large slabs as the memory has room for. A thread takes `per_thread` slabs, all of them
// together take `shared` more.
Result<LoadMemory> plan_load_memory(const LoadJob& job, const std::vector<WalkItem>& items, Index per_thread,
                                    Index shared) {
  const Index smallest = std::max(kMinSlab, largest_group(items, job.source.catalog()));
  const Index decoding = decoding_memory(job.source.catalog());
  const auto room = [&](int threads) { return (job.memory - threads * decoding) / (threads * per_thread + shared); };
  RunOptions run;
  run.threads = job.threads;
  LoadMemory out;
  out.threads = worker_count(run);
  while (out.threads > 1 && room(out.threads) < smallest) --out.threads;
  if (room(out.threads) < smallest)
    return usage_error("loading needs at least " + human_bytes(decoding + (per_thread + shared) * smallest) +
                       " of memory for buffers, got " + human_bytes(job.memory));
  out.slab_bytes = std::clamp(room(out.threads), smallest, std::max(smallest, kMaxSlab));
  return out;
}

// What several threads see of the elements.
class Account {
 public:
  Account(const LoadJob& job, std::vector<Digest>& digests) : job_(job), digests_(digests) {}
  void add(std::size_t planned, const Digest& digest) {
    const std::lock_guard lock(mutex_);
    digests_[planned] += digest;
  }
  void add_read(Index bytes) {
    const Index so_far = bytes_ += bytes;
    if (job_.progress) job_.progress(so_far);
  }
  Index bytes_read() const { return bytes_; }

 private:
  const LoadJob& job_;
  std::vector<Digest>& digests_;
  std::mutex mutex_;
  std::atomic<Index> bytes_{0};
};

Status go_on(const LoadJob& job) {
  RunOptions run;
  run.interrupt = job.interrupt;
  run.ranks = job.ranks;
  return may_go_on(run);
}

std::size_t bytes_of(const Box& box, DType dtype) { return static_cast<std::size_t>(volume(box) * byte_size(dtype)); }

// ---- each rank for itself

// What lands here: items for the walk, and which planned tensor each is of. The boxes of a tensor are joined to one
// where they fill it: so are rows of a head that are stored in halves.
struct LandingItems {
  std::vector<WalkItem> items;
  std::vector<std::size_t> planned;
};
LandingItems landing_items(const LoadJob& job) {
  LandingItems out;
  for (std::size_t p = 0; p < job.plan.tensors.size(); ++p) {
    const FragmentList& boxes = job.landings.boxes(p);
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
    WalkItem item = item_of(job, p, hull);
    const bool is_filled = volume(hull) == elements;
    for (std::size_t i = 0; i < (is_filled ? 1 : boxes.size()); ++i) {
      if (!is_filled) item.part = boxes.box(i);
      out.items.push_back(item);
      out.planned.push_back(p);
    }
  }
  return out;
}

// What one thread reads, converts and places with.
struct Worker {
  std::unique_ptr<Device::Memory> stored, converted;
  std::vector<std::byte> scratch;
  std::unique_ptr<Stream> stream;
};

// Queues work that ends in the caller's memory, and waits for what was queued, all of it or not.
Status run_on(Stream& stream, const std::function<Status()>& queue) {
  Status queued = queue();
  Status done = stream.wait();
  return queued ? done : queued;
}

Status load_slab(const LoadJob& job, std::size_t planned, const Box& box, Worker& worker, Account& placed) {
  const Tensor &from = job.from(planned), &to = job.to(planned);
  const DeviceBuffer stored = worker.stored->buffer();
  const std::size_t bytes = bytes_of(box, from.dtype);
  TRY(job.source.read(job.plan.tensors[planned].from, box, stored.host.first(bytes), worker.scratch));
  Stream& stream = *worker.stream;
  Digest digest;
  TRY(run_on(stream, [&]() -> Status {
    TRY(stream.upload(stored, static_cast<Index>(bytes)));
    const std::byte* elements = stored.device.data();
    if (from.dtype != to.dtype) {
      std::byte* converted = worker.converted->buffer().device.data();
      TRY(stream.convert(from.dtype, to.dtype, elements, converted, volume(box)));
      elements = converted;
    }
    TRY(stream.digest_box(to.shape, box, byte_size(to.dtype), elements, &digest));
    return job.landings.place(planned, box, elements, stream);
  }));
  placed.add(planned, digest);
  placed.add_read(static_cast<Index>(bytes));
  return {};
}

// ---- all ranks together

class Together {
 public:
  Together(const LoadJob& job, Index extra) : job_(job), extra_(extra) {}
  ~Together() { (void)settle(); }
  Together(const Together&) = delete;
  Together& operator=(const Together&) = delete;

  Result<LoadDigests> run() {
    TRY(prepare());
    int half = 0;
    ExchangeRound rounds[2];
    bool is_under_way = false;
    for (; schedule_->next(rounds[half]); half = 1 - half) {
      TRY(read(rounds[half], half));
      TRY(settle());
      TRY(start(rounds[half], half));
      if (is_under_way) TRY(place(rounds[1 - half], 1 - half));
      is_under_way = true;
    }
    TRY(settle());
    if (is_under_way) TRY(place(rounds[1 - half], 1 - half));
    out_.bytes_read = read_.bytes_read();
    return std::move(out_);
  }

 private:
  // Of one thread.
  struct Buffers {
    std::vector<std::byte> stored, scratch, converted;
    std::unique_ptr<Stream> stream;
  };

  // The ranks agree on the size of slabs and rounds: the smallest that any of them has room for.
  Status prepare() {
    std::vector<WalkItem> items;
    for (std::size_t p = 0; p < job_.plan.tensors.size(); ++p) items.push_back(item_of(job_, p, std::nullopt));
    const Index larger = std::max<Index>(1, extra_);
    const LoadMemory memory = TRY(plan_load_memory(job_, items, 2 + extra_, 4 * larger));
    WorkList slabs(items, job_.source.catalog(), TRY(minimum(job_.ranks, memory.slab_bytes)));
    const Index slab = std::max(kMinSlab, slabs.largest());
    const Index workers = memory.threads * ((2 + extra_) * slab + decoding_memory(job_.source.catalog()));
    const Index room = std::clamp((job_.memory - workers) / 4, larger * slab, std::max(larger * slab, kMaxRound));
    const Index limit = TRY(minimum(job_.ranks, room));
    schedule_.emplace(job_.plan, job_.target_view, job_.target, std::move(slabs), static_cast<int>(job_.rank), limit);
    for (int half = 0; half < 2; ++half) {
      sent_.push_back(TRY(job_.device.allocate(limit)));
      received_.push_back(TRY(job_.device.allocate(limit)));
    }
    workers_.resize(static_cast<std::size_t>(memory.threads));
    for (Buffers& b : workers_) {
      b.stored.resize(static_cast<std::size_t>(slab));
      b.scratch.resize(static_cast<std::size_t>(slab + File::kDirectUnit));
      b.converted.resize(static_cast<std::size_t>(extra_ * slab));
      b.stream = TRY(job_.device.stream());
    }
    return {};
  }

  int threads() const { return static_cast<int>(workers_.size()); }

  Status read(const ExchangeRound& round, int half) {
    const MutableBytes to = sent_[static_cast<std::size_t>(half)]->buffer().host;
    return parallel_for(std::ssize(round.reads), threads(), [&](int thread, Index i) -> Status {
      TRY(go_on(job_));
      const ExchangeRound::Read& r = round.reads[static_cast<std::size_t>(i)];
      return read_slab(r, workers_[static_cast<std::size_t>(thread)], to.data() + r.offset);
    });
  }

  Status read_slab(const ExchangeRound::Read& r, Buffers& b, std::byte* packed) {
    const Tensor &from = job_.from(r.planned), &to = job_.to(r.planned);
    const MutableBytes stored = MutableBytes(b.stored).first(bytes_of(r.slab, from.dtype));
    TRY(job_.source.read(job_.plan.tensors[r.planned].from, r.slab, stored, b.scratch));
    const std::byte* elements = stored.data();
    if (from.dtype != to.dtype) {
      convert(from.dtype, to.dtype, stored.data(), b.converted.data(), volume(r.slab));
      elements = b.converted.data();
    }
    const Index element = byte_size(to.dtype);
    read_.add(r.planned, digest_box(to.shape, r.slab, element, elements));
    read_.add_read(static_cast<Index>(stored.size()));
    const Dims strides = row_major_strides(r.slab.shape);
    for (const Box& piece : schedule_->packing_order(r.planned, r.slab)) {
      copy_box(piece.shape, element, elements + offset_in(r.slab, strides, piece) * element, strides, packed,
               row_major_strides(piece.shape));
      packed += bytes_of(piece, to.dtype);
    }
    return {};
  }

  Status start(const ExchangeRound& round, int half) {
    const MutableBytes sent = sent_[static_cast<std::size_t>(half)]->buffer().host,
                       received = received_[static_cast<std::size_t>(half)]->buffer().host;
    const auto bytes = [](MutableBytes buffer, const ExchangeRound::Message& m) {
      return buffer.subspan(static_cast<std::size_t>(m.offset), static_cast<std::size_t>(m.bytes));
    };
    std::vector<Outgoing> out;
    std::vector<Incoming> in;
    for (const ExchangeRound::Message& m : round.out) out.push_back({m.peer, bytes(sent, m)});
    for (const ExchangeRound::Message& m : round.in) in.push_back({m.peer, bytes(received, m)});
    out_.bytes_received += round.received_bytes;
    under_way_ = TRY(job_.ranks->start(std::move(out), std::move(in)));
    return {};
  }

  // Waits for the messages under way, if any. When others have failed they may still be, for ever: then the memory that
  // they are in is left to the process.
  Status settle() {
    const auto transfer = std::move(under_way_);
    Status done = transfer ? transfer->wait() : Status();
    if (done) return done;
    leave_behind(std::move(sent_));
    leave_behind(std::move(received_));
    return done;
  }

  Status place(const ExchangeRound& round, int half) {
    const DeviceBuffer sent = sent_[static_cast<std::size_t>(half)]->buffer(),
                       received = received_[static_cast<std::size_t>(half)]->buffer();
    return parallel_for(std::ssize(round.arrivals), threads(), [&](int thread, Index i) -> Status {
      TRY(go_on(job_));
      const ExchangeRound::Arrival& a = round.arrivals[static_cast<std::size_t>(i)];
      const DeviceBuffer& buffer = a.is_own ? sent : received;
      const auto offset = static_cast<std::size_t>(a.offset), bytes = static_cast<std::size_t>(a.bytes);
      return place_arrival(a, {buffer.host.subspan(offset, bytes), buffer.device.subspan(offset, bytes)},
                           *workers_[static_cast<std::size_t>(thread)].stream);
    });
  }

  Status place_arrival(const ExchangeRound::Arrival& a, const DeviceBuffer& buffer, Stream& stream) {
    const Tensor& to = job_.to(a.planned);
    std::vector<Digest> digests(a.pieces.size());
    TRY(run_on(stream, [&]() -> Status {
      TRY(stream.upload(buffer, a.bytes));
      const std::byte* elements = buffer.device.data();
      for (std::size_t i = 0; i < a.pieces.size(); ++i) {
        TRY(stream.digest_box(to.shape, a.pieces[i], byte_size(to.dtype), elements, &digests[i]));
        TRY(job_.landings.place(a.planned, a.pieces[i], elements, stream));
        elements += bytes_of(a.pieces[i], to.dtype);
      }
      return {};
    }));
    for (const Digest& digest : digests) placed_.add(a.planned, digest);
    return {};
  }

  const LoadJob& job_;
  Index extra_;  // room for converting, in slabs
  LoadDigests out_{std::vector<Digest>(job_.plan.tensors.size()), std::vector<Digest>(job_.plan.tensors.size())};
  Account read_{job_, out_.read}, placed_{job_, out_.placed};
  std::optional<ExchangeSchedule> schedule_;
  std::vector<std::unique_ptr<Device::Memory>> sent_, received_;  // two each: one travels while the other is filled
  std::vector<Buffers> workers_;
  std::unique_ptr<Transfer> under_way_;
};

}  // namespace

Result<LoadDigests> load_direct(const LoadJob& job) {
  const auto [items, planned] = landing_items(job);
  const Index extra = growth(job);
  const LoadMemory memory = TRY(plan_load_memory(job, items, 2 + extra, 0));
  const WorkList slabs(items, job.source.catalog(), memory.slab_bytes);
  const Index slab = std::max(kMinSlab, slabs.largest());
  LoadDigests out;
  out.placed.resize(job.plan.tensors.size());
  Account placed(job, out.placed);
  std::vector<Worker> workers(static_cast<std::size_t>(std::clamp<Index>(slabs.total(), 1, memory.threads)));
  for (Worker& worker : workers) {
    worker.stored = TRY(job.device.allocate(slab));
    worker.converted = extra > 0 ? TRY(job.device.allocate(extra * slab)) : nullptr;
    worker.scratch.resize(static_cast<std::size_t>(slab + File::kDirectUnit));
    worker.stream = TRY(job.device.stream());
  }
  TRY(parallel_for(slabs.total(), static_cast<int>(workers.size()), [&, &of = planned](int thread, Index k) -> Status {
    TRY(go_on(job));
    const WalkSlab s = slabs.get(k);
    return load_slab(job, of[s.item], s.box, workers[static_cast<std::size_t>(thread)], placed);
  }));
  out.bytes_read = placed.bytes_read();
  out.read = out.placed;
  return out;
}

Result<LoadDigests> load_together(const LoadJob& job) { return Together(job, growth(job)).run(); }

}  // namespace reshard
