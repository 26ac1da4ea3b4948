// Bytes that are made when they are asked for, and kept until all of them were given away, or there is no room: those
// that were used last stay.
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

// Owned bytes. They hold anything at first.
class SlabBytes {
 public:
  explicit SlabBytes(Index size)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(size))),
        data_(memory_.get()),
        size_(static_cast<std::size_t>(size)) {}
  // In memory they lie in pages as bytes from `place` of a file on do: then no page of the one is copied out of two of
  // the other.
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
  using Key = std::pair<std::uint32_t, Index>;  // a file, and where the bytes stand in it
  using Make = std::function<Result<Slab>()>;

  // Keeps `room` bytes at most; those that are being made come on top.
  explicit SlabCache(Index room) : room_(room) {}

  // What make() gives. Who asks for what another thread is making waits for that. Errors are not kept.
  Result<Slab> get(const Key& key, const Make& make);
  // So many bytes of what get() gave were given to somebody who keeps them. What was given whole is not kept any more:
  // its memory is in the processor's caches, and better used again.
  void give(const Key& key, Index bytes);

 private:
  struct Entry {
    Key key;
    Slab slab;        // null: it is being made
    Index given = 0;  // bytes
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
  std::list<Entry> entries_;  // the last used first
  std::unordered_map<Key, std::list<Entry>::iterator, KeyHash> places_;
  Index held_ = 0;  // bytes
};

}  // namespace reshard
