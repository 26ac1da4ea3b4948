// Pieces of a rank's part of a tensor, as pieces of the whole.
#pragma once

#include <optional>

#include "lib/checkpoint/catalog.h"
#include "lib/layout/layout.h"

namespace reshard {

// What of a stored piece of a rank's part lies in `part`, as a piece of the whole; nothing where nothing does.
std::optional<Fragment> in_whole(const Fragment& local, const LocalBox& part, Index element_bytes);

}  // namespace reshard
