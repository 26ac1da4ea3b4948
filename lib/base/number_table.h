// SPDX-License-Identifier: Apache-2.0
// A hash index into a list of the caller's, which stores only 32-bit positions; for lists of millions of entries.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace reshard {

// Numbers 0, 1, 2, ... of entries that the caller stores and hashes. At most 2^32 - 1.
class NumberTable {
 public:
  // Returns the number for which `is_it(number)` is true, among those that may have this hash, or nothing.
  template <class IsIt>
  std::optional<std::size_t> find(std::uint64_t hash, const IsIt& is_it) const {
    if (slots_.empty()) return std::nullopt;
    for (std::size_t at = place(hash); slots_[at] != 0; at = next(at))
      if (is_it(slots_[at] - 1)) return slots_[at] - 1;
    return std::nullopt;
  }

  // Adds the next number. `hash_of(number)` must return the hash of any number added so far and of the new one.
  template <class HashOf>
  void add(const HashOf& hash_of) {
    if (2 * (size_ + 1) > slots_.size()) make(size_ + 1, hash_of);
    put(hash_of(size_++));
  }

  // Makes room for `numbers` entries and rehashes the existing ones, whose hashes may have changed.
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
  void put(std::uint64_t hash) {  // of the number size_
    std::size_t at = place(hash);
    while (slots_[at] != 0) at = next(at);
    slots_[at] = static_cast<std::uint32_t>(size_);
  }

  // Numbers plus one; 0 is a free slot. The size is a power of 2, and at least half of the slots are free.
  std::vector<std::uint32_t> slots_;
  std::size_t size_ = 0;
};

}  // namespace reshard
