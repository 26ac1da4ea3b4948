// A loop on several threads that stops at the first error.
#pragma once

#include <functional>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

// `requested`, or one for each core this process may use when that is 0.
int thread_count(int requested);

// Calls body(thread, i) once for every i below n, in about ascending order, from up to `threads` threads numbered from
// 0: fewer where the system gives no more, the caller's own at least. After a failure no further call begins; the first
// error is returned.
Status parallel_for(Index n, int threads, const std::function<Status(int thread, Index i)>& body);

}  // namespace reshard
