// SPDX-License-Identifier: Apache-2.0
#include "lib/output/encoded_chunks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "lib/base/parallel.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr Index kHeldBytes = Index{4} << 20;  // of chunks waiting in memory

}  // namespace

EncodedChunks::EncodedChunks(DataEncoder& encoder, Transport* ranks, std::string spool, Write write)
    : encoder_(encoder),
      ranks_(ranks),
      is_first_(rank_of(ranks) == 0),
      spool_path_(std::move(spool)),
      write_(std::move(write)) {}

Index EncodedChunks::memory(const DataEncoder& encoder, int ranks) {
  // For each waiting chunk, and on the first rank for the descriptions of all ranks' chunks.
  constexpr Index kChunk = sizeof(Waiting) + 6 * sizeof(Index) + 2 * sizeof(EncodedChunk) + 2 * sizeof(Index);
  return kHeldBytes + (ranks > 1 ? encoder.chunk_count() * kChunk : 0);
}

// Requires the lock, and chunks in order; for the first rank.
Result<Index> EncodedChunks::next_place(const EncodedChunk& chunk) {
  ++next_;
  return encoder_.place(chunk);
}

Status EncodedChunks::add(const EncodedChunk& chunk, Bytes stored) {
  std::unique_lock lock(mutex_);
  if (is_first_ && chunk.number == next_) {
    const Index place = TRY(next_place(chunk));
    lock.unlock();
    TRY(write_(place, stored));
    lock.lock();
    return write_what_follows(lock);
  }
  Waiting waiting{chunk};
  if (held_ + chunk.bytes <= kHeldBytes) {
    held_ += chunk.bytes;
    lock.unlock();
    waiting.bytes.assign(stored.begin(), stored.end());
  } else {
    if (!spool_) spool_.emplace(TRY(File::create(spool_path_)));
    waiting.at = std::exchange(spooled_, spooled_ + chunk.bytes);
    lock.unlock();
    TRY(spool_->write_at(waiting.at, stored));
  }
  lock.lock();
  waiting_.emplace(chunk.number, std::move(waiting));
  return write_what_follows(lock);
}

// Writes the chunks that are next in order.
Status EncodedChunks::write_what_follows(std::unique_lock<std::mutex>& lock) {
  while (is_first_ && !waiting_.empty() && waiting_.begin()->first == next_) {
    const auto node = waiting_.extract(waiting_.begin());
    const Waiting& waiting = node.mapped();
    const Index place = TRY(next_place(waiting.chunk));
    lock.unlock();
    TRY(write_waiting(place, waiting));
    lock.lock();
    held_ -= std::ssize(waiting.bytes);
  }
  return {};
}

Status EncodedChunks::write_waiting(Index place, const Waiting& waiting) const {
  if (!waiting.bytes.empty()) return write_(place, waiting.bytes);
  std::vector<std::byte> bytes(waiting.chunk.bytes);
  TRY(spool_->read_at(waiting.at, bytes));
  return write_(place, bytes);
}

Status EncodedChunks::finish() {
  std::vector<EncodedChunk> mine;
  for (const auto& [number, waiting] : waiting_) mine.push_back(waiting.chunk);
  auto all = TRY(gather_values<EncodedChunk>(ranks_, mine));
  std::vector<Index> places;
  if (is_first_) {
    std::sort(all.begin(), all.end(), [](const EncodedChunk& a, const EncodedChunk& b) { return a.number < b.number; });
    for (const EncodedChunk& chunk : all) {
      if (chunk.number != next_) break;
      places.push_back(TRY(next_place(chunk)));
    }
    if (next_ != encoder_.chunk_count()) return internal_error("a chunk of the output was not written completely");
  }
  // The offsets of the last chunks.
  const Bytes bytes = std::as_bytes(std::span(places));
  const std::string told = TRY(broadcast(ranks_, std::string(as_string(bytes))));
  places.resize(told.size() / sizeof(Index));
  if (!told.empty()) std::memcpy(places.data(), told.data(), told.size());
  const Index first = encoder_.chunk_count() - std::ssize(places);
  return parallel_for(std::ssize(mine), thread_count(0), [&](int, Index k) -> Status {
    const Index number = mine[k].number;
    return write_waiting(places[number - first], waiting_.at(number));
  });
}

}  // namespace reshard
