// Runs a plan: slab by slab, on several threads, within a given amount of memory.
//
// A slab is a box of one tensor, about a megabyte, row-major in memory. It is read from wherever its elements lie,
// checked and digested while it is in cache, converted if asked, and written to wherever its elements go. Every element
// passes once. Verifying is the same walk with nothing to write.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <vector>

#include "lib/device/device.h"
#include "lib/device/digest.h"
#include "lib/output/output.h"
#include "lib/plan/cost.h"
#include "lib/plan/plan.h"
#include "lib/source/tensor_source.h"
#include "lib/transport/transport.h"

namespace reshard {

struct RunOptions {
  Index memory = 256 << 20;                      // bytes for the whole process, catalogs included, GPUs' drivers not
  std::optional<Index> resident = std::nullopt;  // of these, held when a run begins; nothing: as it is seen then
  int threads = 0;                               // 0: two for each core this process may use, as half of them wait
  std::function<void(Index bytes)> progress;     // source bytes done so far; called from any thread
  const std::atomic<bool>* interrupt = nullptr;  // ends the run when set
  Index worker_bytes = 0;                        // that each thread takes beside its buffers: for encoding the output
  Index kept_bytes = 0;                          // that are kept of what was done until the end, beside those of a walk
  // The ranks of the job, each of which makes the same calls and takes its part of the work; null: this process alone.
  // `memory` and `threads` are each rank's; what is returned is about the whole job, on every rank.
  Transport* ranks = nullptr;
  Strategy strategy = Strategy::kDirect;  // of copying
  // Opens what moves elements between the ranks. All of them call it, when they are about to exchange and not before;
  // null: `ranks` moves elements too.
  std::function<Result<Transport*>()> data;
  Device* device = nullptr;  // where elements are worked on; null: the CPU
};

inline Device& device_of(const RunOptions& options) { return options.device ? *options.device : cpu_device(); }

// An error when the run is to end: the user interrupted it, or another rank failed.
Status may_go_on(const RunOptions& options);

// How many threads a run takes.
int worker_count(const RunOptions& options);

// The memory a run takes: what the process holds now, and buffers. `buffers` is what each thread needs at least.
struct MemoryPlan {
  Index now = 0;            // resident bytes of the process, without what a GPU's driver took for itself
  Index slab_bytes = 0;     // chosen
  Index scratch_bytes = 0;  // of each thread, for what is read and written at once
  Index peak = 0;           // expected resident bytes while running
};
// A usage error that says how much is needed when `memory` does not suffice. `largest_group` is the largest single slab
// the tensors force (bytes), `extra` the room needed beside slab and scratch memory, in slabs, `decoding` what
// each thread takes to decode chunks (bytes), `shared` what is there once for all of them (bytes).
Result<MemoryPlan> plan_memory(const RunOptions& options, Index largest_group, Index extra, Index decoding = 0,
                               Index shared = 0);

// The same for copy_tensors() with these arguments.
Result<MemoryPlan> copy_memory(const Plan& plan, const Catalog& source, const Catalog& target,
                               const RunOptions& options);

// What was seen of one planned tensor.
struct TensorProof {
  Digest source;  // of the source's elements, in the source's dtype
  Digest target;  // of what was written; equal to `source` where nothing was converted
};

// The source tensors named by `plan`, to where `target` (a view of the output's catalog) says, further copies included.
// One proof for each planned tensor.
Result<std::vector<TensorProof>> copy_tensors(const Plan& plan, TensorSource& source, const Catalog& target,
                                              Output& output, const RunOptions& options);

// Reads tensors without writing anything. `as` gives the dtype each is converted to before its target digest is taken.
// `visit`, if given, is called with (request number, box, elements) while the box's elements, converted, are in cache;
// from several threads. Of several ranks one visits all of a tensor.
struct DigestRequest {
  std::size_t tensor = 0;
  DType as = DType::kFloat32;
};
using BoxVisit = std::function<void(std::size_t request, const Box& box, Bytes elements)>;
Result<std::vector<TensorProof>> digest_tensors(const std::vector<DigestRequest>& requests, TensorSource& source,
                                                const RunOptions& options, const BoxVisit& visit = nullptr);

// The same walk over two sources at once: calls visit(request number, box, a, b) with the elements of both, each in its
// own dtype. For comparing. The sources' tensors agree in shape. Visits come from several threads; of several ranks
// each visits its share of the boxes.
struct PairRequest {
  std::size_t a = 0;
  std::size_t b = 0;
  std::optional<Box> box = std::nullopt;  // the part of the two that is wanted; nothing: all of it
};
using PairVisit = std::function<void(std::size_t request, const Box& box, Bytes a, Bytes b)>;
Status visit_pairs(const std::vector<PairRequest>& requests, TensorSource& a, TensorSource& b,
                   const RunOptions& options, const PairVisit& visit);

}  // namespace reshard
