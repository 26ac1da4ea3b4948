// For work that must end with a Status or Result: on a thread, or while others wait for it.
#pragma once

#include <new>
#include <utility>

#include "lib/base/result.h"

namespace reshard {

// What `work()` returns, a Status or Result; an error where it got no memory.
template <class Work>
auto catch_out_of_memory(Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::bad_alloc&) {
    return io_error("out of memory");
  }
}

}  // namespace reshard
