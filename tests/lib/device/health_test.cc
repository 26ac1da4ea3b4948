#include "lib/device/health.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>

#include "lib/device/copy.h"

namespace reshard::health_test {
namespace {

using Buffer = std::vector<std::byte>;

constexpr DType kFloats[] = {DType::kFloat8E4M3,     DType::kFloat8E5M2, DType::kFloat8E4M3Fnuz,
                             DType::kFloat8E5M2Fnuz, DType::kFloat8E8M0, DType::kFloat16,
                             DType::kBFloat16,       DType::kFloat32,    DType::kFloat64};
constexpr DType kIntegers[] = {DType::kBool,   DType::kUint8, DType::kInt8,   DType::kUint16, DType::kInt16,
                               DType::kUint32, DType::kInt32, DType::kUint64, DType::kInt64};

std::uint64_t bits_of(Bytes run, std::size_t width, Index i) {
  std::uint64_t v = 0;
  std::memcpy(&v, run.data() + static_cast<std::size_t>(i) * width, width);
  return v;
}

void put(Buffer& data, std::size_t width, std::size_t i, std::uint64_t v) {
  std::memcpy(data.data() + i * width, &v, width);
}

// Returns the value of an element, computed from the definition of each format.
double worth(DType dtype, std::uint64_t v) {
  const auto small = [&](int exponent_bits, int mantissa_bits, int bias) {
    const int exponent = static_cast<int>(v >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const double fraction = static_cast<double>(v & ((1u << mantissa_bits) - 1)) / (1 << mantissa_bits);
    const double abs = exponent == 0 ? std::exp2(1 - bias) * fraction : std::exp2(exponent - bias) * (1 + fraction);
    return (v >> (exponent_bits + mantissa_bits)) != 0 ? -abs : abs;
  };
  switch (dtype) {
    case DType::kFloat8E4M3:
      return (v & 0x7f) == 0x7f ? NAN : small(4, 3, 7);
    case DType::kFloat8E5M2:
      return (v & 0x7f) == 0x7c ? INFINITY : (v & 0x7f) > 0x7c ? NAN : small(5, 2, 15);
    case DType::kFloat8E4M3Fnuz:
      return v == 0x80 ? NAN : small(4, 3, 8);
    case DType::kFloat8E5M2Fnuz:
      return v == 0x80 ? NAN : small(5, 2, 16);
    case DType::kFloat8E8M0:
      return v == 0xff ? NAN : std::exp2(static_cast<double>(v) - 127);
    case DType::kFloat16:
      return (v & 0x7fff) == 0x7c00 ? INFINITY : (v & 0x7fff) > 0x7c00 ? NAN : small(5, 10, 15);
    case DType::kBFloat16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(v << 16));
    case DType::kFloat32:
      return std::bit_cast<float>(static_cast<std::uint32_t>(v));
    case DType::kFloat64:
      return std::bit_cast<double>(v);
    case DType::kInt8:
      return static_cast<std::int8_t>(v);
    case DType::kInt16:
      return static_cast<std::int16_t>(v);
    case DType::kInt32:
      return static_cast<std::int32_t>(v);
    case DType::kInt64:
      return static_cast<double>(static_cast<std::int64_t>(v));
    default:
      return static_cast<double>(v);
  }
}

RunHealth by_definition(DType dtype, Bytes run) {
  const auto width = static_cast<std::size_t>(byte_size(dtype));
  RunHealth h;
  for (Index i = 0; i < static_cast<Index>(run.size() / width); ++i) {
    const std::uint64_t bits = bits_of(run, width, i);
    const double v = worth(dtype, bits);
    if (i == 0) h.first = bits;
    h.constant = h.constant && bits == h.first;
    h.nans += std::isnan(v);
    h.infs += std::isinf(v);
    h.zeros += v == 0;
    if (std::isfinite(v)) h.absmax = std::max(h.absmax, std::abs(v));
    if (!std::isfinite(v) && h.first_not_finite < 0) h.first_not_finite = i;
  }
  return h;
}

std::string text(const RunHealth& h) {
  return "nan " + std::to_string(h.nans) + " inf " + std::to_string(h.infs) + " zero " + std::to_string(h.zeros) +
         " max " + std::to_string(h.absmax) + " at " + std::to_string(h.first_not_finite) + " first " +
         std::to_string(h.first) + (h.constant ? " constant" : "");
}

void expect_defined(DType dtype, const Buffer& data, std::size_t skip, std::size_t n, const std::string& what) {
  const auto width = static_cast<std::size_t>(byte_size(dtype));
  const Bytes run = Bytes(data).subspan(skip, n * width);
  const RunHealth expected = by_definition(dtype, run);
  for (const HealthVariant& variant : health_variants()) {
    const RunHealth got = variant.scan(dtype, run);
    EXPECT_EQ(got, expected) << variant.name << ", " << info(dtype).torch_name << ", " << n << " elements, " << what
                             << ":\n  got      " << text(got) << "\n  expected " << text(expected);
  }
}

// Returns values that stay finite: the exponents' upper bits are cleared. A negative zero is the NaN of some types.
Buffer finite_values(std::mt19937_64& random, std::size_t n, std::size_t width, bool minus_zero = true) {
  Buffer data(n * width);
  for (std::size_t i = 0; i < n; ++i) {
    std::uint64_t v = random();
    v &= ~(std::uint64_t{0x44} << (8 * (width - 1)));
    if (!minus_zero) v &= 0x7f;
    if (random() % 7 == 0) v = minus_zero && random() % 2 == 0 ? std::uint64_t{1} << (8 * width - 1) : 0;
    if (random() % 7 == 0) v = 1 + random() % 3;  // denormals
    put(data, width, i, v);
  }
  return data;
}

TEST(Health, EveryVariantEqualsTheDefinitionOnFiniteValues) {
  std::mt19937_64 random(11);
  for (const DType dtype : kFloats) {
    const auto width = static_cast<std::size_t>(byte_size(dtype));
    const Buffer data = finite_values(random, 40001, width);
    for (const std::size_t n : {0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 129, 1000, 16384, 16385, 33000, 40000})
      for (const std::size_t skip : {std::size_t{0}, std::size_t{1}}) expect_defined(dtype, data, skip, n, "finite");
  }
}

TEST(Health, EveryVariantEqualsTheDefinitionOnAnyBits) {
  std::mt19937_64 random(12);
  const auto check = [&](DType dtype) {
    const auto width = static_cast<std::size_t>(byte_size(dtype));
    Buffer data(40000 * width);
    for (std::byte& b : data) b = static_cast<std::byte>(random());
    for (const std::size_t n : {1, 31, 32, 33, 255, 4097, 40000}) expect_defined(dtype, data, 0, n, "random bits");
  };
  for (const DType dtype : kFloats) check(dtype);
  for (const DType dtype : kIntegers) check(dtype);
}

TEST(Health, EveryPatternOfOneAndTwoBytesIsCountedForWhatItIs) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat8E4M3Fnuz, DType::kFloat8E5M2Fnuz,
                            DType::kFloat8E8M0, DType::kFloat16, DType::kBFloat16, DType::kInt8}) {
    const auto width = static_cast<std::size_t>(byte_size(dtype));
    for (std::uint64_t v = 0; v < (width == 1 ? 0x100u : 0x10000u); ++v) {
      Buffer data(width);
      put(data, width, 0, v);
      ASSERT_EQ(scan_run(dtype, data), by_definition(dtype, data)) << info(dtype).torch_name << " " << v;
    }
  }
}

TEST(Health, OneSpecialValueIsFoundWhereverItIs) {
  std::mt19937_64 random(13);
  struct Special {
    DType dtype;
    std::uint64_t bits;
  };
  constexpr Special kSpecials[] = {{DType::kBFloat16, 0x7f80},
                                   {DType::kBFloat16, 0xff80},
                                   {DType::kBFloat16, 0x7f81},
                                   {DType::kBFloat16, 0xffff},
                                   {DType::kFloat16, 0x7c00},
                                   {DType::kFloat16, 0x7c01},
                                   {DType::kFloat16, 0xfe00},
                                   {DType::kFloat32, 0x7f800000},
                                   {DType::kFloat32, 0xff800001},
                                   {DType::kFloat32, 0x7fffffff},
                                   {DType::kFloat64, 0x7ff0000000000000},
                                   {DType::kFloat64, 0xfff0000000000001},
                                   {DType::kFloat8E4M3, 0xff},
                                   {DType::kFloat8E5M2, 0xfc},
                                   {DType::kFloat8E5M2, 0x7d},
                                   {DType::kFloat8E4M3Fnuz, 0x80},
                                   {DType::kFloat8E8M0, 0xff}};
  for (const Special& special : kSpecials) {
    const auto width = static_cast<std::size_t>(byte_size(special.dtype));
    for (const std::size_t n : {33u, 1000u}) {
      Buffer data = finite_values(random, n, width, special.dtype != DType::kFloat8E4M3Fnuz);
      for (std::size_t i = 0; i < n; i += n < 100 ? 1 : 37) {
        const std::uint64_t before = bits_of(data, width, static_cast<Index>(i));
        put(data, width, i, special.bits);
        const RunHealth h = scan_run(special.dtype, data);
        EXPECT_EQ(h.nans + h.infs, 1);
        EXPECT_EQ(h.first_not_finite, static_cast<Index>(i));
        expect_defined(special.dtype, data, 0, n, "one special value");
        put(data, width, i, before);
      }
    }
  }
}

TEST(Health, AConstantRunHasOneBitPatternAndMinusZeroIsAnother) {
  for (const DType dtype : kFloats) {
    const auto width = static_cast<std::size_t>(byte_size(dtype));
    for (const std::size_t n : {1u, 31u, 33u, 20000u}) {
      Buffer data(n * width);
      for (std::size_t i = 0; i < n; ++i) put(data, width, i, 0x3c);
      EXPECT_TRUE(scan_run(dtype, data).constant);
      expect_defined(dtype, data, 0, n, "constant");
      put(data, width, n - 1, 0x3d);
      EXPECT_EQ(scan_run(dtype, data).constant, n == 1);
      expect_defined(dtype, data, 0, n, "all but the last");
    }
  }
  const std::vector<float> zeros = {0.0f, -0.0f};
  const RunHealth h = scan_run(DType::kFloat32, std::as_bytes(std::span(zeros)));
  EXPECT_EQ(h.zeros, 2);
  EXPECT_FALSE(h.constant);
}

TEST(Health, AComplexNumberIsTwoNumbers) {
  const std::vector<float> parts = {1, 0, NAN, 2};
  const RunHealth h = scan_run(DType::kComplex64, std::as_bytes(std::span(parts)));
  EXPECT_EQ(h.nans, 1);
  EXPECT_EQ(h.zeros, 1);
  EXPECT_EQ(h.absmax, 2);
  HealthScan scan(DType::kComplex64, {2});
  scan.add(whole({2}), std::as_bytes(std::span(parts)));
  EXPECT_EQ(scan.health().elements, 4);
  EXPECT_EQ(scan.health().first_not_finite_row, 1);
}

// ---- tensors in pieces

struct Piece {
  Box box;
  Buffer bytes;
};

// Cuts `box` at random positions into pieces.
void cut(std::mt19937_64& random, const Box& box, int cuts, std::vector<Box>& out) {
  if (cuts == 0 || box.rank() == 0) {
    out.push_back(box);
    return;
  }
  const int d = static_cast<int>(random() % static_cast<unsigned>(box.rank()));
  const Index at = static_cast<Index>(random() % static_cast<std::uint64_t>(box.shape[d] + 1));
  Box low = box, high = box;
  low.shape[d] = at;
  high.origin[d] += at;
  high.shape[d] -= at;
  cut(random, low, cuts - 1, out);
  cut(random, high, cuts - 1, out);
}

Buffer take(const Buffer& tensor, const Dims& shape, const Box& box, Index width) {
  const Dims strides = row_major_strides(shape);
  Index first = 0;
  for (int d = 0; d < shape.rank(); ++d) first += box.begin(d) * strides[d];
  Buffer out(static_cast<std::size_t>(volume(box) * width));
  if (!box.empty())
    copy_box(box.shape, width, tensor.data() + first * width, strides, out.data(), row_major_strides(box.shape));
  return out;
}

// Returns the exponent below that of the smallest normal number.
int subnormal_exponent(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return -7;
    case DType::kFloat8E4M3Fnuz:
      return -8;
    case DType::kFloat8E5M2:
    case DType::kFloat16:
      return -15;
    case DType::kFloat8E5M2Fnuz:
      return -16;
    default:
      return -127;
  }
}

Exponents exponents_by_definition(DType dtype, Bytes data) {
  const auto width = static_cast<std::size_t>(byte_size(dtype));
  std::map<int, Index> counts;
  for (Index i = 0; i < static_cast<Index>(data.size() / width); ++i) {
    const double v = worth(dtype, bits_of(data, width, i));
    if (std::isfinite(v) && v != 0) ++counts[std::clamp(std::ilogb(v), subnormal_exponent(dtype), 128)];
  }
  Exponents out;
  if (counts.empty() || std::find(std::begin(kFloats), std::end(kFloats), dtype) == std::end(kFloats)) return out;
  out.first = counts.begin()->first;
  for (int e = out.first; e <= counts.rbegin()->first; ++e) out.counts.push_back(counts[e]);
  return out;
}

TensorHealth tensor_by_definition(DType dtype, const Dims& shape, const Buffer& data, Index split) {
  const RunHealth all = by_definition(dtype, data);
  const Index rows = shape.rank() > 0 ? shape[0] : 1, in_row = volume(shape) / std::max<Index>(1, rows);
  TensorHealth h;
  h.elements = volume(shape);
  h.nans = all.nans;
  h.infs = all.infs;
  h.zeros = all.zeros;
  h.absmax = all.absmax;
  h.constant = all.constant;
  if (all.first_not_finite >= 0) h.first_not_finite_row = all.first_not_finite / in_row;
  h.exponents = exponents_by_definition(dtype, data);
  if (shape.rank() < 2 || in_row < HealthScan::kMinRowElements) return h;
  h.rows_seen = true;
  const auto bytes = static_cast<std::size_t>(in_row * byte_size(dtype));
  for (Index r = 0; r < rows; ++r) {
    const RunHealth row = by_definition(dtype, Bytes(data).subspan(static_cast<std::size_t>(r) * bytes, bytes));
    RowHealth& part = split >= 0 && r >= split ? h.tail : h.rows;
    if (row.zeros == in_row)
      part.zero.add(r);
    else if (row.constant)
      part.constant.add(r);
  }
  return h;
}

// Returns random rows: some with zeros of both signs, some constant, some constant except for their last element.
Buffer rows_of_all_kinds(std::mt19937_64& random, DType dtype, Index rows, Index in_row) {
  const auto width = static_cast<std::size_t>(byte_size(dtype));
  const auto n = static_cast<std::size_t>(in_row);
  Buffer data = finite_values(random, static_cast<std::size_t>(rows) * n, width);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    const std::uint64_t kind = random() % 6, value = kind == 1 ? 0x3c : 0;
    if (kind > 3) continue;
    for (std::size_t i = 0; i < n; ++i) put(data, width, r * n + i, value);
    if (kind == 2) put(data, width, r * n + random() % n, std::uint64_t{1} << (8 * width - 1));
    if (kind == 3) put(data, width, r * n + n - 1, 1);
  }
  if (random() % 3 == 0) put(data, width, random() % (static_cast<std::size_t>(rows) * n), ~std::uint64_t{0});
  return data;
}

TEST(Health, OfATensorDoesNotDependOnPiecesNorTheirOrder) {
  std::mt19937_64 random(14);
  constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3, DType::kInt32, DType::kFloat16};
  for (int round = 0; round < 200; ++round) {
    const DType dtype = kTypes[random() % std::size(kTypes)];
    Dims shape = {static_cast<Index>(1 + random() % 40)};
    while (shape.rank() < 3 && random() % 4 != 0) shape.push_back(static_cast<Index>(1 + random() % 12));
    const Index rows = shape[0], in_row = volume(shape) / rows;
    const Index split = random() % 2 == 0 ? -1 : static_cast<Index>(random() % static_cast<std::uint64_t>(rows + 1));
    const Buffer data = rows_of_all_kinds(random, dtype, rows, in_row);
    std::vector<Box> boxes;
    cut(random, whole(shape), static_cast<int>(random() % 6), boxes);
    std::shuffle(boxes.begin(), boxes.end(), random);
    HealthScan scan(dtype, shape, split, true);
    for (const Box& box : boxes) scan.add(box, take(data, shape, box, byte_size(dtype)));
    EXPECT_EQ(scan.health(), tensor_by_definition(dtype, shape, data, split)) << "round " << round;
  }
}

TEST(Health, EveryNumberIsCountedForItsExponent) {
  std::mt19937_64 random(16);
  for (const DType dtype : kFloats) {
    const auto width = static_cast<std::size_t>(byte_size(dtype));
    Buffer every, any(10007 * width);
    for (std::uint64_t v = 0; v < (width == 1 ? 0x100u : 0x10000u); ++v) {
      every.resize(every.size() + width);
      put(every, width, static_cast<std::size_t>(v), v << (8 * width - (width == 1 ? 8 : 16)));
    }
    for (std::byte& b : any) b = static_cast<std::byte>(random());
    for (const Buffer& data : {every, any, finite_values(random, 4099, width), Buffer(6 * width)}) {
      const Dims shape = {static_cast<Index>(data.size() / width)};
      HealthScan scan(dtype, shape, -1, true);
      scan.add(whole(shape), data);
      EXPECT_EQ(scan.health().exponents, exponents_by_definition(dtype, data)) << info(dtype).torch_name;
    }
  }
  const std::vector<float> parts = {1, 0, NAN, 2, 3, -0.25F};
  HealthScan complex(DType::kComplex64, {3}, -1, true);
  complex.add(whole({3}), std::as_bytes(std::span(parts)));
  EXPECT_EQ(complex.health().exponents, (Exponents{-2, {1, 0, 1, 2}}));
}

TEST(Health, ThreadsMayAddToOneTensor) {
  std::mt19937_64 random(15);
  const Dims shape = {3000, 24};
  const Buffer data = rows_of_all_kinds(random, DType::kBFloat16, shape[0], shape[1]);
  HealthScan scan(DType::kBFloat16, shape, 2500, true);
  const auto work = [&](Index first) {
    for (Index r = first; r < shape[0]; r += 200) {
      const Box box{{r, 0}, {100, 24}};
      scan.add(box, take(data, shape, box, 2));
    }
  };
  std::thread other(work, 100);
  work(0);
  other.join();
  EXPECT_EQ(scan.health(), tensor_by_definition(DType::kBFloat16, shape, data, 2500));
}

TEST(Health, OfAScalarAndOfNothing) {
  const std::vector<float> nan = {NAN};
  HealthScan scalar(DType::kFloat32, {});
  scalar.add(whole({}), std::as_bytes(std::span(nan)));
  EXPECT_EQ(scalar.health().nans, 1);
  EXPECT_EQ(scalar.health().first_not_finite_row, 0);
  HealthScan none(DType::kFloat32, {0, 64});
  none.add(whole({0, 64}), {});
  EXPECT_EQ(none.health(), TensorHealth());
}

TEST(Health, RowsAreKeptAsRangesOfWhichThereAreNotTooMany) {
  RowSet rows;
  for (const Index r : {3, 4, 5, 9}) rows.add(r);
  EXPECT_EQ(rows.ranges, (std::vector<RowRange>{{3, 6}, {9, 10}}));
  for (Index r = 20; r < 1020; r += 2) rows.add(r);
  EXPECT_EQ(rows.ranges.size(), RowSet::kMaxRanges);
  EXPECT_EQ(rows.count, 504);
}

TEST(Health, RowsTakeLittleMemory) {
  EXPECT_LT(HealthScan::row_memory({128256, 16384}), Index{2} << 20);
  EXPECT_LT(HealthScan::row_memory({128256, 8192}), Index{64} << 10);
  EXPECT_LT(HealthScan::row_memory({HealthScan::kMaxRows, 16}), Index{5} << 20);
  EXPECT_EQ(HealthScan::row_memory({HealthScan::kMaxRows + 1, 16}), 0);
  EXPECT_EQ(HealthScan::row_memory({128256, 15}), 0);
  EXPECT_EQ(HealthScan::row_memory({128256}), 0);
}

}  // namespace
}  // namespace reshard::health_test
