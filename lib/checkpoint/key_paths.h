// Places in a nested state_dict, held against names.
#pragma once

#include <string>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

// Tensors and objects whose name is not their path in the nested state_dict, joined by dots: loaders that rebuild that
// would put them elsewhere. None where no paths are known.
std::vector<std::string> names_off_paths(const Catalog& catalog);

}  // namespace reshard
