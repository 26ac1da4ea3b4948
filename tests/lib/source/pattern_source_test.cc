#include "lib/source/pattern_source.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <set>

#include "lib/device/convert.h"

namespace reshard::pattern_source_test {
namespace {

std::vector<std::byte> values(std::string_view name, DType dtype, const Dims& shape, const Box& box) {
  std::vector<std::byte> out(static_cast<std::size_t>(volume(box) * byte_size(dtype)));
  fill_pattern(name, dtype, shape, box, out);
  return out;
}
std::vector<std::byte> values(std::string_view name, DType dtype, const Dims& shape) {
  return values(name, dtype, shape, whole(shape));
}

// Cuts a box out of a whole tensor, element by element.
std::vector<std::byte> cut(const std::vector<std::byte>& tensor, const Dims& shape, const Box& box, Index bytes) {
  std::vector<std::byte> out;
  const Dims strides = row_major_strides(shape);
  for (Index n = 0; n < volume(box); ++n) {
    Index rest = n, at = 0;
    for (int d = shape.rank() - 1; d >= 0; --d) {
      at += (box.origin[d] + rest % box.shape[d]) * strides[d];
      rest /= box.shape[d];
    }
    out.insert(out.end(), tensor.begin() + at * bytes, tensor.begin() + (at + 1) * bytes);
  }
  return out;
}

TEST(Pattern, OfABoxIsThatBoxOfTheWhole) {
  std::mt19937 rng(11);
  for (int n = 0; n < 2000; ++n) {
    Dims shape;
    for (auto d = rng() % 5; d > 0; --d) shape.push_back(1 + static_cast<Index>(rng() % 9));
    Box box = whole(shape);
    for (int d = 0; d < shape.rank(); ++d) {
      box.origin[d] = static_cast<Index>(rng() % static_cast<unsigned>(shape[d] + 1));
      box.shape[d] = static_cast<Index>(rng() % static_cast<unsigned>(shape[d] - box.origin[d] + 1));
    }
    const auto dtype = static_cast<DType>(rng() % 21);
    ASSERT_EQ(values("w", dtype, shape, box), cut(values("w", dtype, shape), shape, box, byte_size(dtype)))
        << to_string(shape) << " " << to_string(box);
  }
}

TEST(Pattern, IsTheSameEverywhere) {
  const auto bytes = values("layers.0.attention.wq.weight", DType::kUint64, {2});
  std::uint64_t words[2];
  std::memcpy(words, bytes.data(), sizeof words);
  // One version's checkpoints are checked by another, so these values must not change.
  EXPECT_EQ(words[0], 0x064ccf4dc8cb285au);
  EXPECT_EQ(words[1], 0x0a4befb13ef8dd28u);
}

TEST(Pattern, FloatsAreFiniteOfModestSizeAndBothSigns) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    const auto raw = values("w", dtype, {4096});
    std::vector<double> v(4096);
    convert(dtype, DType::kFloat64, raw.data(), reinterpret_cast<std::byte*>(v.data()), 4096);
    int negative = 0;
    for (const double x : v) {
      ASSERT_TRUE(std::isfinite(x));
      ASSERT_GE(std::abs(x), 1.0 / 128);
      ASSERT_LT(std::abs(x), 2.0);
      negative += x < 0;
    }
    EXPECT_GT(negative, 1800);
    EXPECT_LT(negative, 2300);
    EXPECT_GT(std::set<double>(v.begin(), v.end()).size(), 1500u) << info(dtype).torch_name;
  }
}

TEST(Pattern, BoolsAreZeroOrOneAndSmallFloatsAreNumbers) {
  for (const std::byte b : values("w", DType::kBool, {1000})) ASSERT_LE(b, std::byte{1});
  for (const std::byte b : values("w", DType::kFloat8E4M3, {1000})) {
    ASSERT_NE(b & std::byte{0x7f}, std::byte{0x7f});  // NaN
    ASSERT_NE(b & std::byte{0x78}, std::byte{0});     // zeros and denormals
  }
  for (const std::byte b : values("w", DType::kFloat8E5M2, {1000})) {
    ASSERT_NE(b & std::byte{0x7c}, std::byte{0x7c});  // infinities and NaNs
    ASSERT_NE(b & std::byte{0x7c}, std::byte{0});
  }
  for (const std::byte b : values("w", DType::kFloat8E8M0, {1000})) ASSERT_NE(b, std::byte{0xff});
}

TEST(Pattern, DiffersFromNameToName) {
  EXPECT_NE(values("a", DType::kBFloat16, {64}), values("b", DType::kBFloat16, {64}));
  EXPECT_NE(values("ab", DType::kBFloat16, {64}), values("ba", DType::kBFloat16, {64}));
}

TEST(PatternSource, GivesEachTensorOneFragment) {
  Catalog catalog;
  Tensor t;
  t.name = "w";
  t.shape = {3, 4};
  ASSERT_TRUE(catalog.add(t));
  t.name = "step";
  t.shape = {};
  ASSERT_TRUE(catalog.add(t));
  PatternSource source(std::move(catalog));
  EXPECT_TRUE(validate(source.catalog(), false));
  std::vector<std::byte> out(8);
  ASSERT_TRUE(source.read(0, {{1, 2}, {1, 2}}, out, {}));
  EXPECT_EQ(out, values("w", DType::kFloat32, {3, 4}, {{1, 2}, {1, 2}}));
}

}  // namespace
}  // namespace reshard::pattern_source_test
