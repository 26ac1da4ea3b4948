// SHA-256 in hexadecimal, to compare with digests from other programs.
#pragma once

#include <string>
#include <string_view>

#include "lib/base/storage/sha256.h"

namespace reshard {

inline std::string sha256_hex(std::string_view message) { return to_hex(sha256(message)); }

}  // namespace reshard
