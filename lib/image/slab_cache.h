// SPDX-License-Identifier: Apache-2.0
// A cache of bytes that are computed on demand. Entries are dropped when all their bytes were given away, or when space
// is needed, least recently used first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "lib/base/cursor.h"
#include "lib/base/result.h"

namespace reshard {

// A buffer, initially undefined.
class SlabBytes {
 public:
  explicit SlabBytes(Index size)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(size))),
        data_(memory_.get()),
        size_(static_cast<std::size_t>(size)) {}
  // The buffer and the file offset `place` agree modulo the page size, so each file page is served from one memory
  // page.
  SlabBytes(Index size, Index place) : SlabBytes(size + kPage) {
    const auto at = reinterpret_cast<std::uintptr_t>(data_);
    data_ += (static_cast<std::uintptr_t>(place) - at) % kPage;
    size_ = static_cast<std::size_t>(size);
  }
  Bytes bytes() const { return {data_, size_}; }
  MutableBytes bytes() { return {data_, size_}; }

 private:
  static constexpr Index kPage = 4096;
  std::unique_ptr<std::byte[]> memory_;  // NOLINT(modernize-avoid-c-arrays)
  std::byte* data_ = nullptr;
  std::size_t size_;
};
using Slab = std::shared_ptr<const SlabBytes>;

// Thread-safe.
class SlabCache {
 public:
  using Key = std::pair<std::uint32_t, Index>;  // file number and offset
  using Make = std::function<Result<Slab>()>;

  // Keeps at most `room` bytes, plus those being computed.
  explicit SlabCache(Index room) : room_(room) {}

  // Returns the cached bytes, or calls make(). A thread that needs what another is computing waits for it. Errors are
  // not cached.
  Result<Slab> get(const Key& key, const Make& make);
  // Reports that `bytes` bytes of a result of get() were passed to a reader that caches them itself. An entry that was
  // passed on completely is dropped: its memory is still in the processor's caches and should be reused.
  void give(const Key& key, Index bytes);

 private:
  struct Entry {
    Key key;
    Slab slab;        // null: being computed
    Index given = 0;  // bytes passed on
  };
  struct KeyHash {
    std::size_t operator()(const Key& k) const {
      return static_cast<std::size_t>((static_cast<std::uint64_t>(k.second) ^ (std::uint64_t{k.first} << 40)) *
                                      0x9E3779B97F4A7C15u);
    }
  };
  void make_room();
  std::list<Entry>::iterator drop(std::list<Entry>::iterator entry);

  Index room_;
  mutable std::mutex mutex_;
  std::condition_variable made_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, KeyHash> places_;
  Index held_ = 0;  // bytes
};

}  // namespace reshard
