// SPDX-License-Identifier: Apache-2.0
#include "tools/job.h"

#include <cstdio>
#include <set>
#include <string>
#include <utility>

#include "lib/base/machine.h"
#include "lib/base/printable.h"
#include "lib/base/text.h"
#include "lib/transport/collectives.h"
#include "lib/transport/nccl.h"

namespace reshard::tools {
namespace {

// Not destroyed when the process ends, because what they depend on may already be destroyed.
Job* current = nullptr;
Device* device = nullptr;
NcclRanks* nccl = nullptr;
bool together = false;

// Closes the devices after this rank's work. If it failed, the other ranks are not waited for.
Status close_devices(bool has_failed) {
  const std::unique_ptr<Device> opened(std::exchange(device, nullptr));
  const std::unique_ptr<NcclRanks> ranks(std::exchange(nccl, nullptr));
  return ranks && !has_failed ? ranks->part() : Status();
}

// Fails if the ranks have different command lines, because they would wait for each other forever.
Status check_same(Transport* ranks, const std::string& line) {
  constexpr std::size_t kShown = 300;
  const auto shown = [](const std::string& text) { return printable(text.substr(0, kShown)); };
  const std::vector<std::string> lines = TRY(gather(ranks, line));
  std::string different;
  for (std::size_t r = 1; r < lines.size() && different.empty(); ++r)
    if (lines[r] != lines[0])
      different = "rank " + std::to_string(r) + " has a different command line from rank 0: " + shown(lines[r]) +
                  ", and not " + shown(lines[0]);
  different = TRY(broadcast(ranks, different));
  return different.empty() ? Status() : usage_error(different);
}

int say(const Error& error) {
  const Transport* ranks = current ? current->ranks() : nullptr;
  return report_error(error, ranks ? "[" + std::to_string(ranks->rank()) + "]" : "");
}

}  // namespace

Job& job() {
  if (!current) current = job_of_one().release();
  return *current;
}

Transport* job_ranks() { return together ? job().ranks() : nullptr; }

bool leads() { return rank_of(job_ranks()) == 0; }

Result<Index> machine_count() {
  const auto names = TRY(gather(job_ranks(), host_name()));
  const std::set<std::string> different(names.begin(), names.end());
  return std::stoll(TRY(broadcast(job_ranks(), std::to_string(different.size()))));
}

Result<Device*> job_device(const std::string& name, Index memory_cap) {
  if (device) return device;
  device = TRY(open_device(name, memory_cap, job_ranks() ? local_rank(process_environment) : 0)).release();
  return device;
}

Result<Transport*> job_nccl(const Device& gpu) {
  if (nccl) return nccl;
  if (!TRY(why_no_nccl(*job_ranks(), gpu.ordinal())).empty()) return nullptr;
  nccl = TRY(open_nccl(*job_ranks(), {.device = gpu.ordinal()})).release();
  return nccl;
}

int run_in_job(const Action& action, const std::string& line, bool everywhere, double patience) {
  auto joined = join_job({.patience = patience, .interrupt = &interrupted()});
  if (!joined) return say(joined.error());
  current = joined->release();
  together = everywhere;
  const bool first = rank_of(current->ranks()) == 0;
  if (!first && std::freopen("/dev/null", "w", stdout) == nullptr) return say(io_error("/dev/null: cannot open"));
  const Result<int> result = current->run([&]() -> Result<int> {
    TRY(check_same(current->ranks(), line));
    Result<int> done = first || everywhere ? action() : 0;
    Status closed = close_devices(!done);
    if (done && !closed) return std::move(closed).error();
    return done;
  });
  int code = result ? *result : say(result.error());
  // The exit code that a shell shows for a signal. If ranks are dead, the signal is only a consequence.
  if (!result && !current->is_broken() && ending_signal() > 0) code = 128 + ending_signal();
  return current->end(code);
}

}  // namespace reshard::tools
