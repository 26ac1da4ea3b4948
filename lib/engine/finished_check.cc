// SPDX-License-Identifier: Apache-2.0
#include "lib/engine/finished_check.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>

#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/copy.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

// Returns the slabs of [0, all) that are not in `finished`.
std::map<Index, Index> unfinished(const std::map<Index, Index>& finished, Index all) {
  std::map<Index, Index> out;
  Index at = 0;
  for (const auto& [first, count] : finished) {
    if (first > at) out.emplace(at, first - at);
    at = first + count;
  }
  if (at < all) out.emplace(at, all - at);
  return out;
}

// The digest of one tensor's finished slabs, as read again.
struct RereadDigest {
  Digest digest;
  Index different_copies = 0;
};

// The buffers of one thread: a slab in the output's dtype, its bytes in the files, and two pieces to compare.
struct CheckBuffers {
  std::vector<std::byte> slab, stored, piece, copy;
};

class FinishedCheck {
 public:
  FinishedCheck(const std::vector<StoredItem>& stored, Output& output)
      : stored_(stored), output_(output), seen_(stored.size()) {}

  // Thread-safe.
  Status read(const WalkSlab& slab, CheckBuffers& room) {
    const StoredItem& item = stored_[slab.item];
    const Tensor& tensor = *item.tensor;
    const Index element = byte_size(tensor.dtype);
    const Dims strides = row_major_strides(slab.box.shape);
    room.slab.resize(volume(slab.box) * element);
    const auto place = [&](const Piece& piece) {
      return room.slab.data() + offset_in(slab.box, strides, piece.box) * element;
    };
    TRY(output_.read(tensor.fragments, *item.index, slab.box, element, room.stored,
                     [&](const Piece& piece, const std::byte* first) {
                       copy_box(piece.box.shape, element, first, piece.strides, place(piece), strides);
                     }));
    RereadDigest seen;
    seen.digest = digest_box(tensor.shape, slab.box, element, room.slab.data());
    if (!tensor.replicas.empty())
      TRY(output_.read(tensor.replicas, *item.copies, slab.box, element, room.stored,
                       [&](const Piece& piece, const std::byte* first) {
                         if (!is_same(piece, element, first, place(piece), strides, room)) ++seen.different_copies;
                       }));
    const std::lock_guard lock(mutex_);
    seen_[slab.item].digest += seen.digest;
    seen_[slab.item].different_copies += seen.different_copies;
    return {};
  }

  // Adds up the digests of all ranks.
  Result<std::vector<RereadDigest>> take(Transport* ranks) {
    TRY(combine_values(ranks, std::span(seen_), [](RereadDigest& mine, const RereadDigest& theirs) {
      mine.digest += theirs.digest;
      mine.different_copies += theirs.different_copies;
    }));
    return std::move(seen_);
  }

 private:
  static bool is_same(const Piece& piece, Index element, const std::byte* first, const std::byte* expected,
                      const Dims& expected_strides, CheckBuffers& room) {
    const Dims packed = row_major_strides(piece.box.shape);
    room.piece.resize(volume(piece.box) * element);
    room.copy.resize(room.piece.size());
    copy_box(piece.box.shape, element, first, piece.strides, room.piece.data(), packed);
    copy_box(piece.box.shape, element, expected, expected_strides, room.copy.data(), packed);
    return room.piece == room.copy;
  }

  const std::vector<StoredItem>& stored_;
  Output& output_;
  std::vector<RereadDigest> seen_;
  std::mutex mutex_;
};

Status check_fits(const std::map<Index, Index>& finished, Index total) {
  if (finished.empty() || finished.rbegin()->first + finished.rbegin()->second <= total) return {};
  return corrupt("the journal of the killed run lists more slabs than this run has; add --resume never to start over");
}

}  // namespace

Result<FinishedWork> read_finished_work(SlabCut cut, const Output& output, Transport* ranks) {
  std::vector<Index> numbers;
  if (const JournalText* const before = output.earlier_work()) {
    numbers = {before->cut.usual, before->cut.limit};
    for (const auto& [first, count] : before->finished.slabs) numbers.insert(numbers.end(), {first, count});
  }
  const std::string_view mine(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Index));
  const std::string all = TRY(broadcast(ranks, std::string(mine)));
  numbers.resize(all.size() / sizeof(Index));
  if (numbers.empty()) return FinishedWork{cut, {}};
  std::memcpy(numbers.data(), all.data(), numbers.size() * sizeof(Index));
  FinishedWork out{{numbers[0], numbers[1]}, {}};
  for (std::size_t i = 2; i < numbers.size(); i += 2) out.finished.emplace(numbers[i], numbers[i + 1]);
  return out;
}

Result<std::optional<std::string>> find_changed(const std::vector<WalkItem>& items,
                                                const std::vector<StoredItem>& stored, const Catalog& source,
                                                Output& output, const MemoryPlan& memory, Index extra,
                                                const RunOptions& options) {
  const FinishedWork before = TRY(read_finished_work({1, 1}, output, options.ranks));
  if (before.finished.empty()) return std::optional<std::string>();
  const Index all = SlabList(items, source, before.cut.usual, before.cut.limit).total();
  TRY(check_fits(before.finished, all));
  const SlabList list(items, source, before.cut.usual, before.cut.limit, unfinished(before.finished, all));
  const std::vector<Index> shares = list.shares(rank_count(options.ranks), false);
  const std::size_t me = rank_of(options.ranks);
  const Index first = shares[me], count = shares[me + 1] - first;

  const bool has_copies =
      std::any_of(stored.begin(), stored.end(), [](const StoredItem& item) { return !item.tensor->replicas.empty(); });
  const Index slab = std::max<Index>(1, extra) * list.largest(), scratch = std::max(kMinSlab, memory.scratch_bytes);
  const Index room = worker_count(options) * ((1 + extra) * memory.slab_bytes + memory.scratch_bytes);
  const int threads =
      static_cast<int>(std::clamp<Index>(room / (slab * (has_copies ? 3 : 1) + scratch), 1,
                                         std::max<Index>(1, std::min<Index>(count, worker_count(options)))));
  std::vector<CheckBuffers> rooms(threads);
  for (CheckBuffers& r : rooms) r.stored.resize(scratch);

  FinishedCheck check(stored, output);
  TRY(parallel_for(count, threads, [&](int thread, Index k) -> Status {
    TRY(check_not_interrupted(options));
    return check.read(list.get(first + k), rooms[thread]);
  }));
  const std::vector<RereadDigest> seen = TRY(check.take(options.ranks));
  std::string changed;  // the index of the changed item
  if (const JournalText* const text = output.earlier_work())
    for (std::size_t i = 0; i < seen.size() && changed.empty(); ++i) {
      const auto recorded = text->finished.digests.find(i);
      const Digest expected = recorded == text->finished.digests.end() ? Digest() : recorded->second.target;
      if (seen[i].digest != expected || seen[i].different_copies > 0) changed = std::to_string(i);
    }
  const auto number = parse_number(TRY(broadcast(options.ranks, std::move(changed))));
  if (!number) return std::optional<std::string>();
  return std::optional(stored[*number].tensor->name);
}

}  // namespace reshard
