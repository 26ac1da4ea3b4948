#include "lib/engine/exchange_schedule.h"

#include <algorithm>
#include <utility>

namespace reshard {

ExchangeSchedule::ExchangeSchedule(const Plan& plan, const Catalog& target_view, const MemoryTarget& target,
                                   SlabList slabs, int rank, Index limit)
    : plan_(plan),
      target_view_(target_view),
      target_(target),
      slabs_(std::move(slabs)),
      rank_(rank),
      ranks_(static_cast<int>(target.mesh().ranks())),
      limit_(limit) {
  for (const PlannedTensor& planned : plan.tensors) {
    const FragmentList& fragments = target_view.tensors()[planned.to].fragments;
    indexes_.emplace_back(fragments);
    tensor_.push_back(fragments.empty() ? 0 : target.tensor_at(fragments.extent(0).offset));
  }
  const std::vector<Index> shares = slabs_.shares(ranks_, false);
  next_.assign(shares.begin(), shares.end() - 1);
  end_.assign(shares.begin() + 1, shares.end());
}

Index ExchangeSchedule::element_bytes(std::size_t planned) const {
  return byte_size(target_view_.tensors()[plan_.tensors[planned].to].dtype);
}

std::vector<ExchangeSchedule::Part> ExchangeSchedule::cut(std::size_t planned, const Box& slab) const {
  const FragmentList& fragments = target_view_.tensors()[plan_.tensors[planned].to].fragments;
  std::vector<Part> parts;
  indexes_[planned].overlapping(slab, [&](std::size_t i, const Box& both) {
    const std::uint32_t file = fragments.extent(i).file;
    auto part = std::lower_bound(parts.begin(), parts.end(), file,
                                 [](const Part& p, std::uint32_t wanted) { return p.file < wanted; });
    if (part == parts.end() || part->file != file) part = parts.insert(part, {file, {}, 0});
    part->pieces.push_back(both);
    part->elements += volume(both);
  });
  return parts;
}

std::vector<Box> ExchangeSchedule::packing_order(std::size_t planned, const Box& slab) const {
  std::vector<Box> out;
  for (Part& part : cut(planned, slab)) std::move(part.pieces.begin(), part.pieces.end(), std::back_inserter(out));
  return out;
}

bool ExchangeSchedule::fits(const std::vector<Part>& parts, std::size_t planned, int reader) const {
  Index bytes = 0;
  for (const Part& part : parts) {
    const Index part_bytes = part.elements * element_bytes(planned);
    bytes += part_bytes;
    for (const Index step : steps(planned)) {
      const Index holder = part.file + step;
      if (holder != reader && received_[static_cast<std::size_t>(holder)] + part_bytes > limit_) return false;
    }
  }
  return sent_[static_cast<std::size_t>(reader)] + bytes <= limit_;
}

bool ExchangeSchedule::take_next(int reader, ExchangeRound& round) {
  Index& next = next_[static_cast<std::size_t>(reader)];
  const auto [planned, slab] = slabs_.get(next);
  const std::vector<Part> parts = cut(planned, slab);
  if (!fits(parts, planned, reader)) return false;
  Index& sent = sent_[static_cast<std::size_t>(reader)];
  if (reader == rank_) round.reads.push_back({planned, slab, sent});
  for (const Part& part : parts) {
    const Index bytes = part.elements * element_bytes(planned);
    for (const Index step : steps(planned)) {
      const int holder = static_cast<int>(part.file + step);
      Index& received = received_[static_cast<std::size_t>(holder)];
      if (holder == rank_) {
        const bool is_own = reader == rank_;
        if (!is_own) round.messages.in.push_back({reader, received, bytes});
        round.arrivals.push_back({planned, part.pieces, is_own, is_own ? sent : received, bytes});
      } else if (reader == rank_) {
        round.messages.out.push_back({holder, sent, bytes});
      }
      if (holder != reader) received += bytes;
    }
    sent += bytes;
  }
  return ++next < end_[static_cast<std::size_t>(reader)];
}

bool ExchangeSchedule::next(ExchangeRound& round) {
  const auto n = static_cast<std::size_t>(ranks_);
  round = {};
  sent_.assign(n, 0);
  received_.assign(n, 0);
  std::vector<int> readers;  // that may have room for more
  for (int i = 0; i < ranks_; ++i) {
    const int r = (first_ + i) % ranks_;
    if (next_[static_cast<std::size_t>(r)] < end_[static_cast<std::size_t>(r)]) readers.push_back(r);
  }
  if (readers.empty()) return false;
  first_ = (first_ + 1) % ranks_;
  while (!readers.empty()) {
    std::vector<int> with_room;
    for (const int reader : readers)
      if (take_next(reader, round)) with_room.push_back(reader);
    readers = std::move(with_room);
  }
  round.sent_bytes = sent_[static_cast<std::size_t>(rank_)];
  round.received_bytes = received_[static_cast<std::size_t>(rank_)];
  return true;
}

}  // namespace reshard
