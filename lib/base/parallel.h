// SPDX-License-Identifier: Apache-2.0
// A parallel loop that stops at the first error.
#pragma once

#include <functional>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

// Returns `requested`, or the number of cores this process may use if that is 0.
int thread_count(int requested);

// Calls body(thread, i) once for every i below n, in about ascending order, on up to `threads` threads numbered from 0.
// The caller's thread is one of them; if the system refuses to start others, it runs with fewer. After a failure no
// further call begins, and the first error is returned.
Status parallel_for(Index n, int threads, const std::function<Status(int thread, Index i)>& body);

}  // namespace reshard
