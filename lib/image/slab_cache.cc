// SPDX-License-Identifier: Apache-2.0
#include "lib/image/slab_cache.h"

#include <utility>

#include "lib/base/catch_exceptions.h"

namespace reshard {

Result<Slab> SlabCache::get(const Key& key, const Make& make) {
  std::unique_lock lock(mutex_);
  for (auto place = places_.find(key); place != places_.end(); place = places_.find(key)) {
    if (place->second->slab) {
      entries_.splice(entries_.begin(), entries_, place->second);
      return entries_.front().slab;
    }
    made_.wait(lock);
  }
  std::list<Entry> entry = {{key, nullptr, 0}};
  const auto mine = entry.begin();
  places_.emplace(key, mine);
  entries_.splice(entries_.begin(), entry);
  lock.unlock();
  // Other threads wait for it, so it must end without an exception.
  Result<Slab> made = catch_exceptions(make);
  lock.lock();
  if (made) {
    mine->slab = *made;
    held_ += std::ssize((*made)->bytes());
    make_room();
  } else {
    places_.erase(key);
    entries_.erase(mine);
  }
  made_.notify_all();
  return made;
}

void SlabCache::give(const Key& key, Index bytes) {
  const std::lock_guard lock(mutex_);
  const auto place = places_.find(key);
  if (place == places_.end() || !place->second->slab) return;
  Entry& entry = *place->second;
  entry.given += bytes;
  if (entry.given >= std::ssize(entry.slab->bytes())) drop(place->second);
}

void SlabCache::make_room() {
  for (auto entry = entries_.end(); held_ > room_ && entry != entries_.begin();) {
    --entry;
    if (entry->slab) entry = drop(entry);
  }
}

// Removes an entry. Returns the next one.
std::list<SlabCache::Entry>::iterator SlabCache::drop(std::list<Entry>::iterator entry) {
  held_ -= std::ssize(entry->slab->bytes());
  places_.erase(entry->key);
  return entries_.erase(entry);
}

}  // namespace reshard
