// Turns a sequence of numbers and names into a Digest, by which ranks compare what they hold to be true. Digests of
// parts can be added up, as a tensor's can (lib/device/digest.h). Against accidents, not against people.
#pragma once

#include <string_view>

#include "lib/device/digest.h"

namespace reshard {

class Mixer {
 public:
  explicit Mixer(std::uint64_t seed = 0) : a_(digest_mix(seed + kStep)), b_(digest_mix(seed + 2 * kStep)) {}

  void add(Index n) {
    const auto v = static_cast<std::uint64_t>(n);
    a_ = (a_ ^ v) * 0xff51afd7ed558ccdu;
    a_ ^= a_ >> 32;
    b_ = (b_ + v) * 0xc4ceb9fe1a85ec53u;
    b_ ^= b_ >> 29;
  }
  void add(const Dims& dims) {
    add(dims.rank());
    for (const Index n : dims) add(n);
  }
  void add(std::string_view text) {
    add(static_cast<Index>(text.size()));
    for (const char c : text) add(static_cast<Index>(c));
  }

  // Of all that was added; a seed for a sequence that goes on from there in several ways.
  std::uint64_t value() const { return digest_mix(a_ ^ digest_mix(b_)); }
  Digest digest() const {
    const std::uint64_t a = digest_mix(a_), b = digest_mix(b_);
    return {{static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(a >> 32), static_cast<std::uint32_t>(b),
             static_cast<std::uint32_t>(b >> 32)}};
  }

 private:
  static constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15u;
  std::uint64_t a_, b_;
};

}  // namespace reshard
