// SPDX-License-Identifier: Apache-2.0
// Compares objects by value, because each writer encodes the same value in a pickle of its own.
#pragma once

#include <string_view>

namespace reshard {

// Returns whether two objects, as Reader::blob_bytes() returns them, have the same value. The order of a dict's keys
// and of a set's elements does not matter; types do: 1 differs from 1.0, a tuple from a list. Objects that are not data
// (instances of classes) are equal only if their bytes are.
bool have_same_value(std::string_view a, std::string_view b);

}  // namespace reshard
