#include "tests/support/exchange_checks.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace reshard {
namespace {

// A rank's range of a dimension that is divided as evenly as possible.
struct Part {
  Index begin = 0, size = 0;
};
Part part_of(Index extent, int parts, int i) {
  const Index begin = extent * i / parts;
  return {begin, extent * (i + 1) / parts - begin};
}

struct Shape {
  Index rows = 0, columns = 0, element_bytes = 0;
};

// Reshards a matrix from row shards to column shards.
class Resharding {
 public:
  static Result<Resharding> make(Device& device, const Transport& ranks, const Shape& shape, unsigned seed) {
    Resharding out(ranks, shape);
    std::mt19937_64 random(seed);
    out.matrix_.resize(static_cast<std::size_t>(shape.rows * shape.columns * shape.element_bytes));
    for (std::byte& b : out.matrix_) b = static_cast<std::byte>(random() >> 40);
    out.stream_ = TRY(device.stream());
    out.source_ = TRY(device.allocate(out.rows_.size * shape.columns * shape.element_bytes));
    out.packed_ = TRY(device.allocate(out.rows_.size * shape.columns * shape.element_bytes));
    out.arrived_ = TRY(device.allocate(shape.rows * out.columns_.size * shape.element_bytes));
    out.target_ = TRY(device.allocate(shape.rows * out.columns_.size * shape.element_bytes));
    return out;
  }

  Status send(Transport& ranks) {
    const Index row_bytes = shape_.columns * shape_.element_bytes;
    const DeviceBuffer source = source_->buffer(), packed = packed_->buffer();
    const auto first = matrix_.begin() + rows_.begin * row_bytes;
    std::copy(first, first + rows_.size * row_bytes, source.host.begin());
    TRY(stream_->upload(source, static_cast<Index>(source.host.size())));
    std::vector<Outgoing> out;
    for (int peer = 0; peer < size_; ++peer) {
      const Part columns = part_of(shape_.columns, size_, peer);
      std::byte* to = packed.device.data() + rows_.size * columns.begin * shape_.element_bytes;
      TRY(stream_->copy_box({rows_.size, columns.size}, shape_.element_bytes,
                            source.device.data() + columns.begin * shape_.element_bytes, {shape_.columns, 1}, to,
                            {columns.size, 1}));
      if (peer != rank_) out.push_back({peer, {to, bytes_of(rows_.size, columns.size)}});
    }
    TRY(stream_->wait());
    std::vector<Incoming> in;
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_) in.push_back({peer, {arrived_from(peer), bytes_of(rows_of(peer).size, columns_.size)}});
    transfer_ = TRY(ranks.start(std::move(out), std::move(in)));
    return {};
  }

  Status receive() {
    TRY(transfer_->wait());
    const DeviceBuffer target = target_->buffer();
    for (int peer = 0; peer < size_; ++peer) {
      const Part rows = rows_of(peer);
      const std::byte* from = peer == rank_
                                  ? packed_->buffer().device.data() + rows_.size * columns_.begin * shape_.element_bytes
                                  : arrived_from(peer);
      TRY(stream_->copy_box({rows.size, columns_.size}, shape_.element_bytes, from, {columns_.size, 1},
                            target.device.data() + rows.begin * columns_.size * shape_.element_bytes,
                            {columns_.size, 1}));
    }
    TRY(stream_->download(target, static_cast<Index>(target.host.size())));
    TRY(stream_->wait());
    const Index line = columns_.size * shape_.element_bytes;
    for (Index row = 0; row < shape_.rows; ++row) {
      const auto expected = matrix_.begin() + (row * shape_.columns + columns_.begin) * shape_.element_bytes;
      if (!std::equal(target.host.begin() + row * line, target.host.begin() + (row + 1) * line, expected))
        return internal_error("rank " + std::to_string(rank_) + ": row " + std::to_string(row) + " of " +
                              std::to_string(shape_.rows) + " differs after the exchange");
    }
    return {};
  }

 private:
  Resharding(const Transport& ranks, const Shape& shape)
      : shape_(shape),
        rank_(ranks.rank()),
        size_(ranks.size()),
        rows_(part_of(shape.rows, size_, rank_)),
        columns_(part_of(shape.columns, size_, rank_)) {}

  Part rows_of(int peer) const { return part_of(shape_.rows, size_, peer); }
  std::size_t bytes_of(Index rows, Index columns) const {
    return static_cast<std::size_t>(rows * columns * shape_.element_bytes);
  }
  std::byte* arrived_from(int peer) const {
    return arrived_->buffer().device.data() + rows_of(peer).begin * columns_.size * shape_.element_bytes;
  }

  Shape shape_;
  int rank_, size_;
  Part rows_, columns_;
  std::vector<std::byte> matrix_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Device::Memory> source_, packed_, arrived_, target_;
  std::unique_ptr<Transfer> transfer_;
};

}  // namespace

Status check_exchange(Device& device, Transport& ranks, unsigned seed) {
  const std::vector<Shape> shapes = {{64, 256, 2}, {1, 7, 4}, {50, 333, 1}, {96, 256, 8}};
  std::vector<Resharding> all;
  for (const Shape& shape : shapes) all.push_back(TRY(Resharding::make(device, ranks, shape, seed++)));
  for (Resharding& one : all) TRY(one.send(ranks));
  for (Resharding& one : all) TRY(one.receive());
  return {};
}

}  // namespace reshard
