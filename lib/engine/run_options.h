// SPDX-License-Identifier: Apache-2.0
// What a run may use: memory, threads, ranks and a device; and how it divides the memory.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>

#include "lib/base/result.h"
#include "lib/device/device.h"
#include "lib/plan/cost.h"
#include "lib/transport/transport.h"

namespace reshard {

inline constexpr Index kMinSlab = Index{256} << 10;  // bytes; every thread can hold a slab of this size

// Notes that a run met bytes that cannot be right. Thread-safe.
class DamageNote {
 public:
  void add(const Error& error);
  std::optional<Error> first() const;

 private:
  mutable std::mutex mutex_;
  std::optional<Error> first_;
};

struct RunOptions {
  Index memory = 256 << 20;  // bytes for the whole process, catalogs included, memory of drivers (CUDA, NCCL) excluded
  // Bytes of `memory` that the process holds when the run begins; nothing: measured when the run begins.
  std::optional<Index> resident = std::nullopt;
  int threads = 0;                               // 0: two for each core this process may use, since half of them wait
  std::function<void(Index bytes)> progress;     // called with the source bytes done so far, from any thread
  const std::atomic<bool>* interrupt = nullptr;  // ends the run when set
  Index worker_bytes = 0;  // bytes that each thread needs in addition to its buffers, to encode the output
  Index kept_bytes = 0;    // bytes of results that the caller keeps until the end, in addition to those of the walk
  // The ranks of the job. Each makes the same calls and does its share of the work; null: this process alone. `memory`
  // and `threads` are per rank; results describe the whole job, on every rank.
  Transport* ranks = nullptr;
  Strategy strategy = Strategy::kDirect;  // of copying
  // Opens the transport that moves elements between ranks. All ranks call it, immediately before they first exchange
  // elements; null: `ranks` moves elements too.
  std::function<Result<Transport*>()> data;
  Device* device = nullptr;  // processes the elements; null: the CPU
  // If set, a run that only reads notes here what is damaged (kCorrupt) and skips it, so that its ranks stay together;
  // its results are then worth nothing. Not for exchanges between ranks.
  DamageNote* damage = nullptr;
};

inline Device& device_of(const RunOptions& options) { return options.device ? *options.device : cpu_device(); }

// Notes the error of a read if it is to be skipped. Returns whether that is so.
bool skips_damage(const RunOptions& options, const Error& error);

// Fails if the run must end: the user interrupted it, or another rank failed.
Status check_not_interrupted(const RunOptions& options);

// Returns how many threads a run starts.
int worker_count(const RunOptions& options);

// The memory of a run: what the process holds now, and the buffers of its threads.
struct MemoryPlan {
  Index now = 0;            // resident bytes of the process, without those of drivers
  Index slab_bytes = 0;     // of each slab buffer
  Index scratch_bytes = 0;  // of each thread, for one read or write
  Index peak = 0;           // expected resident bytes while running
};
// Divides `options.memory` among the threads. `largest_group` is the largest single slab that the tensors force
// (bytes), `extra` the room needed next to slab and scratch memory (in slabs), `decoding` what each thread needs to
// decode chunks (bytes), `shared` what all threads share (bytes). Returns a usage error with the bytes needed if
// `memory` does not suffice.
Result<MemoryPlan> plan_memory(const RunOptions& options, Index largest_group, Index extra, Index decoding = 0,
                               Index shared = 0);

}  // namespace reshard
