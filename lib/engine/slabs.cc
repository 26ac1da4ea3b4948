// SPDX-License-Identifier: Apache-2.0
#include "lib/engine/slabs.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "lib/base/parallel.h"

namespace reshard {
namespace {

constexpr Index kPieceBytes = Index{256} << 10;  // the least size of one column of a slab
// Direct I/O reads whole units, so a slab read as stored needs room for the units around its pieces.
constexpr Index kStoredRoom = 17 * File::kDirectUnit;

Index wanted_slab(const WalkItem& item, Index usual, Index limit) {
  // The contiguous runs of a transposed slab are about as long as the square root of its size.
  if (item.orders.are_transposed()) return limit;
  return std::clamp(kPieceBytes * item.columns, std::min(usual, limit), limit);
}

Box box_of(const WalkItem& item, const Tensor& tensor) { return item.box ? *item.box : whole(tensor.shape); }

}  // namespace

Index growth(DType from, DType to) { return std::max<Index>(1, ceil_div(byte_size(to), byte_size(from))); }

Index largest_group(const std::vector<WalkItem>& items, const Catalog& source) {
  Index largest = 0;
  for (const WalkItem& item : items) {
    const Tensor& t = source.tensors()[item.tensor];
    const Dims shape = box_of(item, t).shape;
    largest = std::max(largest, Slabs(shape, byte_size(t.dtype), 1, item.row_group).max_bytes());
  }
  return largest;
}

SlabList::SlabList(const std::vector<WalkItem>& items, const Catalog& catalog, Index usual, Index limit,
                   const std::map<Index, Index>& finished) {
  items_.reserve(items.size());
  for (const WalkItem& item : items) {
    const Tensor& t = catalog.tensors()[item.tensor];
    const Slabs slabs(box_of(item, t).shape, byte_size(t.dtype), wanted_slab(item, usual, limit), item.row_group,
                      item.orders);
    items_.push_back({kind_of(slabs), item.box, total_, bytes_});
    total_ += slabs.count();
    largest_ = std::max(largest_, slabs.max_bytes());
    bytes_ += slabs.bytes();
  }
  if (finished.empty()) return;
  const Index all = std::exchange(total_, 0);
  Index bytes = 0;
  const auto add = [&](Index begin, Index end) {
    left_.push_back({begin, total_, bytes});
    total_ += end - begin;
    bytes += bytes_before(end) - bytes_before(begin);
  };
  Index at = 0;
  for (const auto& [first, count] : finished) {
    if (first > at) add(at, first);
    at = first + count;
  }
  add(at, all);  // possibly empty: its start marks the end of the list
  bytes_ = bytes;
}

std::size_t SlabList::kind_of(const Slabs& slabs) {
  const std::size_t oldest = kinds_.size() - std::min(kinds_.size(), RecentBoxes::kKept);
  for (std::size_t k = kinds_.size(); k > oldest; --k)
    if (kinds_[k - 1] == slabs) return k - 1;
  kinds_.push_back(slabs);
  return kinds_.size() - 1;
}

const SlabList::ItemSlabs& SlabList::item_of(Index number) const {
  return *std::prev(
      std::upper_bound(items_.begin(), items_.end(), number, [](Index n, const ItemSlabs& w) { return n < w.first; }));
}

// Returns the bytes of all slabs before slab `number`; slightly too many if an item's last slabs are smaller.
Index SlabList::bytes_before(Index number) const {
  const ItemSlabs& item = item_of(number);
  const Slabs& slabs = slabs_of(item);
  return item.before + std::min(slabs.bytes(), (number - item.first) * slabs.max_bytes());
}

WalkSlab SlabList::get(Index k) const {
  if (!left_.empty()) {
    const auto run = std::prev(
        std::upper_bound(left_.begin(), left_.end(), k, [](Index n, const UnfinishedRun& l) { return n < l.first; }));
    k += run->number - run->first;
  }
  const ItemSlabs& item = item_of(k);
  Box box = slabs_of(item).slab(k - item.first);
  for (int d = 0; item.box && d < box.rank(); ++d) box.origin[d] += item.box->origin[d];
  return {static_cast<std::size_t>(&item - items_.data()), box, k};
}

std::vector<Index> SlabList::shares_of_left(int n) const {
  std::vector<Index> out = {0};
  for (int r = 1; r < n; ++r) {
    const Index goal = bytes_ / n * r + bytes_ % n * r / n;
    const auto run = std::prev(std::upper_bound(left_.begin(), left_.end(), goal,
                                                [](Index g, const UnfinishedRun& l) { return g < l.before; }));
    const Index end = std::next(run) == left_.end() ? total_ : std::next(run)->first;
    // Find the first slab of that run with at least `goal` bytes before it.
    Index low = run->first, high = end;
    while (low < high) {
      const Index middle = low + (high - low) / 2;
      const Index before = run->before + bytes_before(run->number + middle - run->first) - bytes_before(run->number);
      (before < goal ? low : high) = before < goal ? middle + 1 : middle;
    }
    out.push_back(std::max(out.back(), low));
  }
  out.push_back(total_);
  return out;
}

std::vector<Index> SlabList::shares(int n, bool whole_tensors) const {
  if (!left_.empty()) return shares_of_left(n);
  std::vector<Index> out = {0};
  std::size_t w = 0;
  Index before = 0;  // bytes of the items before w
  for (int r = 1; r < n; ++r) {
    // Bytes before rank r's first slab; computed in two steps because the product may overflow.
    const Index goal = bytes_ / n * r + bytes_ % n * r / n;
    while (w < items_.size() && before + slabs_of(items_[w]).bytes() <= goal) before += slabs_of(items_[w++]).bytes();
    if (w == items_.size()) {
      out.push_back(total_);
      continue;
    }
    const ItemSlabs& item = items_[w];
    // Round to the nearest border between slabs, or between tensors.
    const Slabs& slabs = slabs_of(item);
    const Index unit = whole_tensors ? slabs.bytes() : slabs.max_bytes();
    const Index units = (goal - before + unit / 2) / unit;
    const Index slab = whole_tensors ? units * slabs.count() : std::min(units, slabs.count());
    out.push_back(std::max(out.back(), item.first + slab));
  }
  out.push_back(total_);
  return out;
}

Result<DeviceBuffer> ThreadBuffers::add(Device& device, Index bytes) {
  memory_.push_back(TRY(device.allocate(bytes)));
  return memory_.back()->buffer();
}

Result<ThreadBuffers> ThreadBuffers::make(Device& device, int threads, Index slab, Index extra, Index scratch) {
  ThreadBuffers out;
  for (int t = 0; t < threads; ++t) {
    Buffers b;
    b.slab = TRY(out.add(device, device.is_cpu() ? slab : slab + kStoredRoom));
    if (!device.is_cpu()) {
      out.memory_.push_back(TRY(device.allocate(slab + kStoredRoom, Sides::kDevice)));
      b.stored = out.memory_.back()->buffer().device;
    }
    b.extra = TRY(out.add(device, extra * slab));
    b.scratch = TRY(out.add(cpu_device(), scratch + 2 * File::kDirectUnit)).host;
    out.streams_.push_back(TRY(device.stream()));
    b.stream = out.streams_.back().get();
    out.buffers_.push_back(b);
  }
  return out;
}

Result<Side> read_box(TensorSource& source, std::size_t tensor, const Box& box, const DeviceBuffer& to,
                      const Buffers& buffers, const PieceFilter& wanted) {
  const Index element = byte_size(source.catalog().tensors()[tensor].dtype);
  const std::size_t bytes = volume(box) * element;
  Stream& stream = *buffers.stream;
  if (!wanted && TRY(source.read_to_device(tensor, box, stream, to.device.first(bytes)))) return Side::kDevice;
  if (!buffers.stored.empty()) {
    std::vector<LaidPiece> pieces;
    const Index used = TRY(source.read_as_stored(tensor, box, wanted, buffers.slab.host, pieces));
    if (used > 0) {
      TRY(stream.upload({buffers.slab.host, buffers.stored}, used));
      const Dims strides = row_major_strides(box.shape);
      for (const LaidPiece& piece : pieces)
        TRY(stream.copy_box(piece.box.shape, element, buffers.stored.data() + piece.at, piece.strides,
                            to.device.data() + offset_in(box, strides, piece.box) * element, strides));
      return Side::kDevice;
    }
  }
  TRY(source.read_pieces(tensor, box, wanted, to.host.first(bytes), buffers.scratch));
  return Side::kHost;
}

Result<DeviceBuffer> convert_on_device(const DeviceBuffer& elements, Side side, DType from, DType to, Index n,
                                       const Buffers& buffers) {
  if (side == Side::kHost) TRY(buffers.stream->upload(elements, n * byte_size(from)));
  if (from == to) return elements;
  TRY(buffers.stream->convert(from, to, elements.device.data(), buffers.extra.device.data(), n));
  return buffers.extra;
}

}  // namespace reshard
