// SPDX-License-Identifier: Apache-2.0
#include "lib/load/exchange_schedule.h"

#include <algorithm>
#include <map>
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

bool ExchangeSchedule::fits(const std::vector<Part>& parts, std::size_t planned, int reader) const {
  Index bytes = 0;
  for (const Part& part : parts) {
    const Index part_bytes = part.elements * element_bytes(planned);
    bytes += part_bytes;
    for (const Index step : steps(planned)) {
      const Index holder = part.file + step;
      if (holder != reader && received_[holder] + part_bytes > limit_) return false;
    }
  }
  return sent_[reader] + bytes <= limit_;
}

bool ExchangeSchedule::take_next(int reader, std::vector<ReadSlab>& taken) {
  Index& next = next_[reader];
  const auto [planned, slab, number] = slabs_.get(next);
  std::vector<Part> parts = cut(planned, slab);
  if (!fits(parts, planned, reader)) return false;
  for (const Part& part : parts) {
    const Index bytes = part.elements * element_bytes(planned);
    sent_[reader] += bytes;
    for (const Index step : steps(planned))
      if (const Index holder = part.file + step; holder != reader) received_[holder] += bytes;
  }
  taken.push_back({reader, planned, slab, std::move(parts)});
  return ++next < end_[reader];
}

void ExchangeSchedule::lay_out(const std::vector<ReadSlab>& taken, int reader, ExchangeRound& round) {
  // Group the parts by their receivers, which the offsets of the replicas and the first replica's file identify.
  struct Member {
    const ReadSlab* slab;
    const Part* part;
    std::size_t read;  // index among this rank's reads
  };
  std::map<std::pair<std::vector<Index>, std::uint32_t>, std::vector<Member>> groups;
  const bool reads = reader == rank_;
  for (const ReadSlab& t : taken) {
    if (t.reader != reader) continue;
    for (const Part& part : t.parts) groups[{steps(t.planned), part.file}].push_back({&t, &part, round.reads.size()});
    if (reads) round.reads.push_back({t.planned, t.slab, {}});
  }
  for (const auto& [key, members] : groups) {
    const auto& [steps_of_all, file] = key;
    const bool holds = std::any_of(steps_of_all.begin(), steps_of_all.end(),
                                   [&, first = Index{file}](Index step) { return first + step == rank_; });
    if (!reads && !holds) continue;
    Index& filled = reads ? round.sent_bytes : round.received_bytes;
    const Index begin = filled;
    for (const Member& m : members) {
      const Index bytes = m.part->elements * element_bytes(m.slab->planned);
      if (reads) round.reads[m.read].parts.push_back({m.part->pieces, filled});
      if (holds) round.arrivals.push_back({m.slab->planned, m.part->pieces, reads, filled, bytes});
      filled += bytes;
    }
    if (!reads) {
      round.messages.in.push_back({reader, begin, filled - begin});
      continue;
    }
    for (const Index step : steps_of_all)
      if (const auto holder = static_cast<int>(file + step); holder != rank_)
        round.messages.out.push_back({holder, begin, filled - begin});
  }
}

bool ExchangeSchedule::next(ExchangeRound& round) {
  const std::size_t n = ranks_;
  round = {};
  sent_.assign(n, 0);
  received_.assign(n, 0);
  std::vector<int> readers;  // ranks that may have room for more
  for (int i = 0; i < ranks_; ++i) {
    const int r = (first_ + i) % ranks_;
    if (next_[r] < end_[r]) readers.push_back(r);
  }
  if (readers.empty()) return false;
  first_ = (first_ + 1) % ranks_;
  std::vector<ReadSlab> taken;
  while (!readers.empty()) {
    std::vector<int> with_room;
    for (const int reader : readers)
      if (take_next(reader, taken)) with_room.push_back(reader);
    readers = std::move(with_room);
  }
  for (int reader = 0; reader < ranks_; ++reader) lay_out(taken, reader, round);
  return true;
}

}  // namespace reshard
