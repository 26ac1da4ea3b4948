// SPDX-License-Identifier: Apache-2.0
// Writes JSON with a list too large to hold in memory.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "lib/base/json.h"

namespace reshard {

// A list whose items are made one at a time, when they are written.
struct JsonList {
  std::string_view key;
  std::size_t size = 0;
  std::function<Json(std::size_t)> item;
};
// Writes, in pieces, the to_text() of `object` with the list added as its last member.
void write_text(const Json& object, const JsonList& list, int indent,
                const std::function<void(std::string_view)>& write);

}  // namespace reshard
