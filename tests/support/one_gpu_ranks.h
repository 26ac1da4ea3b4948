// Ranks as threads that share one GPU and exchange over NCCL: a real exchange on a machine with a single GPU.
#pragma once

#include <functional>

#include "lib/transport/nccl.h"

namespace reshard {

// Calls work(transport) on `n` threads and waits for all. NCCL does not allow two ranks on one GPU, so its single rank
// sends all messages to itself. If a rank fails, the job is over for all; returns the error of the lowest rank that did
// not fail because of another one.
Status run_nccl_ranks_on_one_gpu(int n, const NcclOptions& options,
                                 const std::function<Status(Transport& ranks)>& work);

}  // namespace reshard
