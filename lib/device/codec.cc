// SPDX-License-Identifier: Apache-2.0
#include "lib/device/codec.h"

#define ZSTD_STATIC_LINKING_ONLY  // for ZSTD_estimateCStreamSize
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lib/base/text.h"
#include "lib/device/crc32.h"

namespace reshard {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSum = 4;               // bytes of a Fletcher-32 or CRC-32C
constexpr std::size_t kSmallestPlane = 4096;  // bytes that are worth a block of their own

// One instantiation for each common element size, so that the compiler sees constants.
template <std::size_t kUnit>
void shuffle_fixed(const std::byte* in, std::size_t n, std::byte* out) {
  constexpr std::size_t kBlock = 4096;  // elements; a block stays in the L1 cache
  for (std::size_t begin = 0; begin < n; begin += kBlock) {
    const std::size_t end = std::min(n, begin + kBlock);
    for (std::size_t b = 0; b < kUnit; ++b)
      for (std::size_t i = begin; i < end; ++i) out[b * n + i] = in[i * kUnit + b];
  }
}

template <std::size_t kUnit>
void unshuffle_fixed(const std::byte* in, std::size_t n, std::byte* out) {
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t b = 0; b < kUnit; ++b) out[i * kUnit + b] = in[b * n + i];
}

}  // namespace

std::string zstd_version() { return ZSTD_versionString(); }

void shuffle_bytes(Bytes in, Index unit, MutableBytes out) {
  const std::size_t u = unit;
  const std::size_t n = u == 0 ? 0 : in.size() / u;
  if (u == 2) shuffle_fixed<2>(in.data(), n, out.data());
  if (u == 4) shuffle_fixed<4>(in.data(), n, out.data());
  if (u == 8) shuffle_fixed<8>(in.data(), n, out.data());
  if (u != 2 && u != 4 && u != 8)
    for (std::size_t b = 0; b < u; ++b)
      for (std::size_t i = 0; i < n; ++i) out[b * n + i] = in[i * u + b];
  std::copy(in.begin() + n * u, in.end(), out.begin() + n * u);
}

void unshuffle_bytes(Bytes in, Index unit, MutableBytes out) {
  const std::size_t u = unit;
  const std::size_t n = u == 0 ? 0 : in.size() / u;
  if (u == 2) unshuffle_fixed<2>(in.data(), n, out.data());
  if (u == 4) unshuffle_fixed<4>(in.data(), n, out.data());
  if (u == 8) unshuffle_fixed<8>(in.data(), n, out.data());
  if (u != 2 && u != 4 && u != 8)
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t b = 0; b < u; ++b) out[i * u + b] = in[b * n + i];
  std::copy(in.begin() + n * u, in.end(), out.begin() + n * u);
}

std::uint32_t fletcher32(Bytes bytes) {
  std::uint32_t a = 0, b = 0;
  const auto fold = [](std::uint32_t v) { return (v & 0xffff) + (v >> 16); };
  std::size_t i = 0;
  while (i + 1 < bytes.size()) {
    // The sums cannot overflow within 360 words.
    const std::size_t end = std::min(bytes.size() - 1, i + std::size_t{2} * 360);
    for (; i < end; i += 2) {
      a += static_cast<std::uint32_t>(bytes[i]) << 8 | static_cast<std::uint32_t>(bytes[i + 1]);
      b += a;
    }
    a = fold(a);
    b = fold(b);
  }
  if (i < bytes.size()) {
    a += static_cast<std::uint32_t>(bytes[i]) << 8;
    b += a;
    a = fold(a);
    b = fold(b);
  }
  return fold(b) << 16 | fold(a);
}

// ---- Decoding

struct ChunkDecoder::Contexts {
  ~Contexts() { ZSTD_freeDCtx(zstd); }
  ZSTD_DCtx* zstd = ZSTD_createDCtx();
};

ChunkDecoder::ChunkDecoder() : contexts_(std::make_unique<Contexts>()) {}
ChunkDecoder::~ChunkDecoder() = default;
ChunkDecoder::ChunkDecoder(ChunkDecoder&&) noexcept = default;
ChunkDecoder& ChunkDecoder::operator=(ChunkDecoder&&) noexcept = default;

namespace {

// `in` and `out` are below 4 GiB: readers bound the chunks that they list.
Result<std::size_t> inflate_chunk(Bytes in, MutableBytes out, bool is_gzip, const std::string& place) {
  z_stream stream = {};
  stream.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(in.data()));
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const std::string what = place + (is_gzip ? ": gzip" : ": deflate");
  if (::inflateInit2(&stream, is_gzip ? 16 + MAX_WBITS : MAX_WBITS) != Z_OK) return io_error(what + ": out of memory");
  const int state = ::inflate(&stream, Z_FINISH);
  const std::size_t length = out.size() - stream.avail_out;
  ::inflateEnd(&stream);
  if (state == Z_STREAM_END) return length;
  if (state == Z_MEM_ERROR) return io_error(what + ": out of memory");
  if (state == Z_BUF_ERROR || state == Z_OK)
    return corrupt(what + ": expected a stream of at most " + bytes_of(out.size()) +
                   ", got one that is truncated or longer");
  return corrupt(what + ": the stream is damaged");
}

Result<std::size_t> unzstd_chunk(ZSTD_DCtx* context, Bytes in, MutableBytes out, const std::string& place) {
  if (!context) return io_error("out of memory for zstd");
  const std::size_t length = ZSTD_decompressDCtx(context, out.data(), out.size(), in.data(), in.size());
  if (ZSTD_isError(length)) return corrupt(place + ": zstd frame: " + ZSTD_getErrorName(length));
  return length;
}

// Checks the checksum that ends a chunk. Returns the bytes before it.
Result<MutableBytes> without_sum(MutableBytes in, ChunkFilter::Kind kind, const std::string& place) {
  const bool is_crc = kind == ChunkFilter::Kind::kCrc32c;
  const std::string what = place + (is_crc ? ": crc32c" : ": fletcher32");
  if (in.size() < kSum) return corrupt(what + ": expected a checksum, got " + bytes_of(in.size()));
  const MutableBytes data = in.first(in.size() - kSum);
  std::uint32_t stored;
  std::memcpy(&stored, in.data() + data.size(), kSum);
  const std::uint32_t sum = is_crc ? crc32c(0, data) : fletcher32(data);
  if (sum == stored) return data;
  return corrupt(what + ": expected " + std::to_string(stored) + ", got " + std::to_string(sum) +
                 ": the bytes changed after they were saved");
}

}  // namespace

Result<MutableBytes> ChunkDecoder::decode(MutableBytes stored, const ChunkEncoding& encoding,
                                          const std::string& place) {
  MutableBytes now = stored;
  // A checksum that was added before compression is part of the decompressed data.
  const std::size_t room = static_cast<std::size_t>(encoding.decoded_bytes) + kSum * encoding.filters.size();
  std::size_t next = 0;
  for (std::size_t i = encoding.filters.size(); i-- > 0;) {
    const ChunkFilter& filter = encoding.filters[i];
    if (filter.kind == ChunkFilter::Kind::kFletcher32 || filter.kind == ChunkFilter::Kind::kCrc32c) {
      now = TRY(without_sum(now, filter.kind, place));
      continue;
    }
    std::vector<std::byte>& buffer = buffers_[next];
    next = 1 - next;
    const bool shuffles = filter.kind == ChunkFilter::Kind::kShuffle;
    if (shuffles && now.size() > room)
      return corrupt(place + ": expected at most " + bytes_of(room) + ", got " + std::to_string(now.size()));
    if (buffer.size() < room) buffer.resize(room);
    const MutableBytes out = MutableBytes(buffer).first(room);
    if (shuffles) {
      unshuffle_bytes(now, filter.unit, out.first(now.size()));
      now = out.first(now.size());
      continue;
    }
    if (filter.kind == ChunkFilter::Kind::kZstd)
      now = out.first(TRY(unzstd_chunk(contexts_->zstd, now, out, place)));
    else
      now = out.first(TRY(inflate_chunk(now, out, filter.kind == ChunkFilter::Kind::kGzip, place)));
  }
  if (std::ssize(now) == encoding.decoded_bytes) return now;
  return corrupt(place + ": chunk: expected " + bytes_of(encoding.decoded_bytes) + ", got " +
                 std::to_string(now.size()));
}

// ---- Encoding

struct ChunkEncoder::Context {
  ~Context() {
    ZSTD_freeCCtx(zstd);
    std::free(shuffled);
    std::free(frame);
  }
  ZSTD_CCtx* zstd = nullptr;
  std::byte* shuffled = nullptr;
  std::byte* frame = nullptr;
  std::size_t room = 0;  // size of both
};

ChunkEncoder::ChunkEncoder(int level, Index max_chunk_bytes) : context_(std::make_unique<Context>()) {
  context_->zstd = ZSTD_createCCtx();
  context_->room = (static_cast<std::size_t>(max_chunk_bytes) + kPage - 1) / kPage * kPage;
  context_->shuffled = static_cast<std::byte*>(std::malloc(context_->room));
  context_->frame = static_cast<std::byte*>(std::aligned_alloc(kPage, context_->room));
  if (!context_->zstd) return;
  ZSTD_CCtx_setParameter(context_->zstd, ZSTD_c_compressionLevel, level);
  ZSTD_CCtx_setParameter(context_->zstd, ZSTD_c_checksumFlag, 1);
}

ChunkEncoder::~ChunkEncoder() = default;

Result<Bytes> ChunkEncoder::encode(Bytes chunk, Index unit) {
  if (!context_->zstd || !context_->shuffled || !context_->frame) return io_error("out of memory for zstd");
  if (chunk.size() > context_->room) return internal_error("chunk encoder: a chunk larger than max_chunk_bytes");
  Bytes in = chunk;
  if (unit > 1) {
    const MutableBytes shuffled(context_->shuffled, chunk.size());
    shuffle_bytes(chunk, unit, shuffled);
    in = shuffled;
  }
  // Ends a block after each plane of shuffled bytes, because a block has one table of codes: the low bytes of numbers
  // are noise, and the high ones are nearly all equal.
  const auto plane = chunk.size() / static_cast<std::size_t>(std::max<Index>(1, unit));
  const std::size_t step = plane < kSmallestPlane ? in.size() : plane;
  // The buffer has the chunk's size, so a frame that does not fit is not smaller.
  ZSTD_outBuffer out{context_->frame, chunk.size(), 0};
  ZSTD_CCtx_reset(context_->zstd, ZSTD_reset_session_only);
  ZSTD_CCtx_setPledgedSrcSize(context_->zstd, in.size());
  ZSTD_inBuffer part{in.data(), 0, 0};
  do {
    part.size = in.size() - part.pos < 2 * step ? in.size() : part.pos + step;
    const ZSTD_EndDirective then = part.size == in.size() ? ZSTD_e_end : ZSTD_e_flush;
    const std::size_t left = ZSTD_compressStream2(context_->zstd, &out, &part, then);
    if (ZSTD_getErrorCode(left) == ZSTD_error_memory_allocation) return io_error("out of memory for zstd");
    if (ZSTD_isError(left)) return internal_error(std::string("zstd: ") + ZSTD_getErrorName(left));
    if (left > 0 || out.pos == out.size) return Bytes();
  } while (part.pos < in.size());
  return Bytes(context_->frame, out.pos);
}

Index ChunkEncoder::memory(int level, Index max_chunk_bytes) {
  const ZSTD_compressionParameters parameters =
      ZSTD_getCParams(level, static_cast<unsigned long long>(max_chunk_bytes), 0);
  return static_cast<Index>(ZSTD_estimateCStreamSize_usingCParams(parameters)) + 2 * max_chunk_bytes;
}

}  // namespace reshard
