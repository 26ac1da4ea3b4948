// SPDX-License-Identifier: Apache-2.0
// Slabs: the pieces in which every run reads tensors.
//
// A slab is a box of one tensor, about a megabyte, row-major in memory. SlabList numbers the slabs of some tensors,
// ThreadBuffers holds one of them for each thread. A rank reads slabs itself (read_slabs.h), or ranks read them for
// each other (exchange.h).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "lib/device/device.h"
#include "lib/engine/run_options.h"
#include "lib/plan/plan.h"
#include "lib/source/tensor_source.h"

namespace reshard {

// One tensor to read, or a part of it.
struct WalkItem {
  std::size_t tensor = 0;
  DType as = DType::kFloat32;  // the dtype its elements are converted to
  Index row_group = 1;
  Index columns = 1;
  std::shared_ptr<const Box> box = nullptr;  // the part to read; null: all of the tensor
  Orders orders = {};
};

// One slab of one item.
struct WalkSlab {
  std::size_t item = 0;
  Box box;
  Index number = 0;  // its number among all slabs, including those that earlier runs finished
};

// The slabs of all items, in order, computed on demand.
class SlabList {
 public:
  // Cuts the items into slabs of about `usual` bytes (Device::slab_bytes). Slabs are larger if an item's columns are
  // narrow or its sides transposed, and at most `limit` bytes unless the columns are too narrow for that. `finished`
  // maps the first slab of each finished run of slabs to the length of the run; these slabs are left out.
  SlabList(const std::vector<WalkItem>& items, const Catalog& catalog, Index usual, Index limit,
           const std::map<Index, Index>& finished = {});

  Index total() const { return total_; }
  Index largest() const { return largest_; }  // bytes
  WalkSlab get(Index k) const;                // 0 <= k < total()

  // Divides the slabs among `n` ranks. Returns n + 1 slab numbers; rank r gets those from the r-th number to before the
  // next. The shares differ by at most one slab, or by one tensor with `whole_tensors` (if nothing is finished).
  std::vector<Index> shares(int n, bool whole_tensors) const;

  // Returns the bytes of memory that an item takes in a list.
  static constexpr Index item_bytes() { return sizeof(ItemSlabs); }

 private:
  struct ItemSlabs {
    std::size_t kind = 0;            // index into kinds_: the layers of a model are cut in few ways
    std::shared_ptr<const Box> box;  // the part to read; null: all
    Index first = 0;                 // number of its first slab among all slabs
    Index before = 0;                // bytes of the items before it
  };
  // A run of slabs that are not finished.
  struct UnfinishedRun {
    Index number = 0;  // of its first slab, among all slabs
    Index first = 0;   // of its first slab, in this list
    Index before = 0;  // bytes of the slabs before it in this list
  };
  std::size_t kind_of(const Slabs& slabs);
  const Slabs& slabs_of(const ItemSlabs& item) const { return kinds_[item.kind]; }
  const ItemSlabs& item_of(Index number) const;
  Index bytes_before(Index number) const;
  std::vector<Index> shares_of_left(int n) const;
  std::vector<Slabs> kinds_;
  std::vector<ItemSlabs> items_;
  std::vector<UnfinishedRun> left_;  // empty: all
  Index total_ = 0;
  Index largest_ = 0;
  Index bytes_ = 0;
};

// The buffers of one thread: a slab's elements, what they are converted to, and scratch memory for reads and writes.
struct Buffers {
  DeviceBuffer slab, extra;
  MutableBytes stored;   // on the device, for a slab in the files' order; empty on the CPU
  MutableBytes scratch;  // on the host
  Stream* stream = nullptr;
};

// Owns the memory and the streams of all threads.
class ThreadBuffers {
 public:
  // Allocates for each thread a slab of `slab` bytes, `extra` times as much for converted elements, and `scratch`
  // bytes.
  static Result<ThreadBuffers> make(Device& device, int threads, Index slab, Index extra, Index scratch);
  const std::vector<Buffers>& buffers() const { return buffers_; }  // of each thread

 private:
  Result<DeviceBuffer> add(Device& device, Index bytes);
  std::vector<std::unique_ptr<Device::Memory>> memory_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Buffers> buffers_;
};

// The memory that holds the elements of a slab.
enum class Side { kHost, kDevice };

// Called with each slab. Its elements, in the source's dtype, are at the beginning of `elements`, on `side`.
using SlabVisit =
    std::function<Status(const WalkSlab& slab, const DeviceBuffer& elements, Side side, const Buffers& buffers)>;

// Reads a box of a tensor, or only the pieces of it that `wanted` accepts, into `to`. Returns the side that the
// elements are on; on the device they are complete once the stream was waited for. A device receives bytes in the
// files' order and arranges them itself, so that the host does not copy them.
Result<Side> read_box(TensorSource& source, std::size_t tensor, const Box& box, const DeviceBuffer& to,
                      const Buffers& buffers, const PieceFilter& wanted = nullptr);

// Queues the upload of a slab's `n` elements to the device, if they are on the host, and their conversion to `to`.
// Returns the buffer that holds them afterwards: `elements`, or buffers.extra if they are converted.
Result<DeviceBuffer> convert_on_device(const DeviceBuffer& elements, Side side, DType from, DType to, Index n,
                                       const Buffers& buffers);

// Returns the factor by which elements grow if they are converted, rounded up to at least 1.
Index growth(DType from, DType to);

// Returns the size in bytes of the largest slab that cannot be made smaller.
Index largest_group(const std::vector<WalkItem>& items, const Catalog& source);

}  // namespace reshard
