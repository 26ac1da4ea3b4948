// How much memory this process holds.
#pragma once

#include "lib/base/checked.h"

namespace reshard {

// Bytes that are in RAM; 0 where that is not known.
Index resident_bytes();

}  // namespace reshard
