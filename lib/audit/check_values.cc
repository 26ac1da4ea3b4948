#include "lib/audit/check_values.h"

#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "lib/transport/collectives.h"

namespace reshard {
namespace {

// Rows are remembered for tensors that are begun and not finished: each thread has one at most.
Index row_memory(const Catalog& view, const RunOptions& options) {
  Index largest = 0;
  for (const Tensor& t : view.tensors()) largest = std::max(largest, HealthScan::row_memory(t.shape));
  return largest * worker_count(options);
}

// A tensor's health as it goes from rank to rank.
struct HealthRecord {
  struct Rows {
    Index count = 0, ranges = 0;
    std::array<RowRange, RowSet::kMaxRanges> range{};
  };
  Index elements = 0, nans = 0, infs = 0, zeros = 0, first_not_finite_row = -1;
  double absmax = 0;
  bool constant = true, rows_seen = false;
  std::array<Rows, 4> rows;
};

// The row sets of a health, or of a const one.
template <class Health>
auto row_sets(Health& h) {
  return std::array{&h.rows.zero, &h.rows.constant, &h.tail.zero, &h.tail.constant};
}

HealthRecord to_record(const TensorHealth& h) {
  HealthRecord r{h.elements, h.nans, h.infs, h.zeros, h.first_not_finite_row, h.absmax, h.constant, h.rows_seen, {}};
  const auto sets = row_sets(h);
  for (std::size_t i = 0; i < sets.size(); ++i) {
    r.rows[i].count = sets[i]->count;
    r.rows[i].ranges = static_cast<Index>(sets[i]->ranges.size());
    std::copy(sets[i]->ranges.begin(), sets[i]->ranges.end(), r.rows[i].range.begin());
  }
  return r;
}

TensorHealth from_record(const HealthRecord& r) {
  TensorHealth h{r.elements, r.nans,      r.infs, r.zeros, r.absmax, r.first_not_finite_row,
                 r.constant, r.rows_seen, {},     {}};
  const auto sets = row_sets(h);
  for (std::size_t i = 0; i < sets.size(); ++i) {
    sets[i]->count = r.rows[i].count;
    sets[i]->ranges.assign(r.rows[i].range.begin(), r.rows[i].range.begin() + r.rows[i].ranges);
  }
  return h;
}

// Each tensor was looked at by one rank, which has all of its elements.
Status share_health(Transport* ranks, std::vector<TensorHealth>& health) {
  if (rank_count(ranks) == 1) return {};
  std::vector<HealthRecord> records;
  for (const TensorHealth& h : health) records.push_back(to_record(h));
  TRY(combine_values(ranks, std::span(records), [](HealthRecord& mine, const HealthRecord& theirs) {
    if (theirs.elements > 0) mine = theirs;
  }));
  for (std::size_t i = 0; i < health.size(); ++i) health[i] = from_record(records[i]);
  return {};
}

}  // namespace

double ValueRow::zero_percent() const {
  return health.elements == 0 ? 0 : 100 * static_cast<double>(health.zeros) / static_cast<double>(health.elements);
}

Result<ValueReport> check_values(const Catalog& view, FilePool& files, const ValueContext& context,
                                 const RunOptions& options) {
  std::vector<DigestRequest> requests;
  std::vector<std::unique_ptr<HealthScan>> scans;
  for (std::size_t i = 0; i < view.tensors().size(); ++i) {
    const Tensor& t = view.tensors()[i];
    requests.push_back({i, t.dtype});
    scans.push_back(std::make_unique<HealthScan>(t.dtype, t.shape, padding_begins(t, context)));
  }
  FileSource source(view, files);
  RunOptions run = options;
  run.memory -= row_memory(view, options);
  ValueReport report;
  report.proofs = TRY(digest_tensors(
      requests, source, run, [&](std::size_t i, const Box& box, Bytes elements) { scans[i]->add(box, elements); }));
  report.checksums_checked = source.checksums_checked();
  std::vector<TensorHealth> health;
  for (const auto& scan : scans) health.push_back(scan->health());
  TRY(share_health(options.ranks, health));
  for (std::size_t i = 0; i < health.size(); ++i) report.tensors.push_back({view.tensors()[i].name, health[i]});
  report.findings = judge_values(view, health, context);
  return report;
}

}  // namespace reshard
