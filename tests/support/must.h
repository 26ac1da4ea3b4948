// Unwraps results that a test needs. An error fails the test and ends it, by an exception that GoogleTest catches.
#pragma once

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "lib/base/result.h"

namespace reshard {

template <class T>
T must(Result<T> r) {
  if (!r.has_value()) throw std::runtime_error(r.error().message());
  if constexpr (!std::is_void_v<T>) return *std::move(r);
}

}  // namespace reshard
