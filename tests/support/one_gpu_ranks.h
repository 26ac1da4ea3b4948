// Ranks as threads that share one GPU and exchange over NCCL: a real exchange where there is one GPU only.
#pragma once

#include <functional>

#include "lib/transport/nccl.h"

namespace reshard {

// `n` threads that each call work(transport). NCCL has no two ranks on one GPU, so that all their messages are sent by
// its one rank to itself. Returns when all have returned; when one fails the job is over for all, and the error is that
// of the lowest rank that failed by itself.
Status run_nccl_ranks_on_one_gpu(int n, const NcclOptions& options,
                                 const std::function<Status(Transport& ranks)>& work);

}  // namespace reshard
