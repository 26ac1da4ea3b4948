// How much memory this process holds.
#pragma once

#include "lib/base/checked.h"

namespace reshard {

// Bytes that are in RAM; 0 where that is not known.
Index resident_bytes();

// Gives back what the allocator keeps of memory that was freed, so that resident_bytes() tells what is in use.
void release_freed_memory();

}  // namespace reshard
