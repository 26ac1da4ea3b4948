// SPDX-License-Identifier: Apache-2.0
// Reading JSON whose root has one member that is too large to be in memory as a whole.
#pragma once

#include <string_view>

#include "lib/base/json.h"

namespace reshard {

// A member of the root that is passed on in parts: the members of an object with their keys, or the items of an array
// with empty keys.
struct JsonParts {
  std::string_view name;
  OnJsonMember part;
};

// Works like parse_json_members(), and passes the parts of that member to `parts.part`. `member` then receives the
// member empty. Keys must be unique in the object, too.
Status parse_json_parts(std::string_view text, std::string_view path, const OnJsonMember& member,
                        const JsonParts& parts, const JsonLimits& limits = {}, Index base = 0);

}  // namespace reshard
