// Unwraps results that a test needs; ends the test if they are errors.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <type_traits>
#include <utility>

#include "lib/base/result.h"

namespace reshard {

template <class T>
T must(Result<T> r) {
  if (!r.has_value()) {
    ADD_FAILURE() << r.error().message();
    std::abort();
  }
  if constexpr (!std::is_void_v<T>) return *std::move(r);
}

}  // namespace reshard
