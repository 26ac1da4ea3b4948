#include "formats/encoding/zstd_frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zstd.h>

#include <random>

namespace reshard::zstd_frame_test {
namespace {

using testing::HasSubstr;

// Returns 300 kB that compress to a fifth, so that the frame is read in several pieces and followed by a checksum.
std::string content() {
  std::mt19937 rng(5);
  std::string out(300'000, '\0');
  for (char& c : out) c = static_cast<char>(rng() % 3 == 0 ? rng() % 4 : 0);
  return out;
}

std::string frame_of(const std::string& bytes, int window_log = 0) {
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  if (window_log > 0) ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, window_log);
  std::string out(ZSTD_compressBound(bytes.size()), '\0');
  ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
  ZSTD_outBuffer to{out.data(), out.size(), 0};
  // Compress in two steps, so that the frame does not give the length of its content.
  ZSTD_compressStream2(context, &to, &in, ZSTD_e_flush);
  ZSTD_compressStream2(context, &to, &in, ZSTD_e_end);
  ZSTD_freeCCtx(context);
  out.resize(to.pos);
  return out;
}

std::string refusal(const std::string& frame, Index limit = Index{1} << 20) {
  const auto decoded = zstd::decode(as_bytes(frame), limit, "place");
  if (decoded) return "";
  EXPECT_EQ(decoded.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(decoded.error().message(), HasSubstr("place: zstd frame: "));
  return decoded.error().message();
}

TEST(ZstdFrame, IsDecodedFromMemoryAndFromAFile) {
  const std::string bytes = content(), frame = frame_of(bytes);
  EXPECT_EQ(*zstd::decode(as_bytes(frame), std::ssize(bytes), "place"), bytes);
  const File in = *File::create_in_memory(), out = *File::create_in_memory();
  ASSERT_TRUE(in.write_at(7, as_bytes(frame)));
  const auto length = zstd::decode(in, 7, std::ssize(frame), std::ssize(bytes), out, 100);
  ASSERT_TRUE(length) << length.error().message();
  EXPECT_EQ(*length, std::ssize(bytes));
  std::string read(bytes.size(), '\0');
  ASSERT_TRUE(out.read_at(100, {reinterpret_cast<std::byte*>(read.data()), read.size()}));
  EXPECT_EQ(read, bytes);
}

TEST(ZstdFrame, WhatIsNotOneWholeFrameIsRefused) {
  const std::string bytes = content(), frame = frame_of(bytes);
  for (std::size_t n = 0; n < frame.size(); n += 97)
    EXPECT_THAT(refusal(frame.substr(0, n)), HasSubstr("expected more bytes, got the end of the item")) << n;
  EXPECT_THAT(refusal(frame + "x"), HasSubstr("expected one frame, got bytes after it"));
  EXPECT_THAT(refusal(frame + frame), HasSubstr("expected one frame, got bytes after it"));
  EXPECT_THAT(refusal(frame, std::ssize(bytes) - 1), HasSubstr("expected at most 299999 bytes, got more"));
  for (std::size_t i = 0; i < frame.size(); i += 61) {
    std::string damaged = frame;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x20);
    const auto decoded = zstd::decode(as_bytes(damaged), std::ssize(bytes), "place");
    EXPECT_TRUE(!decoded || *decoded == bytes) << i;  // the frame has a checksum
  }
  EXPECT_THAT(refusal(frame_of(bytes, 28)), HasSubstr("requires too much memory"));
}

}  // namespace
}  // namespace reshard::zstd_frame_test
