// SPDX-License-Identifier: Apache-2.0
#include "lib/plan/cost.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "lib/base/text.h"

namespace reshard {
namespace {

// The size of a read in a file that is read sequentially, in bytes.
constexpr Index kLongRun = Index{8} << 20;
// The bytes that a rank processes at a time: 256 KiB of each of the pieces side by side (lib/engine).
constexpr Index kSlab = Index{1} << 20;
constexpr Index kPiece = Index{256} << 10;

// Costs in seconds. docs/cluster.md explains where they come from.
struct CostRates {
  double read, open;      // per rank
  double open_of_all;     // for a file system that serves all ranks
  double byte_exchanged;  // packed, sent, received and unpacked
};
constexpr CostRates kCluster = {33e-6, 200e-6, 20e-6, 1 / 12e9 + 2 / 8e9};
CostRates one_machine_with(Index ranks) {
  return {11e-6, 10e-6, 1e-6, kCluster.byte_exchanged * static_cast<double>(ranks)};
}

void estimate(StrategyCost& cost, const CostRates& prices) {
  const auto times = [](Index n, double price) { return static_cast<double>(n) * price; };
  cost.seconds = times(cost.reads, prices.read) +
                 std::max(times(cost.opens, prices.open), times(cost.total_opens, prices.open_of_all)) +
                 times(cost.bytes_sent, prices.byte_exchanged);
}

// What a plan reads from one source file.
struct FileUse {
  Index begin = std::numeric_limits<Index>::max();  // of the range that contains all items
  Index end = 0;
  Index bytes = 0;
  Index items = 0;

  // Sequential if at least half of the range is needed.
  Index long_reads() const { return bytes * 2 >= end - begin ? ceil_div(end - begin, kLongRun) : items; }
};

// Returns the number of shards among which a box of whole rows is divided.
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

// Returns the number of reads of whole rows, slab by slab. A stored item at the end of a slab takes two.
Index slab_reads(const Tensor& tensor, Index items) {
  const Index pieces = columns(tensor.fragments, tensor.shape);
  return items + ceil_div(tensor.bytes(), std::clamp(kPiece * pieces, kSlab, kLongRun)) * pieces;
}

// Counts the files that each rank opens if the source's items are divided in order, evenly by bytes.
class FileOpens {
 public:
  FileOpens(std::size_t files, Index total_bytes, Index ranks)
      : last_rank_(files, -1), opens_(ranks), total_(std::max<Index>(1, total_bytes)) {}

  void add(std::uint32_t file, Index bytes) {
    const Index first = std::max(rank_at(done_), last_rank_[file] + 1);
    done_ += bytes;
    const Index last = rank_at(std::max<Index>(0, done_ - 1));
    for (Index rank = first; rank <= last; ++rank) ++opens_[rank];
    last_rank_[file] = std::max(last_rank_[file], last);
  }
  void count(StrategyCost& cost) const {
    for (const Index n : opens_) {
      cost.opens = std::max(cost.opens, n);
      cost.total_opens += n;
    }
  }

 private:
  Index rank_at(Index at) const {
    const Index ranks = std::ssize(opens_);
    const double share = static_cast<double>(at) / static_cast<double>(total_);
    return std::min(static_cast<Index>(share * static_cast<double>(ranks)), ranks - 1);
  }

  std::vector<Index> last_rank_;  // of each file: the last rank that opens it
  std::vector<Index> opens_;
  Index total_;
  Index done_ = 0;
};

void count(const Plan& plan, const Catalog& source, Index ranks, StrategyChoice& out) {
  std::vector<FileUse> files(source.files.size());
  FileOpens opens(source.files.size(), plan.bytes_read, ranks);
  Index reads = 0;
  for (const PlannedTensor& planned : plan.tensors) {
    const Tensor& tensor = source.tensors()[planned.from];
    const FragmentList& fragments = tensor.fragments;
    Index items = 0, elements = 0;
    for (std::size_t i = 0; i < fragments.size(); ++i) {
      const Extent& extent = fragments.extent(i);
      elements += volume(fragments.box(i));
      // A view may have split a stored item into several consecutive fragments.
      if (i + 1 < fragments.size() && fragments.extent(i + 1) == extent) continue;
      const Index bytes = std::exchange(elements, 0) * byte_size(tensor.dtype);
      FileUse& use = files[extent.file];
      use.begin = std::min(use.begin, extent.offset);
      use.end = std::max(use.end, extent.offset + extent.length);
      use.bytes += bytes;
      ++use.items;
      ++items;
      opens.add(extent.file, bytes);
    }
    reads += slab_reads(tensor, items);
  }
  out.direct.reads = ceil_div(reads, ranks);
  opens.count(out.direct);
  Index long_reads = 0;
  for (const FileUse& use : files) {
    if (use.items == 0) continue;
    ++out.exchange.total_opens;
    long_reads += use.long_reads();
  }
  out.exchange.reads = ceil_div(long_reads, ranks);
  out.exchange.opens = ceil_div(out.exchange.total_opens, ranks);
  // A rank has read one in `ranks` of the bytes that it writes itself.
  const Index mine = ceil_div(plan.bytes_read, ranks);
  out.exchange.bytes_sent = mine - ceil_div(mine, ranks);
}

}  // namespace

std::string_view strategy_name(Strategy strategy) { return strategy == Strategy::kDirect ? "direct" : "exchange"; }

std::string to_string(const StrategyCost& cost) {
  return human_seconds(cost.seconds) + " for " + count_of(cost.reads, "read") + " of " + count_of(cost.opens, "file") +
         (cost.bytes_sent > 0 ? " and " + human_bytes(cost.bytes_sent) + " sent" : "");
}

StrategyChoice choose_strategy(const Plan& plan, const Catalog& source, Index ranks, bool one_machine) {
  StrategyChoice out;
  count(plan, source, ranks, out);
  const CostRates prices = one_machine ? one_machine_with(ranks) : kCluster;
  estimate(out.direct, prices);
  estimate(out.exchange, prices);
  if (ranks == 1) {
    out.reason = "there is only one rank";
  } else if (out.exchange.seconds < out.direct.seconds) {
    out.strategy = Strategy::kExchange;
    out.reason = "sending costs less than reading piece by piece";
  } else {
    out.reason = "every byte is read once either way, and nothing has to be sent";
  }
  return out;
}

}  // namespace reshard
