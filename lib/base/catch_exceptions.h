// SPDX-License-Identifier: Apache-2.0
// Turns exceptions into errors, for a whole command, and for work on a thread or work that other ranks wait for.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "lib/base/result.h"

namespace reshard {

// Returns the Status or Result of `work()`. If it throws, returns an I/O error for exhausted memory and for a thread
// that cannot be started, and an internal error for any other exception of the standard library. On a thread an
// exception would terminate the process.
template <class Work>
auto catch_exceptions(Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::bad_alloc&) {
    return io_error("out of memory");
  } catch (const std::length_error&) {  // a container beyond its largest size
    return io_error("out of memory");
  } catch (const std::system_error& e) {
    return io_error(std::string("cannot start a thread: ") + e.what());
  } catch (const std::exception& e) {
    return internal_error(std::string("internal error: ") + e.what());
  }
}

}  // namespace reshard
