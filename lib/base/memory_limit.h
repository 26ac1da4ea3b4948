// SPDX-License-Identifier: Apache-2.0
// The memory that this process uses, and its limit (--memory).
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

// Returns the resident set size in bytes, or 0 if it is unknown.
Index resident_bytes();
// Returns resident_bytes() without what drivers took, which is what --memory counts.
Index held_bytes();

// The memory that a driver's library (CUDA, NCCL) takes for itself: the most by which the process grew while one of its
// objects was opened. Growths are not added up, because what is opened later shares much of it.
class DriverMemory {
 public:
  // Measures from its construction to its destruction.
  class Opening {
   public:
    explicit Opening(DriverMemory& driver) : driver_(driver), before_(resident_bytes()) {}
    ~Opening() { driver_.note(resident_bytes() - before_); }
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;

   private:
    DriverMemory& driver_;
    Index before_;
  };

 private:
  void note(Index growth);

  std::atomic<Index> most_{0};
};

// Returns freed memory from the allocator to the system, so that held_bytes() counts only memory in use.
void release_freed_memory();

// Sets the limit in bytes. 0, the initial value, means no limit. Code that is about to allocate much memory checks it
// with may_take().
void limit_memory(Index bytes);
// Returns how many more bytes the process may allocate, or nothing if there is no limit.
std::optional<Index> memory_left();
inline constexpr Index kMuchMemory = Index{1} << 20;  // bytes; smaller allocations need no check
// Returns a usage error, which says how much memory is needed, if allocating `bytes` more would exceed the limit.
// `what()` names the purpose: "a.safetensors: a header of 12 tensors".
Status may_take(Index bytes, const std::function<std::string()>& what);
// Returns that error if the process already exceeds the limit. `what()` names the purpose.
Status may_hold(const std::function<std::string()>& what);
Error too_little_memory(const std::string& what, Index more);  // the error of may_take() and may_hold()

}  // namespace reshard
