// Ranks as threads of one process: for tests of everything that ranks do together, without a launcher.
#pragma once

#include <functional>

#include "lib/transport/transport.h"

namespace reshard {

// Calls work(transport) on `n` threads, one a rank, and returns when all have returned. When one fails the job is over
// for all; the error returned is that of the lowest rank that failed by itself. `failed_rank`, if given, receives its
// number (-1: none).
Status run_local_ranks(int n, const std::function<Status(Transport& ranks)>& work, int* failed_rank = nullptr);

}  // namespace reshard
