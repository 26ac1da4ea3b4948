// SPDX-License-Identifier: Apache-2.0
// Pinned host memory, which GPUs access directly. Allocating it takes longer than filling it, so freed blocks are kept
// for reuse.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/cursor.h"
#include "lib/device/cuda/context.h"

namespace reshard {

class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  explicit PinnedPool(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {}
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

 private:
  struct Block {
    void* memory = nullptr;  // CUDA aligns it to 512 bytes only
    std::size_t bytes = 0;   // usable bytes from page()
    std::byte* page() const;
  };

 public:
  // A piece of pinned memory, returned to the pool by the destructor.
  class Piece {
   public:
    Piece() = default;
    Piece(Piece&& other) noexcept;
    Piece& operator=(Piece&& other) noexcept;
    ~Piece();
    MutableBytes bytes() const;  // page-aligned

   private:
    friend PinnedPool;
    Piece(std::shared_ptr<PinnedPool> pool, Block block, std::size_t bytes);
    std::shared_ptr<PinnedPool> pool_;
    Block block_;
    std::size_t bytes_ = 0;
  };

  // Returns a piece of `bytes` bytes with undefined contents. Thread-safe.
  Result<Piece> take(Index bytes);

 private:
  Result<Block> make(std::size_t bytes);
  void free_idle();

  std::shared_ptr<const CudaContext> context_;
  std::mutex mutex_;
  std::vector<Block> idle_;
};

}  // namespace reshard
