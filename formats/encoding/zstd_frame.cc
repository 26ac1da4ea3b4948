// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/zstd_frame.h"

#define ZSTD_STATIC_LINKING_ONLY  // for the header of a frame
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "lib/base/memory_limit.h"
#include "lib/base/text.h"

namespace reshard::zstd {
namespace {

constexpr Index kInputPiece = Index{128} << 10;
constexpr Index kOutputPiece = Index{1} << 20;
constexpr int kWindowLogMax = 27;  // a window of at most 128 MiB, whatever the frame requests

using Pull = std::function<Result<Bytes>()>;  // returns the next input; empty at the end
using Push = std::function<Status(Bytes decoded)>;

Status decode_stream(const Pull& pull, const Push& push, Index limit, const std::string& place) {
  const std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> context(ZSTD_createDCtx(), &ZSTD_freeDCtx);
  if (!context) return io_error(place + ": out of memory for zstd");
  ZSTD_DCtx_setParameter(context.get(), ZSTD_d_windowLogMax, kWindowLogMax);
  std::vector<std::byte> buffer(std::size_t{kOutputPiece});
  Index total = 0;
  while (true) {
    const Bytes piece = TRY(pull());
    if (piece.empty()) return corrupt(place + ": zstd frame: expected more bytes, got the end of the item");
    ZSTD_inBuffer in{piece.data(), piece.size(), 0};
    std::size_t left = 1;
    bool full = true;  // the decoder may have more output than fitted
    while (in.pos < in.size || full) {
      ZSTD_outBuffer out{buffer.data(), buffer.size(), 0};
      left = ZSTD_decompressStream(context.get(), &out, &in);
      if (ZSTD_getErrorCode(left) == ZSTD_error_memory_allocation) return io_error(place + ": out of memory for zstd");
      if (ZSTD_isError(left)) return corrupt(place + ": zstd frame: " + ZSTD_getErrorName(left));
      total += out.pos;
      if (total > limit) return corrupt(place + ": zstd frame: expected at most " + bytes_of(limit) + ", got more");
      TRY(push(Bytes(buffer).first(out.pos)));
      full = out.pos == out.size;
      if (left == 0) break;
    }
    if (left != 0) continue;
    if (in.pos < in.size || !TRY(pull()).empty())
      return corrupt(place + ": zstd frame: expected one frame, got bytes after it");
    return {};
  }
}

}  // namespace

Result<Index> decode(const File& file, Index offset, Index length, Index limit, const File& out, Index out_offset) {
  std::vector<std::byte> buffer(std::min(length, kInputPiece));
  Index taken = 0, written = 0;
  const Pull pull = [&]() -> Result<Bytes> {
    const MutableBytes piece = MutableBytes(buffer).first(std::min(length - taken, kInputPiece));
    TRY(file.read_at(offset + taken, piece));
    taken += std::ssize(piece);
    return Bytes(piece);
  };
  const Push push = [&](Bytes decoded) -> Status {
    TRY(out.write_at(out_offset + written, decoded));
    written += std::ssize(decoded);
    return {};
  };
  TRY(decode_stream(pull, push, limit, at(file.path(), offset)));
  return written;
}

Result<std::string> decode(Bytes frame, Index limit, const std::string& place) {
  std::string out;
  const Pull pull = [&]() -> Result<Bytes> { return std::exchange(frame, {}); };
  const Push push = [&](Bytes decoded) -> Status {
    const std::size_t size = out.size() + decoded.size();
    if (size > out.capacity()) {
      const std::size_t room = std::max(size, 2 * out.capacity());
      TRY(may_take(room, [&] { return place + ": a zstd frame"; }));
      out.reserve(room);
    }
    out += as_string(decoded);
    return {};
  };
  TRY(decode_stream(pull, push, limit, place));
  return out;
}

Index window_bytes(Bytes start) {
  ZSTD_frameHeader header;
  if (ZSTD_getFrameHeader(&header, start.data(), start.size()) != 0) return 0;
  return to_index(header.windowSize).value_or(INT64_MAX);
}

Index content_bytes(Bytes start) {
  const unsigned long long bytes = ZSTD_getFrameContentSize(start.data(), start.size());
  if (bytes == ZSTD_CONTENTSIZE_UNKNOWN || bytes == ZSTD_CONTENTSIZE_ERROR) return -1;
  return to_index(bytes).value_or(-1);
}

// ---- Encoding

struct FrameEncoder::Context {
  ~Context() { ZSTD_freeCCtx(zstd); }
  ZSTD_CCtx* zstd = ZSTD_createCCtx();
  std::vector<std::byte> frame;
};

FrameEncoder::FrameEncoder(int level, Index limit) : level_(level), limit_(limit) {}
FrameEncoder::~FrameEncoder() = default;

std::unique_ptr<FrameEncoder::Context> FrameEncoder::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto out = std::move(idle_.back());
      idle_.pop_back();
      return out;
    }
  }
  auto out = std::make_unique<Context>();
  out->frame.resize(ZSTD_compressBound(static_cast<std::size_t>(limit_)));
  if (!out->zstd) return out;
  ZSTD_CCtx_setParameter(out->zstd, ZSTD_c_compressionLevel, level_);
  ZSTD_CCtx_setParameter(out->zstd, ZSTD_c_checksumFlag, 1);
  return out;
}

Status FrameEncoder::encode(Bytes bytes, const std::function<Status(Bytes frame)>& use) {
  auto context = take();
  if (!context->zstd) return io_error("out of memory for zstd");
  std::vector<std::byte>& frame = context->frame;
  const std::size_t length = ZSTD_compress2(context->zstd, frame.data(), frame.size(), bytes.data(), bytes.size());
  if (ZSTD_getErrorCode(length) == ZSTD_error_memory_allocation) return io_error("out of memory for zstd");
  if (ZSTD_isError(length)) return internal_error(std::string("zstd: ") + ZSTD_getErrorName(length));
  TRY(use(Bytes(frame).first(length)));
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(context));
  return {};
}

Index FrameEncoder::memory(int level, Index limit) {
  const ZSTD_compressionParameters parameters = ZSTD_getCParams(level, static_cast<unsigned long long>(limit), 0);
  return static_cast<Index>(ZSTD_estimateCCtxSize_usingCParams(parameters)) +
         static_cast<Index>(ZSTD_compressBound(static_cast<std::size_t>(limit)));
}

}  // namespace reshard::zstd
