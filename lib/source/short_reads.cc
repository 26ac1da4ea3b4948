// SPDX-License-Identifier: Apache-2.0
#include "lib/source/short_reads.h"

#include <algorithm>
#include <cstring>

namespace reshard {

Status ShortReads::read(std::uint32_t number, const File& file, Index size, Index offset, MutableBytes out) {
  constexpr Index kAtOnce = Index{64} << 10;
  constexpr Index kNear = Index{8} << 10;  // threads take turns, and headers may be in between
  const Index length = std::ssize(out), end = offset + length;
  {
    const std::lock_guard lock(mutex_);
    const bool follows = number == number_ && offset >= next_ - kNear && offset < next_ + kNear;
    const auto is_held = [&] { return offset >= begin_ && end <= begin_ + std::ssize(bytes_); };
    if (number != number_ || !is_held()) bytes_.clear();
    number_ = number;
    next_ = end;
    if (bytes_.empty() && follows) {
      begin_ = offset;
      bytes_.resize(std::clamp<Index>(size - offset, 0, kAtOnce));
      if (!file.read_at(begin_, bytes_)) bytes_.clear();  // the piece itself may still be readable
    }
    if (is_held()) {
      std::memcpy(out.data(), bytes_.data() + (offset - begin_), out.size());
      return {};
    }
  }
  return file.read_at(offset, out);
}

}  // namespace reshard
