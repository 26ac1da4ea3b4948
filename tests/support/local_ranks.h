// Ranks as threads of one process, for tests without a launcher.
#pragma once

#include <functional>

#include "lib/transport/transport.h"

namespace reshard {

// Calls work(transport) on `n` threads, one per rank, and waits for all. If a rank fails, the job is over for all;
// returns the error of the lowest rank that did not fail because of another one. `failed_rank`, if not null, receives
// that rank, or -1.
Status run_local_ranks(int n, const std::function<Status(Transport& ranks)>& work, int* failed_rank = nullptr);

}  // namespace reshard
