// SPDX-License-Identifier: Apache-2.0
// The Python program that derives the names and shapes of a model class.
#pragma once

#include <string_view>

namespace reshard::tools {

// Returns samples/families/architectures.py.
std::string_view family_script();

}  // namespace reshard::tools
