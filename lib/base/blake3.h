// SPDX-License-Identifier: Apache-2.0
// BLAKE3 with a digest of 256 bits, without a key. Its algorithm is described in the paper "BLAKE3: one function, fast
// everywhere" (2021), section 2.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "lib/base/cursor.h"

namespace reshard {

class Blake3 {
 public:
  Blake3();
  void update(Bytes bytes);
  std::string hex() const;  // of all bytes so far: 64 digits, as blake3's hexdigest() in Python

 private:
  using Chain = std::array<std::uint32_t, 8>;
  // The input of one compression, which may turn out to be the root of the tree.
  struct Node {
    Chain chain;
    std::array<std::byte, 64> block{};
    std::uint64_t counter = 0;
    std::uint32_t length = 0, flags = 0;
  };
  static Chain compress(const Node& node);
  static Node parent_of(const Chain& left, const Chain& right);
  void add_chunk(Chain chunk);
  void start_chunk();

  Node block_;                   // the last block of the chunk that is being read; not compressed before a byte follows
  std::size_t blocks_ = 0;       // compressed blocks of this chunk
  std::vector<Chain> subtrees_;  // complete ones, the largest first, whose sizes are the binary digits of the chunks
};

}  // namespace reshard
