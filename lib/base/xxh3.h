// SPDX-License-Identifier: Apache-2.0
// XXH3, 128 bits, without a seed: a checksum that is not cryptographic. Its algorithm is described in xxHash's
// doc/xxhash_spec.md.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "lib/base/cursor.h"

namespace reshard {

class Xxh3 {
 public:
  Xxh3();
  void update(Bytes bytes);
  std::string hex() const;  // of all bytes so far: 32 digits, as xxhash's hexdigest() in Python

 private:
  using Lanes = std::array<std::uint64_t, 8>;
  static void add_stripe(Lanes& lanes, const std::byte* stripe, std::size_t secret);
  static void scramble(Lanes& lanes);

  Lanes lanes_;
  std::size_t stripes_ = 0;         // of the current block
  std::uint64_t length_ = 0;        // in bytes
  std::vector<std::byte> pending_;  // not added yet; at least one stripe is kept for the end
};

}  // namespace reshard
