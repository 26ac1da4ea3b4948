// SPDX-License-Identifier: Apache-2.0
// Checks objects that are copied unchanged, because loading the copy runs their pickles.
#pragma once

#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

// Fails if a pickle of these objects of `source`, torch.save archives, references a global that is not on the
// allowlist. The unsupported error names the object and the global.
Status check_inert(Reader& source, const std::vector<Blob>& objects);

}  // namespace reshard
