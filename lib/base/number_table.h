// Finds what a list holds by its content: a hash table of numbers alone, for lists of millions.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace reshard {

// Numbers from 0 on, of which each stands for something of the caller's that has a hash. Those of 2^32 - 1 things.
class NumberTable {
 public:
  // The number for which `is_it(number)`, among those whose hash may be this one; nothing where there is none.
  template <class IsIt>
  std::optional<std::size_t> find(std::uint64_t hash, const IsIt& is_it) const {
    if (slots_.empty()) return std::nullopt;
    for (std::size_t at = place(hash); slots_[at] != 0; at = next(at))
      if (is_it(slots_[at] - 1)) return slots_[at] - 1;
    return std::nullopt;
  }

  // Adds the next number. `hash_of(number)` gives the hash of any that is there.
  template <class HashOf>
  void add(const HashOf& hash_of) {
    if (2 * (size_ + 1) > slots_.size()) make(size_ + 1, hash_of);
    put(hash_of(size_++));
  }

  // Makes room for as many as that in all, with places anew for those that are there: their hashes may have changed.
  template <class HashOf>
  void make(std::size_t numbers, const HashOf& hash_of) {
    slots_.assign(std::bit_ceil(2 * std::max<std::size_t>(numbers, 4)), 0);
    const std::size_t n = size_;
    for (size_ = 0; size_ < n;) put(hash_of(size_++));
  }

  std::size_t size() const { return size_; }
  std::size_t room() const { return slots_.size() / 2; }

 private:
  std::size_t place(std::uint64_t hash) const {
    return static_cast<std::size_t>(((hash ^ hash >> 32) * 0x9e3779b97f4a7c15) >> 32) & (slots_.size() - 1);
  }
  std::size_t next(std::size_t at) const { return (at + 1) & (slots_.size() - 1); }
  void put(std::uint64_t hash) {  // the last number
    std::size_t at = place(hash);
    while (slots_[at] != 0) at = next(at);
    slots_[at] = static_cast<std::uint32_t>(size_);
  }

  std::vector<std::uint32_t> slots_;  // numbers, plus one; 0: free. Half of them are at least; a power of 2
  std::size_t size_ = 0;
};

}  // namespace reshard
