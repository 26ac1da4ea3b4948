// SPDX-License-Identifier: Apache-2.0
#include "lib/output/small_write_buffer.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace reshard {

bool SmallWriteBuffer::add(std::uint32_t file, Index offset, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  const auto length = std::ssize(bytes);
  if (length > kLongest || memory_ + bytes_of(length) > kMemory) return false;
  memory_ += bytes_of(length);
  pieces_.push_back({file, static_cast<std::uint32_t>(bytes_.size()), offset, length});
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  return true;
}

Status SmallWriteBuffer::give_before(std::uint32_t file, Index offset, const EmitBytes& emit) {
  const auto is_before = [](const Piece& a, const Piece& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  };
  if (given_ == 0 && !std::is_sorted(pieces_.begin(), pieces_.end(), is_before))
    std::sort(pieces_.begin(), pieces_.end(), is_before);
  const Piece place{file, 0, offset, 0};
  for (; given_ < pieces_.size() && is_before(pieces_[given_], place); ++given_) {
    const Piece& next = pieces_[given_];
    TRY(emit(next.file, next.offset, Bytes(bytes_).subspan(next.begin, next.length)));
  }
  return {};
}

Status SmallWriteBuffer::give_all(const EmitBytes& emit) {
  return give_before(std::numeric_limits<std::uint32_t>::max(), 0, emit);
}

Status JoinedWrites::add(std::uint32_t file, Index offset, Bytes bytes) {
  constexpr Index kLong = Index{64} << 10;
  const bool follows = file == file_ && offset == begin_ + std::ssize(held_) && std::ssize(held_) < kLong;
  if (!follows || std::ssize(bytes) >= kLong) TRY(finish());
  if (std::ssize(bytes) >= kLong) return write_(file, offset, bytes);
  if (held_.empty()) {
    file_ = file;
    begin_ = offset;
  }
  held_ += as_string(bytes);
  return {};
}

Status JoinedWrites::finish() {
  Status written = held_.empty() ? Status() : write_(file_, begin_, as_bytes(held_));
  held_.clear();
  return written;
}

}  // namespace reshard
