// SPDX-License-Identifier: Apache-2.0
// The Python files next to a model that are its own code: transformers loads those that the configs name
// (transformers/dynamic_module_utils.py). Others are tools left by a trainer, such as DeepSpeed's zero_to_fp32.py.
#pragma once

#include <set>
#include <string>

#include "lib/base/result.h"

namespace reshard {

// Returns the names of the files in `directory` that auto_map in a config or the module types of sentence-transformers'
// modules.json refer to, and those that these import ("from .layers import").
Result<std::set<std::string>> model_code(const std::string& directory);

}  // namespace reshard
