#include "lib/engine/slab_cache.h"

#include <new>
#include <utility>

namespace reshard {
namespace {

// Others wait for what is being made: it comes to an end.
Result<Slab> made_by(const SlabCache::Make& make) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    return io_error("out of memory");
  }
}

}  // namespace

Result<Slab> SlabCache::get(const Key& key, const Make& make) {
  std::unique_lock lock(mutex_);
  for (auto place = places_.find(key); place != places_.end(); place = places_.find(key)) {
    if (place->second->slab) {
      entries_.splice(entries_.begin(), entries_, place->second);
      return entries_.front().slab;
    }
    made_.wait(lock);
  }
  std::list<Entry> entry = {{key, nullptr}};
  const auto mine = entry.begin();
  places_.emplace(key, mine);
  entries_.splice(entries_.begin(), entry);
  lock.unlock();
  Result<Slab> made = made_by(make);
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

bool SlabCache::has(const Key& key) const {
  const std::lock_guard lock(mutex_);
  return places_.contains(key);
}

void SlabCache::make_room() {
  for (auto entry = entries_.end(); held_ > room_ && entry != entries_.begin();) {
    --entry;
    if (!entry->slab) continue;
    held_ -= std::ssize(std::as_const(*entry->slab).bytes());
    places_.erase(entry->key);
    entry = entries_.erase(entry);
  }
}

}  // namespace reshard
