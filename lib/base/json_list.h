// JSON with a list that is too large to be held.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "lib/base/json.h"

namespace reshard {

// A list whose items are made when they are wanted: a large one is never in memory as a whole.
struct JsonList {
  std::string_view key;
  std::size_t size = 0;
  std::function<Json(std::size_t)> item;
};
// What to_text() gives of the object with the list as one more member, in stretches.
void write_text(const Json& object, const JsonList& list, int indent,
                const std::function<void(std::string_view)>& write);

}  // namespace reshard
