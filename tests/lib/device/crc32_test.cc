#include "lib/device/crc32.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace reshard::crc32_test {
namespace {

std::uint32_t bit_by_bit(Bytes data, std::uint32_t polynomial = 0xedb88320) {
  std::uint32_t crc = 0xffffffff;
  for (std::byte b : data) {
    crc ^= std::to_integer<std::uint32_t>(b);
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0);
  }
  return ~crc;
}

std::vector<std::byte> random_bytes(std::size_t n) {
  std::mt19937 random(7);
  std::vector<std::byte> out(n);
  for (std::byte& b : out) b = static_cast<std::byte>(random());
  return out;
}

TEST(Crc32, GivesTheCheckValueOfItsDefinition) {
  EXPECT_EQ(crc32(0, as_bytes("123456789")), 0xcbf43926u);
  EXPECT_EQ(crc32(0, {}), 0u);
}

TEST(Crc32, EqualsTheBitByBitDefinition) {
  const auto data = random_bytes(5000);
  for (std::size_t n : {1, 15, 16, 31, 32, 33, 255, 256, 257, 1024, 4999})
    EXPECT_EQ(crc32(0, Bytes(data).subspan(1, n)), bit_by_bit(Bytes(data).subspan(1, n))) << n;
}

TEST(Crc32c, IsCastagnolis) {
  EXPECT_EQ(crc32c(0, as_bytes("123456789")), 0xe3069283u);
  EXPECT_EQ(crc32c(0, {}), 0u);
  const auto data = random_bytes(5000);
  for (const std::size_t n : {1, 7, 8, 63, 1024, 5000}) {
    const Bytes all = Bytes(data).first(n);
    EXPECT_EQ(crc32c(0, all), bit_by_bit(all, 0x82f63b78)) << n;
    EXPECT_EQ(crc32c(crc32c(0, all.first(n / 3)), all.subspan(n / 3)), crc32c(0, all)) << n;
  }
}

TEST(Crc32, PiecesContinueAndCombine) {
  const auto data = random_bytes(3000);
  const std::uint32_t whole = crc32(0, data);
  for (std::size_t cut : {0, 1, 1000, 2999, 3000}) {
    const Bytes a = Bytes(data).first(cut);
    const Bytes b = Bytes(data).subspan(cut);
    EXPECT_EQ(crc32(crc32(0, a), b), whole);
    EXPECT_EQ(crc32_combine(crc32(0, a), crc32(0, b), static_cast<Index>(b.size())), whole) << cut;
  }
}

TEST(Crc32, CombinesAcrossMoreThanFourGigabytes) {
  // Zeros double in length by combining with themselves; 2^33 of them in one step and in two halves agree.
  const std::vector<std::byte> zeros(1 << 10);
  std::uint32_t crc = crc32(0, zeros);
  Index length = 1 << 10;
  for (; length < Index{1} << 33; length *= 2) crc = crc32_combine(crc, crc, length);
  const std::uint32_t start = crc32(0, as_bytes("start"));
  const std::uint32_t once = crc32_combine(start, crc, length);
  std::uint32_t half = crc32(0, zeros);
  for (Index n = 1 << 10; n < length / 2; n *= 2) half = crc32_combine(half, half, n);
  EXPECT_EQ(crc32_combine(crc32_combine(start, half, length / 2), half, length / 2), once);
}

}  // namespace
}  // namespace reshard::crc32_test
