// SPDX-License-Identifier: Apache-2.0
// The exclusive or of bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "lib/base/cursor.h"

namespace reshard {

// Sets `to` to the exclusive or of both, which have the same size. Works word by word, as compilers do not vectorise
// the loop over std::byte.
inline void xor_into(MutableBytes to, Bytes from) {
  std::size_t at = 0;
  for (std::uint64_t a = 0, b = 0; at + sizeof a <= to.size(); at += sizeof a) {
    std::memcpy(&a, to.data() + at, sizeof a);
    std::memcpy(&b, from.data() + at, sizeof b);
    a ^= b;
    std::memcpy(to.data() + at, &a, sizeof a);
  }
  for (; at < to.size(); ++at) to[at] ^= from[at];
}

}  // namespace reshard
