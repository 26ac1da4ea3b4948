// SPDX-License-Identifier: Apache-2.0
// Compares names with paths in the nested state_dict.
#pragma once

#include <string>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

// Returns the tensors and objects whose name differs from their path joined by dots: loaders that rebuild the nested
// state_dict would put them elsewhere. Empty if no paths are known.
std::vector<std::string> names_off_paths(const Catalog& catalog);

}  // namespace reshard
