// SHA-256 as hexadecimal digits, for comparing with digests that other programs recorded.
#pragma once

#include <string>
#include <string_view>

#include "lib/base/storage/sha256.h"

namespace reshard {

inline std::string sha256_hex(std::string_view message) { return to_hex(sha256(message)); }

}  // namespace reshard
