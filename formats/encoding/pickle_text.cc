// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/pickle_text.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "lib/base/text.h"

namespace reshard::pickle::internal {
namespace {

constexpr std::size_t kStretch = 1 << 20;         // bytes to read at once
constexpr std::size_t kLeastReleased = 16 << 10;  // bytes; fewer are not worth a system call

}  // namespace

Text::Text(std::string bytes) : whole_(std::move(bytes)), size_(whole_.size()), filled_(size_) {}

Result<Text> Text::of(const File& file) {
  Text out;
  out.file_ = &file;
  out.size_ = TRY(file.size());
  out.kept_ = out.size_;
  out.room_ = std::min(2 * out.size_, std::max(out.size_, kPlaces));
  const std::size_t bytes = std::max<std::size_t>(out.room_, 1);
  void* const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return io_error(file.path() + ": a pickle of " + human_bytes(out.size_) + ": out of memory");
  out.mapped_ = {static_cast<unsigned char*>(p), [bytes](unsigned char* mapped) { ::munmap(mapped, bytes); }};
  return out;
}

Status Text::fill(std::size_t end) {
  if (end <= filled_) return {};
  end = std::min(size_, std::max(end, filled_ + kStretch));
  const MutableBytes missing(reinterpret_cast<std::byte*>(mapped_.get()) + filled_, end - filled_);
  TRY(file_->read_at(filled_, missing));
  filled_ = end;
  return {};
}

void Text::release(std::size_t begin, std::size_t end) {
  if (!mapped_) return;
  static const std::size_t page = ::sysconf(_SC_PAGESIZE);
  const std::size_t from = (begin + page - 1) / page * page, to = end / page * page;
  if (to > from && to - from >= kLeastReleased) ::madvise(mapped_.get() + from, to - from, MADV_DONTNEED);
}

std::optional<std::size_t> Text::keep(std::size_t begin, std::size_t end) {
  if (end - begin > room_ - kept_) return std::nullopt;
  std::memcpy(mapped_.get() + kept_, mapped_.get() + begin, end - begin);
  return std::exchange(kept_, kept_ + (end - begin));
}

}  // namespace reshard::pickle::internal
