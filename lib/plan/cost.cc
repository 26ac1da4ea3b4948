#include "lib/plan/cost.h"

#include <algorithm>
#include <cstdio>
#include <unordered_map>

#include "lib/base/text.h"
#include "lib/checkpoint/fragment_index.h"

namespace reshard {
namespace {

constexpr Index kLongRun = Index{8} << 20;  // bytes of a read where a file is read from end to end
// What a rank works on at a time, in bytes: 256 KiB of each of the pieces that lie side by side (lib/engine/run.cc).
constexpr Index kSlab = Index{1} << 20;
constexpr Index kPiece = Index{256} << 10;

double as_double(Index n) { return static_cast<double>(n); }

// n / parts, rounded up, where parts is a number of ranks.
Index share(Index n, Index ranks) { return ceil_div(n, ranks); }

// What a plan takes of one source file.
struct FileUse {
  Index begin = INT64_MAX;  // of the span of all items
  Index end = 0;
  Index bytes = 0;
  Index items = 0;
};

// Reads of all that is wanted of a file: from end to end where at least half of that is wanted.
Index reads_of(const FileUse& use) {
  const Index span = use.end - use.begin;
  return use.bytes * 2 >= span ? ceil_div(span, kLongRun) : use.items;
}

// Calls visit(extent, bytes) for each stored item and what of it belongs to the tensor. A view may have cut one into
// several fragments, one after the other.
template <class Visit>
void each_item(const Tensor& tensor, Visit visit) {
  const FragmentList& fragments = tensor.fragments;
  Index elements = 0;
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    elements += volume(fragments.box(i));
    if (i + 1 < fragments.size() && fragments.extent(i + 1) == fragments.extent(i)) continue;
    visit(fragments.extent(i), elements * byte_size(tensor.dtype));
    elements = 0;
  }
}

// In how many pieces the shards hold a box of whole rows.
Index columns(const FragmentList& fragments, const Dims& shape) {
  Index widest = 0, row = 1;
  for (int d = 1; d < shape.rank(); ++d) row *= shape[d];
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    const Box box = fragments.box(i);
    Index width = 1;
    for (int d = 1; d < box.rank(); ++d) width *= box.shape[d];
    if (!box.empty()) widest = std::max(widest, width);
  }
  return widest == 0 ? 1 : ceil_div(row, widest);
}

// Bytes from the first to the last element of a part of a fragment, gaps included.
Index span_bytes(const Dims& shape, const Dims& strides, Index element_bytes) {
  Index last = 0;
  for (int d = 0; d < shape.rank(); ++d) last += (shape[d] - 1) * strides[d];
  return (last + 1) * element_bytes;
}

// What reading every box of a target tensor takes.
struct LoadWork {
  Index bytes_needed = 0;
  Index bytes_read = 0;  // with what lies between them
  Index requests = 0;
  Index moves = 0;

  LoadWork& operator+=(const LoadWork& o) {
    bytes_needed += o.bytes_needed;
    bytes_read += o.bytes_read;
    requests += o.requests;
    moves += o.moves;
    return *this;
  }
};

LoadWork count_load(const Tensor& from, const Tensor& to) {
  LoadWork work;
  const FragmentIndex sources(from.fragments);
  const auto count = [&](const FragmentList& boxes) {
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const Box box = boxes.box(i);
      if (box.empty()) continue;
      work.bytes_needed += volume(box) * byte_size(from.dtype);
      sources.overlapping(box, [&](std::size_t fragment, const Box& both) {
        const Index bytes = span_bytes(both.shape, from.fragments.get(fragment).strides, byte_size(from.dtype));
        work.bytes_read += bytes;
        work.requests += ceil_div(bytes, kSlab);
        ++work.moves;
      });
    }
  };
  count(to.fragments);
  count(to.replicas);
  return work;
}

// Layers have tensors that are cut alike: they are counted once.
class LoadCounter {
 public:
  LoadWork count(const Tensor& from, const Tensor& to) {
    const std::uint64_t key = from.fragments.hash_of_boxes() * 31 + to.fragments.hash_of_boxes();
    for (const Known& k : known_[key])
      if (is_alike(*k.from, from) && is_alike(*k.to, to)) return k.work;
    const LoadWork work = count_load(from, to);
    known_[key].push_back({&from, &to, work});
    return work;
  }

 private:
  struct Known {
    const Tensor *from, *to;
    LoadWork work;
  };
  static bool is_alike(const Tensor& a, const Tensor& b) {
    return a.dtype == b.dtype && a.shape == b.shape && a.fragments.has_boxes_of(b.fragments) &&
           a.replicas.has_boxes_of(b.replicas) &&
           (a.fragments.empty() || a.fragments.get(0).strides == b.fragments.get(0).strides);
  }

  std::unordered_map<std::uint64_t, std::vector<Known>> known_;
};

// Counts the files that each rank opens when the source's items are dealt out in order, evenly by bytes.
class Opens {
 public:
  Opens(std::size_t files, Index total_bytes, Index ranks)
      : last_rank_(files, -1), opens_(static_cast<std::size_t>(ranks)), total_(std::max<Index>(1, total_bytes)) {}

  void add(std::uint32_t file, Index bytes) {
    const auto ranks = as_double(static_cast<Index>(opens_.size()));
    const auto rank_at = [&](Index at) {
      return std::min(static_cast<Index>(as_double(at) / as_double(total_) * ranks),
                      static_cast<Index>(opens_.size()) - 1);
    };
    const Index first = std::max(rank_at(done_), last_rank_[file] + 1);
    done_ += bytes;
    const Index last = rank_at(std::max<Index>(0, done_ - 1));
    for (Index rank = first; rank <= last; ++rank) ++opens_[static_cast<std::size_t>(rank)];
    last_rank_[file] = std::max(last_rank_[file], last);
  }
  Index most() const { return *std::max_element(opens_.begin(), opens_.end()); }
  Index total() const {
    Index sum = 0;
    for (const Index n : opens_) sum += n;
    return sum;
  }

 private:
  std::vector<Index> last_rank_;  // of each file: the last rank that opens it
  std::vector<Index> opens_;
  Index total_;
  Index done_ = 0;
};

std::string times(double n) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f times", n);
  return text;
}

std::string reason_for(const JobWork& work, const Choice& choice) {
  if (work.ranks == 1) return "one rank has nobody to exchange with";
  const double read_again = as_double(work.direct.total_bytes_read) / std::max(1.0, as_double(work.source_bytes));
  const std::string amplified = "reads every byte " + times(read_again);
  const std::string reads = human_seconds(choice.direct.read) + " of reading, where exchange reads for " +
                            human_seconds(choice.exchange.read) + " and sends for " +
                            human_seconds(choice.exchange.traffic + choice.exchange.copies);
  if (choice.strategy == Strategy::kExchange) {
    if (read_again >= 1.25) return "direct " + amplified + ": " + reads;
    return "direct takes " + count_of(work.direct.requests, "read") + " and opens " +
           count_of(work.direct.opens, "file") + " a rank: " + reads;
  }
  if (read_again < 1.25 && choice.direct.read <= choice.exchange.read * 1.25)
    return "every byte is read once either way, and nothing has to travel";
  return "direct " + (read_again >= 1.25 ? amplified : "takes more reads") + ", but exchanging costs more: " + reads;
}

// Reads of whole rows, slab by slab; each stored item that a slab ends in is read in two.
Index slab_reads(const Tensor& tensor, Index items) {
  const Index pieces = columns(tensor.fragments, tensor.shape);
  return items + ceil_div(tensor.bytes(), std::clamp(kPiece * pieces, kSlab, kLongRun)) * pieces;
}

// Files that a rank opens to make `moves` moves: the stored items of one file are taken to serve the same ranks, as
// they do where both sides are cut regularly.
Index files_for(Index moves, Index items, Index files) {
  return std::min(files, ceil_div(moves * files, std::max<Index>(1, items)));
}

// What is taken of the source, each byte once.
struct SourceUse {
  std::vector<FileUse> files;
  Index items = 0;
  Index used_files = 0;
  Index long_reads = 0;

  explicit SourceUse(std::size_t n) : files(n) {}
  void add(const Extent& extent, Index bytes) {
    FileUse& use = files[extent.file];
    use.begin = std::min(use.begin, extent.offset);
    use.end = std::max(use.end, extent.offset + extent.length);
    use.bytes += bytes;
    ++use.items;
    ++items;
  }
  void sum_up() {
    for (const FileUse& use : files) {
      if (use.items == 0) continue;
      ++used_files;
      long_reads += reads_of(use);
    }
  }
};

void count_exchange(const SourceUse& use, Index needed, JobWork& out) {
  Work& w = out.exchange;
  w.total_bytes_read = out.source_bytes;
  w.bytes_read = share(out.source_bytes, out.ranks);
  w.requests = share(use.long_reads, out.ranks);
  w.opens = share(use.used_files, out.ranks);
  w.total_opens = use.used_files;
  const Index mine = share(needed, out.ranks);
  w.bytes_sent = w.bytes_received = mine - share(mine, out.ranks);
  w.messages = (out.ranks - 1) * std::max<Index>(1, ceil_div(mine, kLongRun * out.ranks));
}

// Every byte once, in slabs that are dealt out in order.
JobWork convert_work(const Plan& plan, const Catalog& source, Index ranks) {
  JobWork out{ranks, plan.bytes_read, {}, {}};
  SourceUse use(source.files.size());
  Opens opens(source.files.size(), plan.bytes_read, ranks);
  Index requests = 0;
  for (const PlannedTensor& planned : plan.tensors) {
    const Tensor& from = source.tensors()[planned.from];
    const Index before = use.items;
    each_item(from, [&](const Extent& extent, Index bytes) {
      use.add(extent, bytes);
      opens.add(extent.file, bytes);
    });
    requests += slab_reads(from, use.items - before);
  }
  use.sum_up();
  Work& w = out.direct;
  w.total_bytes_read = plan.bytes_read;
  w.bytes_read = share(plan.bytes_read, ranks);
  w.requests = share(requests, ranks);
  w.opens = opens.most();
  w.total_opens = opens.total();
  count_exchange(use, plan.bytes_read, out);
  w.total_bytes_written = out.exchange.total_bytes_written = plan.bytes_written;
  w.bytes_written = out.exchange.bytes_written = share(plan.bytes_written, ranks);
  return out;
}

// Every box of the target, wherever it is.
JobWork load_work(const Plan& plan, const Catalog& source, const Catalog& target, Index ranks) {
  JobWork out{ranks, plan.bytes_read, {}, {}};
  SourceUse use(source.files.size());
  LoadCounter loads;
  LoadWork all;
  for (const PlannedTensor& planned : plan.tensors) {
    const Tensor& from = source.tensors()[planned.from];
    each_item(from, [&](const Extent& extent, Index bytes) { use.add(extent, bytes); });
    all += loads.count(from, target.tensors()[planned.to]);
  }
  use.sum_up();
  Work& w = out.direct;
  w.total_bytes_read = all.bytes_read;
  w.bytes_read = share(all.bytes_read, ranks);
  w.requests = share(all.requests, ranks);
  w.opens = files_for(share(all.moves, ranks), use.items, use.used_files);
  w.total_opens = w.opens * ranks;
  count_exchange(use, all.bytes_needed, out);
  return out;
}

}  // namespace

std::string_view strategy_name(Strategy strategy) { return strategy == Strategy::kDirect ? "direct" : "exchange"; }

CostParameters CostParameters::one_machine(Index ranks) {
  CostParameters p;
  p.file_system = p.rank_read;
  p.request = 11e-6;
  p.open = 10e-6;
  p.file_system_opens = 1e6;
  p.network /= as_double(ranks);
  p.copy /= as_double(ranks);
  p.message = 2e-6;
  return p;
}

double Estimate::slowest() const { return std::max({read, traffic, copies, write}); }

std::string to_string(const Estimate& e) {
  return human_seconds(e.seconds()) + " (read " + human_seconds(e.read) + ", traffic " + human_seconds(e.traffic) +
         ", copies " + human_seconds(e.copies) + ", write " + human_seconds(e.write) + ")";
}

Estimate estimate(const Work& work, const CostParameters& p) {
  Estimate e;
  e.read = std::max(as_double(work.bytes_read) / p.rank_read, as_double(work.total_bytes_read) / p.file_system) +
           as_double(work.requests) * p.request +
           std::max(as_double(work.opens) * p.open, as_double(work.total_opens) / p.file_system_opens);
  e.traffic =
      as_double(std::max(work.bytes_sent, work.bytes_received)) / p.network + as_double(work.messages) * p.message;
  e.copies = as_double(work.bytes_sent + work.bytes_received) / p.copy;
  e.write = std::max(as_double(work.bytes_written) / p.rank_write, as_double(work.total_bytes_written) / p.file_system);
  return e;
}

Choice choose(const JobWork& work, const CostParameters& parameters) {
  Choice choice;
  choice.direct = estimate(work.direct, parameters);
  choice.exchange = estimate(work.exchange, parameters);
  if (work.ranks > 1 && choice.exchange.seconds() < choice.direct.seconds()) choice.strategy = Strategy::kExchange;
  choice.reason = reason_for(work, choice);
  return choice;
}

JobWork job_work(const Plan& plan, const Catalog& source, const Catalog& target, Index ranks, JobKind job) {
  return job == JobKind::kConvert ? convert_work(plan, source, ranks) : load_work(plan, source, target, ranks);
}

}  // namespace reshard
