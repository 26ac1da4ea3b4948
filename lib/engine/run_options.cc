// SPDX-License-Identifier: Apache-2.0
#include "lib/engine/run_options.h"

#include <algorithm>

#include "lib/base/memory_limit.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/transport/collectives.h"
#include "lib/transport/waiting.h"

namespace reshard {
namespace {

constexpr Index kMaxSlab = Index{32} << 20;
constexpr Index kProcess = Index{12} << 20;  // code, stacks, and memory that the allocator retains

}  // namespace

void DamageNote::add(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!first_) first_ = error;
}

std::optional<Error> DamageNote::first() const {
  const std::lock_guard lock(mutex_);
  return first_;
}

bool skips_damage(const RunOptions& options, const Error& error) {
  if (!options.damage || error.code() != ErrorCode::kCorrupt) return false;
  options.damage->add(error);
  return true;
}

Status check_not_interrupted(const RunOptions& options) {
  if (options.interrupt && *options.interrupt) return io_error("interrupted");
  if (is_stopped(options.ranks)) return job_is_over();
  return {};
}

int worker_count(const RunOptions& options) { return options.threads > 0 ? options.threads : 2 * thread_count(0); }

Result<MemoryPlan> plan_memory(const RunOptions& options, Index largest_group, Index extra, Index decoding,
                               Index shared) {
  MemoryPlan plan;
  release_freed_memory();
  plan.now = options.resident.value_or(held_bytes());
  const Index fixed =
      plan.now + kProcess + options.kept_bytes + shared + worker_count(options) * (options.worker_bytes + decoding);
  const Index threads = worker_count(options), smallest = std::max(kMinSlab, largest_group);
  const Index needed = fixed + threads * (2 + extra) * smallest;
  if (options.memory < needed)
    return usage_error("--memory " + human_bytes(options.memory) + " is too small: this job needs at least " +
                       human_bytes(needed) + " on " + count_of(worker_count(options), "thread"));
  // Each thread gets a slab and as much scratch memory, up to the size of a usual read.
  const Index room = (options.memory - fixed) / threads;
  const Index most_scratch = std::max(smallest, device_of(options).slab_bytes());
  const Index slab = std::max(room / (2 + extra), (room - most_scratch) / (1 + extra));
  plan.slab_bytes = std::max(smallest, std::min(slab, kMaxSlab));
  plan.scratch_bytes = std::min(plan.slab_bytes, most_scratch);
  plan.peak = fixed + threads * (plan.scratch_bytes + (1 + extra) * plan.slab_bytes);
  return plan;
}

}  // namespace reshard
