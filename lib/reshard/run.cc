#include "lib/reshard/run.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <mutex>

#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/convert.h"

namespace reshard {
namespace {

constexpr Index kMinSlab = Index{256} << 10;
constexpr Index kUsualSlab = Index{1} << 20;
constexpr Index kMaxSlab = Index{8} << 20;
constexpr Index kPieceBytes = Index{256} << 10;  // what one column of a slab should hold at least
constexpr Index kProcess = Index{12} << 20;      // code, stacks, and what the allocator keeps

Index resident_bytes() {
  long pages = 0, resident = 0;
  if (std::FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%ld %ld", &pages, &resident) != 2) resident = 0;
    std::fclose(f);
  }
  return static_cast<Index>(resident) * ::sysconf(_SC_PAGESIZE);
}

// Buffers of one thread, in one mapping.
class Arena {
 public:
  static Result<Arena> make(Index bytes) {
    void* p =
        ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return io_error("cannot get " + human_bytes(bytes) + " of memory");
    return Arena(static_cast<std::byte*>(p), static_cast<std::size_t>(bytes));
  }
  Arena(Arena&& o) noexcept : memory_(o.memory_), size_(o.size_), used_(o.used_) { o.memory_ = nullptr; }
  Arena& operator=(Arena&&) = delete;
  ~Arena() {
    if (memory_) ::munmap(memory_, size_);
  }
  MutableBytes take(Index bytes) {
    const MutableBytes out(memory_ + used_, static_cast<std::size_t>(bytes));
    used_ += static_cast<std::size_t>(ceil_div(bytes, File::kDirectUnit) * File::kDirectUnit);
    return out;
  }

 private:
  Arena(std::byte* memory, std::size_t size) : memory_(memory), size_(size) {}
  std::byte* memory_;
  std::size_t size_;
  std::size_t used_ = 0;
};

// One tensor's share of a walk.
struct Work {
  Slabs slabs;
  Dims origin;      // of the part that is walked over
  Index first = 0;  // number of its first slab in the whole walk
};

// Hands out the slabs of many tensors in order.
class WorkList {
 public:
  void add(Slabs slabs, const Dims& origin) {
    work_.push_back({slabs, origin, total_});
    total_ += slabs.count();
    largest_ = std::max(largest_, slabs.max_bytes());
  }
  Index total() const { return total_; }
  Index largest() const { return largest_; }

  // The tensor (in order of add) and box of slab k.
  std::pair<std::size_t, Box> get(Index k) const {
    auto it = std::upper_bound(work_.begin(), work_.end(), k, [](Index n, const Work& w) { return n < w.first; });
    --it;
    Box box = it->slabs.slab(k - it->first);
    for (int d = 0; d < box.rank(); ++d) box.origin[d] += it->origin[d];
    return {static_cast<std::size_t>(it - work_.begin()), box};
  }

 private:
  std::vector<Work> work_;
  Index total_ = 0;
  Index largest_ = 0;
};

Index wanted_slab(Index columns, Index limit) {
  return std::clamp(kPieceBytes * columns, std::min(kUsualSlab, limit), limit);
}

// One thread's memory.
struct Buffers {
  MutableBytes slab, scratch, extra;
};

// Digest of one box, added under a lock to its tensor's.
class Proofs {
 public:
  explicit Proofs(std::size_t n) : proofs_(n) {}
  void add(std::size_t i, const Digest& source, const Digest& target) {
    const std::lock_guard lock(mutex_);
    proofs_[i].source += source;
    proofs_[i].target += target;
  }
  std::vector<TensorProof> take() { return std::move(proofs_); }

 private:
  std::mutex mutex_;
  std::vector<TensorProof> proofs_;
};

Index ratio(DType from, DType to) { return std::max<Index>(1, ceil_div(byte_size(to), byte_size(from))); }

// One tensor of a walk.
struct Item {
  std::size_t tensor = 0;
  DType as = DType::kFloat32;  // what its elements are converted to
  Index row_group = 1;
  Index columns = 1;
  std::optional<Box> part = std::nullopt;  // nothing: all of the tensor
};
Box part_of(const Item& item, const Tensor& tensor) { return item.part ? *item.part : whole(tensor.shape); }

// Receives a slab after conversion. buffers.scratch is free to use; so is buffers.extra where nothing was converted.
using Sink = std::function<Status(std::size_t item, const Box& box, Bytes elements, const Buffers& buffers)>;

// The largest slab that cannot be made smaller.
Index largest_group(const std::vector<Item>& items, const Catalog& source) {
  Index largest = 0;
  for (const Item& item : items) {
    const Tensor& t = source.tensors()[item.tensor];
    const Dims shape = part_of(item, t).shape;
    largest = std::max(largest, Slabs(shape, byte_size(t.dtype), 1, item.row_group).max_bytes());
  }
  return largest;
}

// What copying by a plan walks over, and the room it needs beside a slab.
struct CopyItems {
  std::vector<Item> items;
  Index extra = 0;
};
CopyItems copy_items(const Plan& plan, const Catalog& source, const Catalog& target) {
  CopyItems out;
  for (const PlannedTensor& p : plan.tensors) {
    const Tensor &from = source.tensors()[p.from], &to = target.tensors()[p.to];
    out.items.push_back({p.from, to.dtype, std::max(from.row_group, to.row_group), column_count(to.fragments)});
    if (from.dtype != to.dtype) out.extra = std::max(out.extra, ratio(from.dtype, to.dtype));
  }
  return out;
}

// Reads every element of the items once, digests it before and after conversion, and hands it on. `extra` is the room,
// in bytes for each byte of a slab, that conversion or the sink need beside it.
Result<std::vector<TensorProof>> walk(const std::vector<Item>& items, TensorSource& source, Index extra,
                                      const RunOptions& options, const Sink& sink) {
  const auto& tensors = source.catalog().tensors();
  const MemoryPlan memory =
      TRY(plan_memory(options, largest_group(items, source.catalog()), extra, decoding_memory(source.catalog())));
  WorkList list;
  for (const Item& item : items) {
    const Tensor& t = tensors[item.tensor];
    const Box part = part_of(item, t);
    const Index wanted = wanted_slab(item.columns, memory.slab_bytes);
    list.add(Slabs(part.shape, byte_size(t.dtype), wanted, item.row_group), part.origin);
  }
  const Index slab = std::max(kMinSlab, list.largest());
  const int threads = static_cast<int>(std::clamp<Index>(list.total(), 1, worker_count(options)));
  std::vector<Arena> arenas;
  std::vector<Buffers> buffers;
  for (int t = 0; t < threads; ++t) {
    Arena arena = TRY(Arena::make((2 + extra) * slab + 4 * File::kDirectUnit));
    const MutableBytes in = arena.take(slab), scratch = arena.take(slab + File::kDirectUnit);
    buffers.push_back({in, scratch, arena.take(extra * slab)});
    arenas.push_back(std::move(arena));
  }

  Proofs proofs(items.size());
  std::atomic<Index> done{0};
  TRY(parallel_for(list.total(), threads, [&](int thread, Index k) -> Status {
    if (options.interrupt && *options.interrupt) return io_error("interrupted");
    const auto [i, box] = list.get(k);
    const Item& item = items[i];
    const Tensor& t = tensors[item.tensor];
    const Buffers& b = buffers[static_cast<std::size_t>(thread)];
    const MutableBytes in = b.slab.first(static_cast<std::size_t>(volume(box) * byte_size(t.dtype)));
    TRY(source.read(item.tensor, box, in, b.scratch));
    const Digest before = digest_box(t.shape, box, byte_size(t.dtype), in.data());
    Bytes out = in;
    Digest after = before;
    if (t.dtype != item.as) {
      const MutableBytes converted = b.extra.first(static_cast<std::size_t>(volume(box) * byte_size(item.as)));
      convert(t.dtype, item.as, in.data(), converted.data(), volume(box));
      after = digest_box(t.shape, box, byte_size(item.as), converted.data());
      out = converted;
    }
    if (sink) TRY(sink(i, box, out, b));
    proofs.add(i, before, after);
    const Index so_far = done += static_cast<Index>(in.size());
    if (options.progress) options.progress(so_far);
    return {};
  }));
  TRY(source.finish(buffers.front().scratch));
  return proofs.take();
}

}  // namespace

int worker_count(const RunOptions& options) { return options.threads > 0 ? options.threads : 2 * thread_count(0); }

Result<MemoryPlan> plan_memory(const RunOptions& options, Index largest_group, Index extra, Index decoding) {
  MemoryPlan plan;
  plan.now = resident_bytes();
  const Index fixed = plan.now + kProcess + worker_count(options) * (options.worker_bytes + decoding);
  const Index per_slab_byte = worker_count(options) * (2 + extra);
  const Index smallest = std::max(kMinSlab, largest_group);
  const Index needed = fixed + per_slab_byte * smallest;
  if (options.memory < needed)
    return usage_error("--memory " + human_bytes(options.memory) + " is too small: this job needs at least " +
                       human_bytes(needed) + " on " + std::to_string(worker_count(options)) + " threads");
  const Index room = (options.memory - fixed) / per_slab_byte;
  plan.slab_bytes = std::max(smallest, std::min(room, kMaxSlab));
  plan.peak = fixed + per_slab_byte * plan.slab_bytes;
  return plan;
}

Result<MemoryPlan> copy_memory(const Plan& plan, const Catalog& source, const Catalog& target,
                               const RunOptions& options) {
  const CopyItems copy = copy_items(plan, source, target);
  return plan_memory(options, largest_group(copy.items, source), copy.extra, decoding_memory(source));
}

Result<std::vector<TensorProof>> copy_tensors(const Plan& plan, TensorSource& source, const Catalog& target,
                                              Output& output, const RunOptions& options) {
  CopyItems copy = copy_items(plan, source.catalog(), target);
  std::vector<FragmentIndex> index, copies;
  for (std::size_t i = 0; i < copy.items.size(); ++i) {
    copy.items[i].columns = std::max(copy.items[i].columns, source.columns(copy.items[i].tensor));
    const Tensor& to = target.tensors()[plan.tensors[i].to];
    index.emplace_back(to.fragments);
    copies.emplace_back(to.replicas);
  }
  return walk(copy.items, source, copy.extra, options,
              [&](std::size_t i, const Box& box, Bytes elements, const Buffers& buffers) -> Status {
                const Tensor& to = target.tensors()[plan.tensors[i].to];
                TRY(output.write(to.fragments, index[i], box, byte_size(to.dtype), elements, buffers.scratch));
                if (to.replicas.empty()) return {};
                return output.write(to.replicas, copies[i], box, byte_size(to.dtype), elements, buffers.scratch);
              });
}

Result<std::vector<TensorProof>> digest_tensors(const std::vector<DigestRequest>& requests, TensorSource& source,
                                                const RunOptions& options, const BoxVisit& visit) {
  std::vector<Item> items;
  Index extra = 0;
  for (const DigestRequest& r : requests) {
    const Tensor& t = source.catalog().tensors()[r.tensor];
    items.push_back({r.tensor, r.as, t.row_group, source.columns(r.tensor)});
    if (t.dtype != r.as) extra = std::max(extra, ratio(t.dtype, r.as));
  }
  if (!visit) return walk(items, source, extra, options, nullptr);
  return walk(items, source, extra, options,
              [&](std::size_t i, const Box& box, Bytes elements, const Buffers&) -> Status {
                visit(i, box, elements);
                return {};
              });
}

Status visit_pairs(const std::vector<PairRequest>& requests, TensorSource& a, TensorSource& b,
                   const RunOptions& options, const PairVisit& visit) {
  std::vector<Item> items;
  Index extra = 1;
  for (const PairRequest& r : requests) {
    const Tensor &ta = a.catalog().tensors()[r.a], &tb = b.catalog().tensors()[r.b];
    const Index columns = r.box ? 1 : std::max(a.columns(r.a), b.columns(r.b));
    items.push_back({r.a, ta.dtype, std::max(ta.row_group, tb.row_group), columns, r.box});
    extra = std::max(extra, ratio(ta.dtype, tb.dtype));
  }
  TRY(walk(items, a, extra, options,
           [&](std::size_t i, const Box& box, Bytes elements, const Buffers& buffers) -> Status {
             const Tensor& tb = b.catalog().tensors()[requests[i].b];
             const auto other = buffers.extra.first(static_cast<std::size_t>(volume(box) * byte_size(tb.dtype)));
             TRY(b.read(requests[i].b, box, other, buffers.scratch));
             visit(i, box, elements, other);
             return {};
           }));
  std::vector<std::byte> scratch(static_cast<std::size_t>(kMinSlab));
  return b.finish(scratch);
}

}  // namespace reshard
