// The Python files beside a model that are the model's own code: transformers loads them by what its configs name
// (transformers/dynamic_module_utils.py). Others are tools that a trainer left there, such as DeepSpeed's
// zero_to_fp32.py.
#pragma once

#include <set>
#include <string>

namespace reshard {

// Returns the names of the files of `directory` that auto_map in one of its configs names, or the module types of
// sentence-transformers' modules.json, and the files beside them that those import ("from .layers import"). Files that
// cannot be read name nothing.
std::set<std::string> model_code(const std::string& directory);

}  // namespace reshard
