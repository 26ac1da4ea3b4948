// SPDX-License-Identifier: Apache-2.0
#include "lib/source/crc_ledger.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "lib/device/crc32.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

std::pair<std::uint32_t, Index> key_of(const Extent& extent) { return {extent.file, extent.offset}; }

std::uint32_t upper_half(Index offset) { return static_cast<std::uint32_t>(offset >> 32); }
std::uint32_t lower_half(Index offset) { return static_cast<std::uint32_t>(offset); }

}  // namespace

EachExtent extents_of(const Catalog& catalog) {
  return [&catalog](const VisitExtent& visit) {
    for (const Tensor& t : catalog.tensors())
      for (const FragmentList* const list : {&t.fragments, &t.replicas})
        for (std::size_t i = 0; i < list->size(); ++i) visit(list->extent(i));
  };
}

bool CrcLedger::IncompleteExtents::overlaps(const Pieces& pieces, Index begin, Index end) {
  const auto next = pieces.lower_bound(begin);
  return (next != pieces.end() && next->first < end) || (next != pieces.begin() && std::prev(next)->second.end > begin);
}

bool CrcLedger::IncompleteExtents::overlaps(const Key& key, Index begin, Index end) const {
  const auto entry = entries_.find(key);
  return entry != entries_.end() && overlaps(entry->second.pieces, begin, end);
}

std::optional<std::uint32_t> CrcLedger::IncompleteExtents::add(const Extent& extent, Index begin, Index length,
                                                               std::uint32_t crc) {
  if (begin == 0 && length == extent.length) {
    entries_.erase(key_of(extent));
    return crc;
  }
  Entry& entry = entries_[key_of(extent)];
  entry.extent = extent;
  Pieces& pieces = entry.pieces;
  const Index end = begin + length;
  if (overlaps(pieces, begin, end)) return std::nullopt;
  const auto next = pieces.lower_bound(begin);
  auto mine = pieces.emplace_hint(next, begin, Piece{end, crc});
  if (next != pieces.end() && next->first == end) {
    mine->second.crc = crc32_combine(mine->second.crc, next->second.crc, next->second.end - end);
    mine->second.end = next->second.end;
    pieces.erase(next);
  }
  if (mine != pieces.begin()) {
    const auto before = std::prev(mine);
    if (before->second.end == begin) {
      before->second.crc = crc32_combine(before->second.crc, mine->second.crc, mine->second.end - begin);
      before->second.end = mine->second.end;
      pieces.erase(mine);
      mine = before;
    }
  }
  if (mine->first != 0 || mine->second.end != extent.length) return std::nullopt;
  const std::uint32_t whole = mine->second.crc;
  entries_.erase(key_of(extent));
  return whole;
}

std::vector<std::pair<Index, Index>> CrcLedger::IncompleteExtents::gaps(const Extent& extent) const {
  std::vector<std::pair<Index, Index>> out;
  Index at = 0;
  if (const auto entry = entries_.find(key_of(extent)); entry != entries_.end())
    for (const auto& [begin, piece] : entry->second.pieces) {
      if (begin > at) out.emplace_back(at, begin);
      at = piece.end;
    }
  if (at < extent.length) out.emplace_back(at, extent.length);
  return out;
}

std::vector<Extent> CrcLedger::IncompleteExtents::extents() const {
  std::vector<Extent> out;
  for (const auto& [key, entry] : entries_) out.push_back(entry.extent);
  return out;
}

void CrcLedger::IncompleteExtents::for_each(const VisitPiece& visit) const {
  for (const auto& [key, entry] : entries_)
    for (const auto& [begin, piece] : entry.pieces) visit({entry.extent, begin, piece.end - begin, piece.crc});
}

CrcLedger::CompleteExtents::CompleteExtents(const EachExtent& each_extent) {
  const auto group_of = [&](const Extent& e) -> Group& { return groups_[{e.file, upper_half(e.offset)}]; };
  each_extent([&](const Extent& e) { ++group_of(e).end; });
  std::size_t sum = 0;
  for (auto& [key, group] : groups_) {
    group.begin = sum;
    sum += std::exchange(group.end, sum);
  }
  offsets_.resize(sum);
  crcs_.resize(sum);
  known_.resize(sum);
  each_extent([&](const Extent& e) { offsets_[group_of(e).end++] = lower_half(e.offset); });
  for (const auto& [key, group] : groups_) {
    const auto begin = offsets_.begin() + group.begin;
    const auto end = offsets_.begin() + group.end;
    if (!std::is_sorted(begin, end)) std::sort(begin, end);
  }
}

std::optional<std::size_t> CrcLedger::CompleteExtents::place(const Key& key) const {
  const auto& [file, offset] = key;
  const auto group = groups_.find({file, upper_half(offset)});
  if (group == groups_.end()) return std::nullopt;
  const auto end = offsets_.begin() + group->second.end;
  const auto at = std::lower_bound(offsets_.begin() + group->second.begin, end, lower_half(offset));
  if (at == end || *at != lower_half(offset)) return std::nullopt;
  return at - offsets_.begin();
}

void CrcLedger::CompleteExtents::add(std::size_t place, std::uint32_t crc) {
  crcs_[place] = crc;
  known_[place] = true;
}

void CrcLedger::CompleteExtents::for_each(const VisitPiece& visit) const {
  for (const auto& [key, group] : groups_)
    for (std::size_t i = group.begin; i < group.end; ++i)
      if (known_[i]) visit({{key.first, Index{key.second} << 32 | offsets_[i], 0}, 0, 0, crcs_[i]});
}

CrcLedger::CompleteExtents& CrcLedger::complete() const {
  if (!complete_) complete_.emplace(each_extent_);
  return *complete_;
}

bool CrcLedger::is_new(const Extent& extent, Index begin, Index length) const {
  const std::lock_guard lock(mutex_);
  const auto place = complete().place(key_of(extent));
  return place && !complete().find(*place) && !incomplete_.overlaps(key_of(extent), begin, begin + length);
}

std::vector<std::pair<Index, Index>> CrcLedger::gaps(const Extent& extent) const {
  const std::lock_guard lock(mutex_);
  const auto place = complete().place(key_of(extent));
  if (place && complete().find(*place)) return {};
  return incomplete_.gaps(extent);
}

void CrcLedger::keep_recent() { recent_.emplace(); }

std::optional<std::uint32_t> CrcLedger::add(const Extent& extent, Index begin, Index length, std::uint32_t crc) {
  const std::lock_guard lock(mutex_);
  const auto place = complete().place(key_of(extent));
  if (!place || complete().find(*place)) return std::nullopt;
  const bool is_whole = begin == 0 && length == extent.length;
  if (!is_whole && incomplete_.overlaps(key_of(extent), begin, begin + length)) return std::nullopt;
  if (recent_)
    if (const auto all = recent_->pieces.add(extent, begin, length, crc))
      recent_->whole.push_back({extent, 0, extent.length, *all});
  const auto whole = incomplete_.add(extent, begin, length, crc);
  if (whole) complete().add(*place, *whole);
  return whole;
}

std::optional<std::uint32_t> CrcLedger::whole(const Extent& extent) const {
  const std::lock_guard lock(mutex_);
  const auto place = complete().place(key_of(extent));
  const std::uint32_t* const crc = place ? complete().find(*place) : nullptr;
  if (!crc) return std::nullopt;
  return *crc;
}

std::vector<Extent> CrcLedger::incomplete() const {
  const std::lock_guard lock(mutex_);
  return incomplete_.extents();
}

void CrcLedger::visit_incomplete(const VisitPiece& visit) const {
  const std::lock_guard lock(mutex_);
  incomplete_.for_each(visit);
}

void CrcLedger::visit_all(const VisitPiece& visit) const {
  const std::lock_guard lock(mutex_);
  incomplete_.for_each(visit);
  complete().for_each(visit);
}

Status CrcLedger::gather(Transport* ranks) {
  return stream_values<CrcPiece>(
      ranks, [&](const VisitPiece& visit) { visit_all(visit); },
      [&](const CrcPiece& p) { add(p.extent, p.begin, p.length, p.crc); });
}

std::vector<CrcPiece> CrcLedger::take_recent() {
  const std::lock_guard lock(mutex_);
  if (!recent_) return {};
  Recent recent = std::exchange(*recent_, {});
  std::vector<CrcPiece> out = std::move(recent.whole);
  recent.pieces.for_each([&](const CrcPiece& piece) { out.push_back(piece); });
  return out;
}

void CrcLedger::clear() {
  const std::lock_guard lock(mutex_);
  incomplete_ = IncompleteExtents();
  complete().clear();
}

}  // namespace reshard
