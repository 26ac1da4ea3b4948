// SPDX-License-Identifier: Apache-2.0
#include "lib/device/chunk_assembler.h"

#include <algorithm>

#include "lib/base/memory_limit.h"

namespace reshard {

Result<std::vector<std::byte>> ChunkAssembler::add(const Part& part, Bytes data,
                                                   const std::function<std::string()>& what) {
  constexpr Index kMostWaiting = Index{256} << 20;
  const std::lock_guard lock(mutex_);
  const auto [it, is_new] = partials_.try_emplace(part.chunk);
  Partial& partial = it->second;
  if (is_new) {
    if (waiting_bytes_ + part.bytes > kMostWaiting)
      return unsupported(what() +
                         ": its elements come in an order that fills too many chunks at once; --codec none can");
    TRY(may_take(part.bytes, what));
    partial.bytes.resize(part.bytes);
    waiting_bytes_ += part.bytes;
  }
  std::copy(data.begin(), data.end(), partial.bytes.begin() + part.at);
  partial.filled += std::ssize(data);
  std::vector<std::byte> done;
  if (partial.filled < part.expected) return done;
  done = std::move(partial.bytes);
  partials_.erase(it);
  waiting_bytes_ -= part.bytes;
  return done;
}

std::optional<Index> ChunkAssembler::incomplete() const {
  const std::lock_guard lock(mutex_);
  return partials_.empty() ? std::nullopt : std::optional(partials_.begin()->first);
}

}  // namespace reshard
