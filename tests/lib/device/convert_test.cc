#include "lib/device/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <string>

#include "lib/base/parallel.h"
#include "lib/device/crc32.h"
#include "lib/device/digest.h"
#include "tests/support/nearest.h"
#include "tests/support/soak.h"

namespace reshard::convert_test {
namespace {

using Buffer = std::vector<std::byte>;

template <class T>
Buffer bytes_of(const std::vector<T>& values) {
  Buffer out(values.size() * sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}

template <class T>
std::vector<T> values_of(const Buffer& bytes) {
  std::vector<T> out(bytes.size() / sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

// The inputs are those of tests/interop/make_convert_golden.py.
constexpr std::uint64_t kRandom = 1 << 20;

std::vector<std::uint16_t> all_patterns() {
  std::vector<std::uint16_t> out;
  for (std::uint32_t v = 0; v < 1 << 16; ++v) out.push_back(static_cast<std::uint16_t>(v));
  return out;
}

std::vector<std::uint32_t> float32_bits() {
  std::vector<std::uint32_t> out;
  for (std::uint32_t high = 0; high < 1 << 16; ++high)
    for (std::uint32_t low : {0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xffff})
      out.push_back(high << 16 | low);
  for (std::uint64_t i = 1; i <= kRandom; ++i) out.push_back(static_cast<std::uint32_t>(digest_mix(i) >> 32));
  return out;
}

std::vector<std::uint64_t> float64_bits() {
  struct Ending {
    int bits;
    std::uint64_t value;
  };
  constexpr Ending kEndings[] = {{0, 0}, {29, 1u << 28}, {42, 1ull << 41}, {45, 1ull << 44}, {42, (1ull << 41) + 1}};
  std::vector<std::uint64_t> out;
  for (std::uint64_t i = 1; i <= kRandom; ++i) {
    const std::uint64_t r = digest_mix(i);
    std::uint64_t mantissa = digest_mix(r) >> 12;
    if ((r & 7) >= 1 && (r & 7) <= 4) {
      const Ending& ending = kEndings[r & 7];
      mantissa = mantissa >> ending.bits << ending.bits | ending.value;
    }
    const std::uint64_t place = (r >> 8) % 340;
    const std::uint64_t exponent = place == 0 ? 0 : place == 339 ? 0x7ff : place + (1023 - 170);
    out.push_back(r >> 63 << 63 | exponent << 52 | mantissa);
  }
  return out;
}

Buffer inputs(DType dtype) {
  if (dtype == DType::kFloat32) return bytes_of(float32_bits());
  if (dtype == DType::kFloat64) return bytes_of(float64_bits());
  if (byte_size(dtype) == 1) {
    Buffer out;
    for (int v = 0; v < 256; ++v) out.push_back(static_cast<std::byte>(v));
    return out;
  }
  return bytes_of(all_patterns());
}

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16,   DType::kFloat32,
                            DType::kFloat64, DType::kFloat8E4M3, DType::kFloat8E5M2};

Buffer converted(const ConvertVariant& variant, DType from, DType to, const Buffer& in) {
  const Index n = static_cast<Index>(in.size()) / byte_size(from);
  Buffer out(static_cast<std::size_t>(n * byte_size(to)));
  variant.convert(from, to, in.data(), out.data(), n);
  return out;
}

TEST(Convert, KnowsTheFloatingTypes) {
  for (DType from : kTypes)
    for (DType to : kTypes) EXPECT_TRUE(can_convert(from, to));
  EXPECT_FALSE(can_convert(DType::kFloat32, DType::kInt32));
  EXPECT_FALSE(can_convert(DType::kComplex64, DType::kComplex128));
}

TEST(Convert, EveryVariantGivesTorchsBits) {
  std::ifstream golden(std::string(RESHARD_TEST_DATA) + "/device/convert_golden.txt");
  ASSERT_TRUE(golden);
  std::string from_name, to_name, crc_text;
  Index count = 0;
  int lines = 0;
  for (; golden >> from_name >> to_name >> count >> crc_text; ++lines) {
    const DType from = *dtype_from_torch(from_name);
    const DType to = *dtype_from_torch(to_name);
    const Buffer in = inputs(from);
    ASSERT_EQ(static_cast<Index>(in.size()), count * byte_size(from));
    for (const ConvertVariant& variant : convert_variants()) {
      const std::uint32_t crc = crc32(0, converted(variant, from, to, in));
      EXPECT_EQ(crc, std::stoul(crc_text, nullptr, 16)) << variant.name << ": " << from_name << " to " << to_name;
    }
  }
  EXPECT_EQ(lines, 36);
}

// Tries all of them in the soak, otherwise some ranges.
TEST(Convert, EveryFloatBecomesTheNearestNumber) {
  constexpr std::size_t kStretch = 1 << 16;
  const std::uint32_t step = in_soak() ? 1 : 509;
  for (DType to : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    const NearestNumbers nearest(to);
    const Status done = parallel_for((1 << 16) / step, thread_count(0), [&](int, Index i) -> Status {
      const auto first = static_cast<std::uint32_t>(i) * step << 16;
      const Buffer in = bytes_of(floats_from(first, kStretch));
      Buffer expected(kStretch * static_cast<std::size_t>(byte_size(to)));
      nearest.fill(first, kStretch, expected.data());
      for (const ConvertVariant& variant : convert_variants())
        if (converted(variant, DType::kFloat32, to, in) != expected)
          return internal_error(std::string(variant.name) + ": " + std::string(info(to).torch_name) +
                                " of the floats " + std::to_string(first) + " and on");
      return {};
    });
    EXPECT_TRUE(done) << done.error().message();
  }
}

TEST(Convert, EveryVariantAgreesAtEveryLengthAndAlignment) {
  const Buffer source = bytes_of(float32_bits());
  for (DType from : kTypes)
    for (DType to : kTypes)
      for (Index n : {0, 1, 2, 7, 8, 15, 16, 31, 32, 33, 63, 65, 1023, 1024, 1025, 2500}) {
        const auto out_bytes = static_cast<std::size_t>(n * byte_size(to));
        Buffer expected(out_bytes);
        convert_variants().front().convert(from, to, source.data() + 700001, expected.data(), n);
        for (const ConvertVariant& variant : convert_variants()) {
          Buffer out(out_bytes + 3, std::byte{0xa5});
          variant.convert(from, to, source.data() + 700001, out.data() + 1, n);
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out.begin() + 1))
              << variant.name << ": " << info(from).torch_name << " to " << info(to).torch_name << ", " << n;
          EXPECT_EQ(out[0], std::byte{0xa5});
          EXPECT_EQ(out[out_bytes + 1], std::byte{0xa5});
        }
      }
}

TEST(Convert, RoundsTiesToEvenAndKeepsDenormals) {
  const Buffer in =
      bytes_of<float>({1.0f + 0x1p-11f, 1.0f + 0x3p-11f, 65519.996f, 65520.0f, 0x1p-24f, 0x1p-25f, -0.0f});
  for (const ConvertVariant& variant : convert_variants()) {
    EXPECT_EQ(values_of<std::uint16_t>(converted(variant, DType::kFloat32, DType::kFloat16, in)),
              (std::vector<std::uint16_t>{0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x0001, 0x0000, 0x8000}));
  }
}

TEST(Convert, RoundsDoublesByWayOfFloatAsTorchDoes) {
  // A number just above the middle between two float16 values. The float32 in between is the middle itself, and its tie
  // rounds down.
  const Buffer in = bytes_of<double>({1.0 + 0x1p-11 + 0x1p-40});
  for (const ConvertVariant& variant : convert_variants()) {
    EXPECT_EQ(values_of<std::uint16_t>(converted(variant, DType::kFloat64, DType::kFloat16, in)),
              std::vector<std::uint16_t>{0x3c00});
  }
}

TEST(Convert, KeepsANansSignAndUpperPayload) {
  const Buffer floats = bytes_of<std::uint32_t>({0x7f800001, 0x7fa00000, 0x7fffffff, 0x7f80ffff, 0xff800001});
  const Buffer halves = bytes_of<std::uint16_t>({0x7e00, 0x7c01, 0x7d55, 0x7fff, 0xfc01});
  for (const ConvertVariant& variant : convert_variants()) {
    EXPECT_EQ(values_of<std::uint16_t>(converted(variant, DType::kFloat32, DType::kFloat16, floats)),
              (std::vector<std::uint16_t>{0x7e00, 0x7f00, 0x7fff, 0x7e07, 0xfe00}));
    EXPECT_EQ(values_of<std::uint32_t>(converted(variant, DType::kFloat16, DType::kFloat32, halves)),
              (std::vector<std::uint32_t>{0x7fc00000, 0x7fc02000, 0x7feaa000, 0x7fffe000, 0xffc02000}));
    EXPECT_EQ(values_of<std::uint64_t>(converted(variant, DType::kFloat32, DType::kFloat64, floats))[0],
              0x7ff8000020000000u);
  }
}

TEST(Convert, MakesEveryNanOneBFloat16) {
  const Buffer floats = bytes_of<std::uint32_t>({0x7f800001, 0x7fffffff, 0xffc00000, 0xff800001});
  for (const ConvertVariant& variant : convert_variants()) {
    EXPECT_EQ(values_of<std::uint16_t>(converted(variant, DType::kFloat32, DType::kBFloat16, floats)),
              std::vector<std::uint16_t>(4, 0x7fc0));
  }
}

}  // namespace
}  // namespace reshard::convert_test
