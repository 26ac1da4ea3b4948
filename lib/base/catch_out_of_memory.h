// Turns a failed allocation into an error, for work on a thread or work that other ranks wait for.
#pragma once

#include <new>
#include <utility>

#include "lib/base/result.h"

namespace reshard {

// Returns the Status or Result of `work()`, or an I/O error if it throws std::bad_alloc.
template <class Work>
auto catch_out_of_memory(Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::bad_alloc&) {
    return io_error("out of memory");
  }
}

}  // namespace reshard
