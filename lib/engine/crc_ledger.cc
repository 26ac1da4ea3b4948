#include "lib/engine/crc_ledger.h"

#include <algorithm>
#include <utility>

#include "lib/device/crc32.h"

namespace reshard {
struct CrcLedger::Recent {
  std::vector<CrcPiece> whole;
  CrcLedger pieces;
};

CrcLedger::CrcLedger() = default;
CrcLedger::~CrcLedger() = default;

std::size_t CrcLedger::Done::place(const Key& key) const {
  const auto& [file, offset] = key;
  const std::uint64_t mixed = (static_cast<std::uint64_t>(offset) ^ std::uint64_t{file} << 40) * 0x9e3779b97f4a7c15;
  const std::uint64_t hash = (mixed ^ mixed >> 32) * 0xff51afd7ed558ccd >> 32;
  auto at = static_cast<std::size_t>(hash * slots_.size() >> 32);
  while (slots_[at].offset >= 0 && (slots_[at].file != file || slots_[at].offset != offset))
    at = at + 1 < slots_.size() ? at + 1 : 0;
  return at;
}

const std::uint32_t* CrcLedger::Done::find(const Key& key) const {
  if (slots_.empty()) return nullptr;
  const Slot& slot = slots_[place(key)];
  return slot.offset >= 0 ? &slot.crc : nullptr;
}

void CrcLedger::Done::grow(std::size_t slots) {
  const std::vector<Slot> before = std::exchange(slots_, std::vector<Slot>(slots));
  for (const Slot& slot : before)
    if (slot.offset >= 0) slots_[place({slot.file, slot.offset})] = slot;
}

void CrcLedger::Done::add(const Key& key, std::uint32_t crc) {
  if (5 * (size_ + 1) > 4 * slots_.size())
    grow(std::max({expected_ + expected_ / 4 + 2, 2 * slots_.size(), std::size_t{16}}));
  Slot& slot = slots_[place(key)];
  slot = {key.second, key.first, crc};
  ++size_;
}

bool CrcLedger::overlaps(const Entry& entry, Index begin, Index end) {
  const auto next = entry.pieces.lower_bound(begin);
  return (next != entry.pieces.end() && next->first < end) ||
         (next != entry.pieces.begin() && std::prev(next)->second.end > begin);
}

bool CrcLedger::is_new(const Extent& extent, Index begin, Index length) const {
  const std::lock_guard lock(mutex_);
  const Key key{extent.file, extent.offset};
  if (done_.find(key)) return false;
  const auto entry = open_.find(key);
  return entry == open_.end() || !overlaps(entry->second, begin, begin + length);
}

std::vector<std::pair<Index, Index>> CrcLedger::gaps(const Extent& extent) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<Index, Index>> out;
  const Key key{extent.file, extent.offset};
  if (done_.find(key)) return out;
  Index at = 0;
  if (const auto entry = open_.find(key); entry != open_.end())
    for (const auto& [begin, piece] : entry->second.pieces) {
      if (begin > at) out.emplace_back(at, begin);
      at = piece.end;
    }
  if (at < extent.length) out.emplace_back(at, extent.length);
  return out;
}

void CrcLedger::keep_recent() { recent_ = std::make_unique<Recent>(); }

std::optional<std::uint32_t> CrcLedger::add(const Extent& extent, Index begin, Index length, std::uint32_t crc) {
  const std::lock_guard lock(mutex_);
  const Key key{extent.file, extent.offset};
  if (done_.find(key)) return std::nullopt;
  if (begin == 0 && length == extent.length) {
    open_.erase(key);
    done_.add(key, crc);
    if (recent_) recent_->whole.push_back({extent, begin, length, crc});
    return crc;
  }
  Entry& entry = open_[key];
  entry.extent = extent;
  auto& pieces = entry.pieces;
  const Index end = begin + length;
  if (overlaps(entry, begin, end)) return std::nullopt;
  const auto next = pieces.lower_bound(begin);

  if (recent_)
    if (const auto all = recent_->pieces.add(extent, begin, length, crc))
      recent_->whole.push_back({extent, 0, extent.length, *all});
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
  open_.erase(key);
  done_.add(key, whole);
  return whole;
}

std::optional<std::uint32_t> CrcLedger::whole(const Extent& extent) const {
  const std::lock_guard lock(mutex_);
  const std::uint32_t* const done = done_.find({extent.file, extent.offset});
  if (!done) return std::nullopt;
  return *done;
}

std::vector<Extent> CrcLedger::incomplete() const {
  const std::lock_guard lock(mutex_);
  std::vector<Extent> out;
  for (const auto& [key, entry] : open_) out.push_back(entry.extent);
  return out;
}

std::vector<CrcPiece> CrcLedger::unfinished() const {
  const std::lock_guard lock(mutex_);
  std::vector<CrcPiece> out;
  for (const auto& [key, entry] : open_)
    for (const auto& [begin, piece] : entry.pieces) out.push_back({entry.extent, begin, piece.end - begin, piece.crc});
  return out;
}

std::vector<CrcPiece> CrcLedger::everything() const {
  std::vector<CrcPiece> out = unfinished();
  const std::lock_guard lock(mutex_);
  done_.each([&](const Key& key, std::uint32_t crc) { out.push_back({{key.first, key.second, 0}, 0, 0, crc}); });
  return out;
}

std::vector<CrcPiece> CrcLedger::take_recent() {
  const std::lock_guard lock(mutex_);
  if (!recent_) return {};
  std::vector<CrcPiece> out = recent_->pieces.unfinished();
  recent_->pieces.clear();
  out.insert(out.end(), recent_->whole.begin(), recent_->whole.end());
  recent_->whole.clear();
  return out;
}

void CrcLedger::clear() {
  const std::lock_guard lock(mutex_);
  open_.clear();
  done_ = Done();
}

}  // namespace reshard
