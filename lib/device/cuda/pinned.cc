// SPDX-License-Identifier: Apache-2.0
#include "lib/device/cuda/pinned.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

std::byte* PinnedPool::Block::page() const {
  auto* const first = static_cast<std::byte*>(memory);
  return first + (kPage - reinterpret_cast<std::uintptr_t>(first) % kPage) % kPage;
}

PinnedPool::Piece::Piece(std::shared_ptr<PinnedPool> pool, Block block, std::size_t bytes)
    : pool_(std::move(pool)), block_(block), bytes_(bytes) {}
PinnedPool::Piece::Piece(Piece&& other) noexcept
    : pool_(std::move(other.pool_)), block_(other.block_), bytes_(std::exchange(other.bytes_, 0)) {}
PinnedPool::Piece& PinnedPool::Piece::operator=(Piece&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(block_, other.block_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
PinnedPool::Piece::~Piece() {
  if (!pool_) return;
  const std::lock_guard lock(pool_->mutex_);
  pool_->idle_.push_back(block_);
}
MutableBytes PinnedPool::Piece::bytes() const {
  if (!pool_) return {};
  return {block_.page(), bytes_};
}

PinnedPool::~PinnedPool() { free_idle(); }

Result<PinnedPool::Piece> PinnedPool::take(Index bytes) {
  if (bytes == 0) return Piece();
  const std::size_t size = bytes;
  const std::lock_guard lock(mutex_);
  // The smallest block that suffices, unless it is more than twice as large.
  auto best = idle_.end();
  for (auto it = idle_.begin(); it != idle_.end(); ++it)
    if (it->bytes >= size && it->bytes / 2 <= size && (best == idle_.end() || it->bytes < best->bytes)) best = it;
  if (best != idle_.end()) {
    const Block block = *best;
    idle_.erase(best);
    return Piece(shared_from_this(), block, size);
  }
  auto made = make(size);
  if (!made && !idle_.empty()) {
    free_idle();
    made = make(size);
  }
  if (!made) return std::move(made).error();
  return Piece(shared_from_this(), *made, size);
}

Result<PinnedPool::Block> PinnedPool::make(std::size_t bytes) {
  Block block{nullptr, (bytes + kPage - 1) / kPage * kPage};
  TRY(context_->run("allocating " + human_bytes(bytes) + " of pinned memory",
                    [&] { return cudaHostAlloc(&block.memory, block.bytes + kPage, cudaHostAllocPortable); }));
  return block;
}

void PinnedPool::free_idle() {
  for (const Block& block : std::exchange(idle_, {}))
    static_cast<void>(context_->run("freeing pinned memory", [&] { return cudaFreeHost(block.memory); }));
}

}  // namespace reshard
