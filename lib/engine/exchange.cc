// SPDX-License-Identifier: Apache-2.0
#include "lib/engine/exchange.h"

#include <algorithm>
#include <memory>

#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/engine/rounds.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr Index kUsualStaging = Index{32} << 20;

// The work of one step: rounds [first_round, end_round) of the writers [first_writer, end_writer). In round j a writer
// processes the j-th slab of its share.
struct Step {
  Index first_round = 0, end_round = 0;
  int first_writer = 0, end_writer = 0;
};

// The slabs of one writer in a step, as numbers in the list.
struct SlabRange {
  Index begin = 0, end = 0;
};

// A slab whose pieces this rank sends or receives.
struct SlabMessage {
  Index slab = 0;
  struct Piece {
    Box box;
    int reader = 0;
    Index offset = 0;  // in the staging buffer
  };
  std::vector<Piece> pieces;
  bool all_of_it = false;  // the slab is one piece
};

// The slabs of a step that this rank reads for other ranks, and those that it writes.
struct StepSlabs {
  std::vector<SlabMessage> sent, own;
};

class Exchange : public Rounds {
 public:
  Exchange(const std::vector<WalkItem>& items, const SlabList& list, const std::vector<Index>& shares,
           TensorSource& source, const Staging& staging, const RunOptions& options, Transport& data,
           const std::vector<Buffers>& buffers, const SlabVisit& visit)
      : items_(items),
        list_(list),
        shares_(shares),
        source_(source),
        staging_(staging),
        options_(options),
        buffers_(buffers),
        visit_(visit),
        ranks_(*options.ranks),
        data_(data),
        on_device_(data_.moves_device_memory()),
        readers_(items, source.catalog(), options.ranks->size()) {}

  Status run();

 private:
  Result<bool> read(int half, const DeviceBuffer& sent, RoundMessages& messages) override;
  Status finish(int half, const DeviceBuffer& sent, const DeviceBuffer& received) override;

  Index share_begin(int writer) const { return shares_[writer]; }
  Index share_end(int writer) const { return shares_[static_cast<std::size_t>(writer) + 1]; }
  const Tensor& tensor_of(const WalkSlab& s) const { return source_.catalog().tensors()[items_[s.item].tensor]; }
  Index bytes_of(const WalkSlab& s, const Box& box) const { return volume(box) * byte_size(tensor_of(s).dtype); }

  Status read_mine(const WalkSlab& s, const Buffers& b) const;
  Status copy_pieces(const WalkSlab& s, const std::vector<SlabMessage::Piece>& pieces, const DeviceBuffer& staging,
                     const Buffers& b, bool pack) const;

  SlabRange slabs_of(const Step& step, int writer) const;
  SlabMessage message_of(Index slab, bool mine) const;
  Result<std::vector<Step>> schedule() const;
  StepSlabs slabs_of(const Step& step, RoundMessages& messages) const;
  bool reads(const StoredPiece& piece) const { return readers_.reader(piece) == ranks_.rank(); }

  const std::vector<WalkItem>& items_;
  const SlabList& list_;
  const std::vector<Index>& shares_;
  TensorSource& source_;
  const Staging& staging_;
  const RunOptions& options_;
  const std::vector<Buffers>& buffers_;
  const SlabVisit& visit_;
  Transport& ranks_;  // for collective operations
  Transport& data_;   // for elements
  bool on_device_;    // whether `data_` moves device memory
  ReaderMap readers_;
  std::unique_ptr<Stream> host_;  // copies synchronously, in the caller's thread
  std::vector<Step> steps_;
  std::size_t next_step_ = 0;
  StepSlabs halves_[2];
};

SlabRange Exchange::slabs_of(const Step& step, int writer) const {
  const Index begin = share_begin(writer);
  return {begin + step.first_round, std::min(share_end(writer), begin + step.end_round)};
}

// Divides the work into steps whose messages fit into the staging buffers of every rank. Each rank counts what it sends
// and receives; the maximum over all ranks decides, so that all ranks divide the work in the same way.
Result<std::vector<Step>> Exchange::schedule() const {
  const int n = ranks_.size(), me = ranks_.rank();
  Index rounds = 0;
  for (int w = 0; w < n; ++w) rounds = std::max(rounds, share_end(w) - share_begin(w));
  std::vector<Index> sent(rounds, 0), got = sent;
  for (int w = 0; w < n; ++w)
    for (Index k = share_begin(w); k < share_end(w); ++k) {
      const std::size_t round = k - share_begin(w);
      const WalkSlab s = list_.get(k);
      for (const StoredPiece& piece : source_.pieces(items_[s.item].tensor, s.box)) {
        const int reader = readers_.reader(piece);
        if (reader == me && w != me) sent[round] += bytes_of(s, piece.box);
        if (reader != me && w == me) got[round] += bytes_of(s, piece.box);
      }
    }
  std::vector<Index> most;
  for (std::size_t j = 0; j < sent.size(); ++j) most.push_back(std::max(sent[j], got[j]));
  TRY(maximum(&ranks_, most));

  std::vector<Step> steps;
  Index filled = 0;
  for (Index j = 0; j < rounds; ++j) {
    const Index bytes = most[j];
    if (bytes > staging_.bytes) {
      // Take so few writers at a time that all of their slabs fit.
      const int writers = static_cast<int>(std::max<Index>(1, staging_.bytes / std::max<Index>(1, list_.largest())));
      for (int w = 0; w < n; w += writers) steps.push_back({j, j + 1, w, std::min(n, w + writers)});
      filled = staging_.bytes;
    } else if (!steps.empty() && filled + bytes <= staging_.bytes) {
      steps.back().end_round = j + 1;
      filled += bytes;
    } else {
      steps.push_back({j, j + 1, 0, n});
      filled = bytes;
    }
  }
  return steps;
}

// Returns the pieces of a slab that this rank sends, or all pieces if the slab is `mine`.
SlabMessage Exchange::message_of(Index slab, bool mine) const {
  const WalkSlab s = list_.get(slab);
  const auto pieces = source_.pieces(items_[s.item].tensor, s.box);
  SlabMessage message{slab, {}, pieces.size() == 1};
  for (const StoredPiece& piece : pieces)
    if (const int reader = readers_.reader(piece); mine || reader == ranks_.rank())
      message.pieces.push_back({piece.box, reader, 0});
  return message;
}

StepSlabs Exchange::slabs_of(const Step& step, RoundMessages& messages) const {
  const int me = ranks_.rank();
  StepSlabs slabs;
  // Messages to one writer are adjacent in the buffer, in the order of its slabs.
  Index at = 0;
  for (int w = step.first_writer; w < step.end_writer; ++w) {
    const Index begin = at;
    const SlabRange range = slabs_of(step, w);
    for (Index k = range.begin; k < range.end; ++k) {
      SlabMessage message = message_of(k, w == me);
      if (message.pieces.empty()) continue;
      if (w == me) {
        slabs.own.push_back(std::move(message));
        continue;
      }
      for (SlabMessage::Piece& piece : message.pieces) {
        piece.offset = at;
        at += bytes_of(list_.get(k), piece.box);
      }
      slabs.sent.push_back(std::move(message));
    }
    if (at > begin) messages.out.push_back({w, begin, at - begin});
  }
  // Messages from one reader are adjacent in the buffer, in the order in which it sends them.
  at = 0;
  for (int reader = 0; reader < ranks_.size(); ++reader) {
    if (reader == me) continue;
    const Index begin = at;
    for (SlabMessage& message : slabs.own)
      for (SlabMessage::Piece& piece : message.pieces) {
        if (piece.reader != reader) continue;
        piece.offset = at;
        at += bytes_of(list_.get(message.slab), piece.box);
      }
    if (at > begin) messages.in.push_back({reader, begin, at - begin});
  }
  return slabs;
}

// Reads what other ranks need, and packs it into messages.
Result<bool> Exchange::read(int half, const DeviceBuffer& sent, RoundMessages& messages) {
  if (next_step_ == steps_.size()) return false;
  StepSlabs& slabs = halves_[half];
  slabs = slabs_of(steps_[next_step_++], messages);
  const auto one = [&](int thread, Index i) -> Status {
    TRY(check_not_interrupted(options_));
    const SlabMessage& message = slabs.sent[i];
    const WalkSlab s = list_.get(message.slab);
    const std::size_t tensor = items_[s.item].tensor;
    const Buffers& b = buffers_[thread];
    if (message.pieces.size() == 1) {
      const SlabMessage::Piece& only = message.pieces.front();
      const DeviceBuffer place = sent.part(only.offset, bytes_of(s, only.box));
      if (!on_device_) return source_.read(tensor, only.box, place.host, b.scratch);
      if (TRY(read_box(source_, tensor, only.box, place, b)) == Side::kHost)
        TRY(b.stream->upload(place, bytes_of(s, only.box)));
      return b.stream->wait();
    }
    TRY(read_mine(s, b));
    return copy_pieces(s, message.pieces, sent, b, true);
  };
  TRY(parallel_for(std::ssize(slabs.sent), static_cast<int>(buffers_.size()), one));
  return true;
}

// Reads this rank's pieces of a slab to their places in the thread's buffer. They may interleave in a file, so they are
// read together: each byte is read once.
Status Exchange::read_mine(const WalkSlab& s, const Buffers& b) const {
  const std::size_t tensor = items_[s.item].tensor;
  const Index length = bytes_of(s, s.box);
  const PieceFilter mine = [&](const StoredPiece& p) { return reads(p); };
  if (!on_device_) return source_.read_pieces(tensor, s.box, mine, b.slab.host.first(length), b.scratch);
  const Side side = TRY(read_box(source_, tensor, s.box, b.slab, b, mine));
  return side == Side::kHost ? b.stream->upload(b.slab, length) : Status();
}

// Copies pieces between a slab and the messages in a staging buffer.
Status Exchange::copy_pieces(const WalkSlab& s, const std::vector<SlabMessage::Piece>& pieces,
                             const DeviceBuffer& staging, const Buffers& b, bool pack) const {
  const Index eb = byte_size(tensor_of(s).dtype);
  const Dims strides = row_major_strides(s.box.shape);
  Stream& stream = on_device_ ? *b.stream : *host_;
  for (const SlabMessage::Piece& piece : pieces) {
    std::byte* const in_slab = moved(data_, b.slab).data() + offset_in(s.box, strides, piece.box) * eb;
    std::byte* const in_message = moved(data_, staging).data() + piece.offset;
    const Dims dense = row_major_strides(piece.box.shape);
    TRY(pack ? stream.copy_box(piece.box.shape, eb, in_slab, strides, in_message, dense)
             : stream.copy_box(piece.box.shape, eb, in_message, dense, in_slab, strides));
  }
  return stream.wait();
}

// Assembles this rank's slabs from what it reads itself and what it received, and visits them.
Status Exchange::finish(int half, const DeviceBuffer&, const DeviceBuffer& received) {
  const StepSlabs& slabs = halves_[half];
  const auto one = [&](int thread, Index i) -> Status {
    TRY(check_not_interrupted(options_));
    const SlabMessage& message = slabs.own[i];
    const WalkSlab s = list_.get(message.slab);
    const Buffers& b = buffers_[thread];
    const Index length = bytes_of(s, s.box);
    const Side side = on_device_ ? Side::kDevice : Side::kHost;
    std::vector<SlabMessage::Piece> theirs;
    for (const SlabMessage::Piece& piece : message.pieces)
      if (piece.reader != ranks_.rank()) theirs.push_back(piece);
    if (message.all_of_it && !theirs.empty()) return visit_(s, received.part(theirs.front().offset, length), side, b);
    if (theirs.size() < message.pieces.size()) TRY(read_mine(s, b));
    TRY(copy_pieces(s, theirs, received, b, false));
    return visit_(s, b.slab, side, b);
  };
  return parallel_for(std::ssize(slabs.own), static_cast<int>(buffers_.size()), one);
}

Status Exchange::run() {
  steps_ = TRY(schedule());
  host_ = TRY(cpu_device().stream());
  return run_rounds(*this, device_of(options_), data_, staging_.bytes);
}

}  // namespace

bool exchanges(const RunOptions& options) {
  return rank_count(options.ranks) > 1 && options.strategy == Strategy::kExchange;
}

Staging Staging::plan(const RunOptions& options, Index largest_group) {
  if (!exchanges(options)) return {};
  return {std::max({std::min(kUsualStaging, options.memory / 12), largest_group, kMinSlab})};
}

Status exchange_slabs(const std::vector<WalkItem>& items, const SlabList& list, const std::vector<Index>& shares,
                      TensorSource& source, const Staging& staging, const RunOptions& options,
                      const std::vector<Buffers>& buffers, const SlabVisit& visit) {
  Transport* const data = options.data ? TRY(options.data()) : options.ranks;
  return Exchange(items, list, shares, source, staging, options, *data, buffers, visit).run();
}

ReaderMap::ReaderMap(const std::vector<WalkItem>& items, const Catalog& catalog, int n) {
  struct Stretch {
    std::uint32_t file;
    Index offset, bytes;
  };
  std::vector<Stretch> stretches;
  Index total = 0;
  for (const WalkItem& item : items) {
    const Tensor& t = catalog.tensors()[item.tensor];
    for (std::size_t i = 0; i < t.fragments.size(); ++i) {
      const Extent& e = t.fragments.extent(i);
      const Index bytes = volume(t.fragments.box(i)) * byte_size(t.dtype);
      stretches.push_back({e.file, e.offset + t.fragments.get(i).start, bytes});
      total += bytes;
    }
  }
  std::sort(stretches.begin(), stretches.end(), [](const Stretch& a, const Stretch& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  });
  Index before = 0;
  std::size_t k = 0;
  for (int r = 1; r < n; ++r) {
    const Index goal = total / n * r + total % n * r / n;
    while (k < stretches.size() && before + stretches[k].bytes <= goal) before += stretches[k++].bytes;
    if (k == stretches.size()) break;
    borders_.emplace_back(stretches[k].file, stretches[k].offset + (goal - before));
  }
}

int ReaderMap::reader(const StoredPiece& piece) const {
  const auto it = std::upper_bound(borders_.begin(), borders_.end(), std::pair(piece.file, piece.offset));
  return static_cast<int>(it - borders_.begin());
}

}  // namespace reshard
