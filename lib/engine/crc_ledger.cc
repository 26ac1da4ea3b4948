#include "lib/engine/crc_ledger.h"

#include "lib/device/crc32.h"

namespace reshard {

std::optional<std::uint32_t> CrcLedger::add(const Extent& extent, Index begin, Index length, std::uint32_t crc) {
  const std::lock_guard lock(mutex_);
  const Key key{extent.file, extent.offset};
  if (done_.contains(key)) return std::nullopt;
  if (begin == 0 && length == extent.length) {
    open_.erase(key);
    done_[key] = {length, crc};
    if (recent_) recent_->add(extent, begin, length, crc);
    return crc;
  }
  Entry& entry = open_[key];
  entry.extent = extent;
  auto& pieces = entry.pieces;
  const Index end = begin + length;
  auto next = pieces.lower_bound(begin);
  if (next != pieces.end() && next->first < end) return std::nullopt;
  if (next != pieces.begin() && std::prev(next)->second.end > begin) return std::nullopt;

  if (recent_) recent_->add(extent, begin, length, crc);
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
  done_[key] = {extent.length, whole};
  return whole;
}

std::optional<std::uint32_t> CrcLedger::whole(const Extent& extent) const {
  const std::lock_guard lock(mutex_);
  const auto it = done_.find({extent.file, extent.offset});
  if (it == done_.end()) return std::nullopt;
  return it->second.crc;
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
  for (const auto& [key, done] : done_) out.push_back({{key.file, key.offset, done.length}, 0, done.length, done.crc});
  return out;
}

std::vector<CrcPiece> CrcLedger::take_recent() {
  const std::lock_guard lock(mutex_);
  if (!recent_) return {};
  std::vector<CrcPiece> out = recent_->everything();
  recent_->clear();
  return out;
}

void CrcLedger::clear() {
  const std::lock_guard lock(mutex_);
  open_.clear();
  done_.clear();
}

}  // namespace reshard
