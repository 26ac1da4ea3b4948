// SPDX-License-Identifier: Apache-2.0
// Key paths as JSON, for formats that can store text only.
#pragma once

#include <string>

#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

// Convert a key path to JSON and back: ["optimizer", "state", 0].
std::string key_path_text(const KeyPath& path);
Result<KeyPath> parse_key_path(const std::string& text, const std::string& place);

}  // namespace reshard
