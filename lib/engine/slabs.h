// Slabs: the pieces in which every run reads tensors.
//
// A slab is a box of one tensor, about a megabyte, row-major in memory. SlabList numbers the slabs of some tensors,
// ThreadBuffers holds one of them for each thread, and read_slabs() visits those that one rank reads itself. Ranks that
// read for each other use exchange.h instead.
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

// One tensor of a walk.
struct WalkItem {
  std::size_t tensor = 0;
  DType as = DType::kFloat32;  // what its elements are converted to
  Index row_group = 1;
  Index columns = 1;
  std::shared_ptr<const Box> box = nullptr;  // the part of it; null: all
  Orders orders = {};
};

// One slab of a walk.
struct WalkSlab {
  std::size_t item = 0;
  Box box;
  Index number = 0;  // of it among all of the walk, those that earlier runs finished included
};

// The slabs of all items, in order, made on demand.
class SlabList {
 public:
  // Slabs of about `usual` bytes (Device::slab_bytes), more where an item's columns are narrow or its sides transposed,
  // and of `limit` bytes at most, or larger where its columns are too narrow for that. Without those that are finished,
  // which are the first so many from each first one on.
  SlabList(const std::vector<WalkItem>& items, const Catalog& catalog, Index usual, Index limit,
           const std::map<Index, Index>& finished = {});

  Index total() const { return total_; }
  Index largest() const { return largest_; }  // bytes
  WalkSlab get(Index k) const;                // 0 <= k < total()

  // n + 1 slab numbers: rank r's slabs are those from the r-th to before the next. Equal in bytes but for a slab, or
  // for a tensor where tensors stay whole (where nothing is finished).
  std::vector<Index> shares(int n, bool whole_tensors) const;

  // Of memory that an item takes in a list.
  static constexpr Index item_bytes() { return sizeof(ItemSlabs); }

 private:
  struct ItemSlabs {
    std::size_t kind = 0;            // of how it is cut, among kinds_: a model's layers have few
    std::shared_ptr<const Box> box;  // that is walked over; null: all
    Index first = 0;                 // number of its first slab in the whole walk
    Index before = 0;                // bytes of the items before it
  };
  // Slabs that are left, as they follow each other in the whole walk.
  struct Left {
    Index number = 0;  // of the first in the whole walk
    Index first = 0;   // of the first in the list
    Index before = 0;  // bytes of those before it in the list
  };
  std::size_t kind_of(const Slabs& slabs);
  const Slabs& slabs_of(const ItemSlabs& item) const { return kinds_[item.kind]; }
  const ItemSlabs& item_of(Index number) const;
  Index bytes_before(Index number) const;
  std::vector<Index> shares_of_left(int n) const;
  std::vector<Slabs> kinds_;
  std::vector<ItemSlabs> items_;
  std::vector<Left> left_;  // empty: all
  Index total_ = 0;
  Index largest_ = 0;
  Index bytes_ = 0;
};

// What one thread works with: memory for a slab's elements, for what they become, and for reading and writing.
struct Buffers {
  DeviceBuffer slab, extra;
  MutableBytes stored;   // of the device: a slab as files have it; empty on the CPU, where no slab is brought anywhere
  MutableBytes scratch;  // of the host
  Stream* stream = nullptr;
};

// The memory and the streams of all threads.
class ThreadBuffers {
 public:
  // Slabs of `slab` bytes, `extra` times as much for what they become, and `scratch` bytes.
  static Result<ThreadBuffers> make(Device& device, int threads, Index slab, Index extra, Index scratch);
  const std::vector<Buffers>& buffers() const { return buffers_; }  // of each thread

 private:
  Result<DeviceBuffer> add(Device& device, Index bytes);
  std::vector<std::unique_ptr<Device::Memory>> memory_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Buffers> buffers_;
};

// Where a slab's elements are there to be used.
enum class Side { kHost, kDevice };

// What is done with a slab whose elements are there, in the source's dtype, at the beginning of `elements`.
using SlabVisit =
    std::function<Status(const WalkSlab& slab, const DeviceBuffer& elements, Side side, const Buffers& buffers)>;

// Reads a box of a tensor, or of it the pieces `wanted`, to their places in `to`: on the device's side, where they are
// once the stream was waited for, or on the host's. A device gets bytes as files have them, and puts them in place.
Result<Side> read_box(TensorSource& source, std::size_t tensor, const Box& box, const DeviceBuffer& to,
                      const Buffers& buffers, const PieceFilter& wanted = nullptr);

// Visits the slabs [first, end) of a list, which this rank reads itself, on a thread for each of `buffers`; each holds
// the list's largest slab.
Status read_slabs(const std::vector<WalkItem>& items, const SlabList& list, Index first, Index end,
                  TensorSource& source, const RunOptions& options, const std::vector<Buffers>& buffers,
                  const SlabVisit& visit);

// Queues on the buffers' stream what brings a slab's n elements to the device and makes them `to`. Returns where they
// are then: where they were, or in buffers.extra.
Result<DeviceBuffer> convert_on_device(const DeviceBuffer& elements, Side side, DType from, DType to, Index n,
                                       const Buffers& buffers);

// The largest slab that cannot be made smaller, bytes.
Index largest_group(const std::vector<WalkItem>& items, const Catalog& source);

}  // namespace reshard
