// Objects that are copied as they are stored, and run again when they are loaded.
#pragma once

#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

// Reads these objects of `source`, torch.save archives; unsupported where the pickle of one names more than makes data,
// with the object and that name.
Status check_inert(Reader& source, const std::vector<Blob>& objects);

}  // namespace reshard
