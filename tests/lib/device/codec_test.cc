#include "lib/device/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace reshard::codec_test {
namespace {

using testing::HasSubstr;

std::string random_bytes(std::size_t n, unsigned seed, int values = 256) {
  std::mt19937 rng(seed);
  std::string out(n, '\0');
  for (char& c : out) c = static_cast<char>(rng() % static_cast<unsigned>(values));
  return out;
}

std::string shuffled(const std::string& in, Index unit) {
  std::string out(in.size(), '\0');
  shuffle_bytes(as_bytes(in), unit, {reinterpret_cast<std::byte*>(out.data()), out.size()});
  return out;
}

Result<std::string> decoded(std::string stored, const ChunkEncoding& encoding) {
  ChunkDecoder decoder;
  const auto bytes =
      TRY(decoder.decode({reinterpret_cast<std::byte*>(stored.data()), stored.size()}, encoding, "f@0x10"));
  return std::string(as_string(bytes));
}

TEST(Shuffle, GroupsTheBytesOfElementsAndLeavesTheRest) {
  EXPECT_EQ(shuffled("aAbBcC", 2), "abcABC");
  EXPECT_EQ(shuffled("abcdABCDx", 4), "aAbBcCdDx");
  EXPECT_EQ(shuffled("abc", 1), "abc");
  EXPECT_EQ(shuffled("", 8), "");
}

TEST(Shuffle, IsUndoneForEveryWidthAndLength) {
  for (const Index unit : {1, 2, 3, 4, 8, 16})
    for (const std::size_t n : {0, 1, 7, 31, 32, 33, 4096, 40000}) {
      const std::string in = random_bytes(n, 5);
      const std::string there = shuffled(in, unit);
      std::string back(n, '\0');
      unshuffle_bytes(as_bytes(there), unit, {reinterpret_cast<std::byte*>(back.data()), back.size()});
      EXPECT_EQ(back, in) << unit << " " << n;
    }
}

// The expected values are those of the HDF5 library for the same bytes.
TEST(Fletcher32, IsHdf5s) {
  EXPECT_EQ(fletcher32(as_bytes("")), 0u);
  EXPECT_EQ(fletcher32(as_bytes("ab")), 0x61626162u);
  EXPECT_EQ(fletcher32(as_bytes("abcd")), 0x2629c4c6u);
  EXPECT_EQ(fletcher32(as_bytes("abc")), 0x25c5c462u);
}

TEST(ChunkEncoder, GivesWhatTheDecoderTakes) {
  const std::string chunk = random_bytes(100'000, 3, 4);
  for (const Index unit : {1, 2, 4}) {
    ChunkEncoder encoder(1, 100'000);
    const auto frame = encoder.encode(as_bytes(chunk), unit);
    ASSERT_TRUE(frame);
    ASSERT_FALSE(frame->empty());
    EXPECT_LT(frame->size(), chunk.size());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(frame->data()) % 4096, 0u);
    const ChunkEncoding encoding{{{ChunkFilter::Kind::kShuffle, unit}, {ChunkFilter::Kind::kZstd}}, 100'000};
    const auto back = decoded(std::string(as_string(*frame)), encoding);
    ASSERT_TRUE(back) << back.error().message();
    EXPECT_EQ(*back, chunk);
  }
}

TEST(ChunkEncoder, RefusesToGrow) {
  ChunkEncoder encoder(3, 4096);
  EXPECT_TRUE(encoder.encode(as_bytes(random_bytes(4096, 9)), 1)->empty());
  EXPECT_TRUE(encoder.encode(as_bytes("x"), 1)->empty());
}

TEST(ChunkDecoder, FindsEveryFlippedBitOfAFrame) {
  const std::string chunk = random_bytes(300, 4, 3);
  ChunkEncoder encoder(1, 300);
  const std::string frame(as_string(*encoder.encode(as_bytes(chunk), 2)));
  const ChunkEncoding encoding{{{ChunkFilter::Kind::kShuffle, 2}, {ChunkFilter::Kind::kZstd}}, 300};
  ASSERT_EQ(*decoded(frame, encoding), chunk);
  for (std::size_t bit = 0; bit < 8 * frame.size(); ++bit) {
    std::string bad = frame;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ 1 << bit % 8);
    const auto back = decoded(bad, encoding);
    // Some bits of the frame's header have no meaning.
    if (back) {
      EXPECT_EQ(*back, chunk) << bit;
    } else {
      EXPECT_EQ(back.error().code(), ErrorCode::kCorrupt);
      EXPECT_THAT(back.error().message(), HasSubstr("f@0x10"));
    }
  }
}

TEST(ChunkDecoder, TakesNoMoreAndNoLessThanTheChunk) {
  const std::string chunk(1000, 'a');
  ChunkEncoder encoder(1, 1000);
  const std::string frame(as_string(*encoder.encode(as_bytes(chunk), 1)));
  for (const Index wrong : {0, 999, 1001}) {
    const auto back = decoded(frame, {{{ChunkFilter::Kind::kZstd}}, wrong});
    ASSERT_FALSE(back) << wrong;
    EXPECT_EQ(back.error().code(), ErrorCode::kCorrupt);
  }
  for (std::size_t n = 0; n < frame.size(); ++n)
    EXPECT_FALSE(decoded(frame.substr(0, n), {{{ChunkFilter::Kind::kZstd}}, 1000}));
}

TEST(ChunkDecoder, ChecksFletcher32) {
  const ChunkEncoding encoding{{{ChunkFilter::Kind::kFletcher32}}, 4};
  EXPECT_EQ(*decoded("abcd\xc6\xc4\x29\x26", encoding), "abcd");
  const auto bad = decoded("abce\xc6\xc4\x29\x26", encoding);
  ASSERT_FALSE(bad);
  EXPECT_THAT(bad.error().message(), HasSubstr("the bytes changed after they were saved"));
  EXPECT_FALSE(decoded("abc", encoding));
}

TEST(ChunkDecoder, ChecksCrc32c) {
  const ChunkEncoding encoding{{{ChunkFilter::Kind::kCrc32c}}, 9};
  EXPECT_EQ(*decoded("123456789\x83\x92\x06\xe3", encoding), "123456789");
  const auto bad = decoded("123456780\x83\x92\x06\xe3", encoding);
  ASSERT_FALSE(bad);
  EXPECT_THAT(bad.error().message(), HasSubstr("crc32c: expected"));
  EXPECT_FALSE(decoded("123", encoding));
}

// The streams are made by Python's zlib.compress(b"aaaaaaaaaa") and gzip.compress().
TEST(ChunkDecoder, TakesStreamsOfZlibAndGzip) {
  const std::string zlib("\x78\x9c\x4b\x4c\x84\x01\x00\x14\xe1\x03\xcb", 11);
  const std::string gzip("\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\x4b\x4c\x84\x01\x00\xf0\xcd\x11\x4c\x0a\x00\x00\x00",
                         23);
  const ChunkEncoding of_zlib{{{ChunkFilter::Kind::kDeflate}}, 10}, of_gzip{{{ChunkFilter::Kind::kGzip}}, 10};
  EXPECT_EQ(*decoded(zlib, of_zlib), "aaaaaaaaaa");
  EXPECT_EQ(*decoded(gzip, of_gzip), "aaaaaaaaaa");
  EXPECT_FALSE(decoded(zlib, of_gzip));
  EXPECT_FALSE(decoded(gzip, of_zlib));
  for (std::size_t n = 0; n < gzip.size(); ++n) EXPECT_FALSE(decoded(gzip.substr(0, n), of_gzip)) << n;
  EXPECT_FALSE(decoded(gzip, {{{ChunkFilter::Kind::kGzip}}, 9}));
}

}  // namespace
}  // namespace reshard::codec_test
