// How much memory this process holds, and may hold.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

// Bytes that are in RAM; 0 where that is not known.
Index resident_bytes();

// Gives back what the allocator keeps of memory that was freed, so that resident_bytes() tells what is in use.
void release_freed_memory();

// Sets how many bytes the process may hold, for all that asks before it takes much; until then, and for 0, it may hold
// any number.
void limit_memory(Index bytes);
// How many more it may take now; nothing where there is no limit.
std::optional<Index> memory_left();
inline constexpr Index kMuchMemory = Index{1} << 20;  // bytes; less may be taken always
// That it may take so many more, for `what()`: "a.safetensors: a header of 12 tensors". A usage error that says how
// much that needs.
Status may_take(Index bytes, const std::function<std::string()>& what);
// That what it holds already, for `what()`, is within the limit.
Status may_hold(const std::function<std::string()>& what);
Error too_little_memory(const std::string& what, Index more);  // that error

}  // namespace reshard
