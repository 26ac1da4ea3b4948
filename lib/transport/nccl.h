// Ranks on GPUs: messages between the memories of GPUs, over NCCL. The library is opened when it is first wanted, so
// that a machine without it runs everything else. Implemented by nccl.cc, or by nccl_absent.cc where it is not built.
//
// Messages lie in device memory, and what made their contents was waited for. What ranks tell each other from host
// memory (collectives.h) goes over the transport of the job.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>

#include "lib/transport/transport.h"

namespace reshard {

struct NcclOptions {
  int device = 0;         // the GPU of this rank, as CUDA counts
  double patience = 600;  // seconds for one transfer, or for coming together, before a rank gives up
};

// What names a group of ranks; made by one of them, the same on all.
using NcclId = std::array<std::byte, 128>;
Result<NcclId> make_nccl_id();

// Rank `rank` of `size`, each on a GPU of its own. Returns when all have called it with the same id. Whoever waits
// looks at `control` as well, so that a failure elsewhere ends it; null: there is none. `control` outlives what is
// returned, and that its transfers.
Result<std::unique_ptr<Transport>> open_nccl(const NcclId& id, int rank, int size, const NcclOptions& options,
                                             const Transport* control);

// The same for all ranks of `control`, over which the id travels.
Result<std::unique_ptr<Transport>> open_nccl(Transport& control, const NcclOptions& options);

// `n` ranks on one GPU, each a thread that calls work(transport): a real exchange where there is one GPU only. NCCL has
// no two ranks on one, so that all their messages are sent by its one rank to itself. Returns when all have returned;
// when one fails the job is over for all, and the error is that of the lowest rank that failed by itself.
Status run_nccl_ranks_on_one_gpu(int n, const NcclOptions& options,
                                 const std::function<Status(Transport& ranks)>& work);

}  // namespace reshard
