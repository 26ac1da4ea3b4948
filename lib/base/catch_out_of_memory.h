// SPDX-License-Identifier: Apache-2.0
// Turns exceptions into errors, for work on a thread or work that other ranks wait for.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "lib/base/result.h"

namespace reshard {

// Returns the Status or Result of `work()`; an I/O error if it throws std::bad_alloc or std::length_error, an internal
// error if it throws anything else of the standard library's. On a thread an exception would terminate the process.
template <class Work>
auto catch_out_of_memory(Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::bad_alloc&) {
    return io_error("out of memory");
  } catch (const std::length_error&) {  // a container beyond its largest size
    return io_error("out of memory");
  } catch (const std::exception& e) {
    return internal_error(std::string("an exception: ") + e.what());
  }
}

}  // namespace reshard
