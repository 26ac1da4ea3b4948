#include "lib/reshard/check_values.h"

#include <algorithm>
#include <memory>

namespace reshard {
namespace {

// Rows are remembered for tensors that are begun and not finished: each thread has one at most.
Index row_memory(const Catalog& view, const RunOptions& options) {
  Index largest = 0;
  for (const Tensor& t : view.tensors()) largest = std::max(largest, HealthScan::row_memory(t.shape));
  return largest * worker_count(options);
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
  for (std::size_t i = 0; i < scans.size(); ++i) {
    health.push_back(scans[i]->health());
    report.tensors.push_back({view.tensors()[i].name, health.back()});
  }
  report.findings = judge_values(view, health, context);
  return report;
}

}  // namespace reshard
