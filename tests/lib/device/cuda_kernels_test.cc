// Runs the GPU kernels on the CPU, every worker of every tile in turn, and compares them with the definitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "lib/base/parallel.h"
#include "lib/device/convert.h"
#include "lib/device/cuda/convert_kernels.h"
#include "lib/device/cuda/copy_kernels.h"
#include "lib/device/cuda/digest_kernels.h"
#include "tests/support/documented_instructions.h"
#include "tests/support/nearest.h"
#include "tests/support/soak.h"

namespace reshard::cuda_kernels_test {
namespace {

using Buffer = std::vector<std::byte>;

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  Index below(Index n) { return static_cast<Index>(engine_() % static_cast<std::uint64_t>(n)); }
  Index between(Index low, Index high) { return low + below(high - low + 1); }
  Buffer bytes(Index n) {
    Buffer out(static_cast<std::size_t>(n));
    for (std::byte& b : out) b = static_cast<std::byte>(engine_());
    return out;
  }

 private:
  std::mt19937_64 engine_;
};

// A buffer at an address that is `offset` bytes from a multiple of 16.
struct Placed {
  explicit Placed(Index bytes, Index offset, std::byte fill = std::byte{0xcc})
      : memory(static_cast<std::size_t>(bytes + 64), fill) {
    const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
    data = memory.data() + (32 - at % 16) + offset;
  }
  Placed(const Placed&) = delete;
  Buffer memory;
  std::byte* data;
};

// ---- division

TEST(Divisor, DividesAsTheProcessorDoes) {
  Random random(3);
  std::vector<Index> numbers = {
      0, 1, 2, 3, 5, 7, 127, 128, 129, 65535, 65536, 65537, kMaxCount / 2, kMaxCount - 1, kMaxCount};
  for (int i = 0; i < 200; ++i) numbers.push_back(random.below(Index{1} << random.between(1, 31)));
  for (const Index d : numbers) {
    if (d == 0) continue;
    const Divisor divisor(d);
    for (Index n : numbers) {
      for (const Index near : {n, n / d * d, std::max<Index>(n / d * d - 1, 0)}) {
        auto rest = static_cast<std::uint32_t>(near);
        ASSERT_EQ(divisor.divide(rest), near / d) << near << " / " << d;
        ASSERT_EQ(rest, near % d);
      }
    }
  }
}

// ---- copies

// Runs copies as a GPU does, with few threads.
struct CopyOnCpu {
  std::uint32_t threads = 32;
  int copies = 0, transposes = 0, in_words = 0, widest = 0;

  template <int kWord>
  void copy(const CopyJob& job) {
    ++copies;
    widest = std::max(widest, kWord);
    const std::uint32_t tile_words = kCopyBatch * threads;
    for (std::uint32_t tile = 0; tile * tile_words < job.words; ++tile)
      for (std::uint32_t t = 0; t < threads; ++t) copy_words<kWord>(job, tile, t, threads);
  }
  template <int kWord>
  void transpose(const TransposeJob& job) {
    ++transposes;
    in_words += job.in_words ? 1 : 0;
    widest = std::max(widest, kWord);
    static TransposeTile<kWord> tile;
    for (std::uint32_t i = 0; i < job.tiles; ++i) {
      std::memset(&tile, 0xee, sizeof tile);
      for (std::uint32_t t = 0; t < tile.kThreads; ++t) tile.read(job, i, t);
      for (std::uint32_t t = 0; t < tile.kThreads; ++t) tile.write(job, i, t);
    }
  }
};

// Memory for a box of `shape`: its strides belong to a larger tensor, with its dimensions in random or given order.
struct Memory {
  Dims strides;
  Index elements = 0;
};
Memory random_memory(Random& random, const Dims& shape, bool row_major) {
  std::vector<int> order;
  for (int d = 0; d < shape.rank(); ++d) order.push_back(d);
  if (!row_major)
    for (std::size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(static_cast<Index>(i)))]);
  Memory m{Dims::filled(shape.rank(), 0), 1};
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    m.strides[*d] = m.elements;
    m.elements *= std::max<Index>(shape[*d], 1) + (random.below(3) == 0 ? random.below(4) : 0);
  }
  return m;
}

void expect_equal_copies(Random& random, const Dims& shape, Index element_bytes, const Memory& from, const Memory& to,
                         Index offset_from, Index offset_to, Index most, CopyOnCpu& cpu) {
  Placed source(from.elements * element_bytes, offset_from), expected(to.elements * element_bytes, offset_to),
      actual(to.elements * element_bytes, offset_to);
  const Buffer values = random.bytes(from.elements * element_bytes);
  std::copy(values.begin(), values.end(), source.data);
  copy_box(shape, element_bytes, source.data, from.strides, expected.data, to.strides);
  plan_copy(simplify_copy(shape, element_bytes, from.strides, to.strides), source.data, actual.data, most, cpu);
  EXPECT_EQ(std::memcmp(actual.data, expected.data, static_cast<std::size_t>(to.elements * element_bytes)), 0)
      << to_string(shape) << " x " << element_bytes << ": " << to_string(from.strides) << " -> "
      << to_string(to.strides);
  EXPECT_EQ(actual.memory.front(), std::byte{0xcc});
  EXPECT_EQ(actual.memory.back(), std::byte{0xcc});
}

TEST(CudaCopy, OfRandomBoxesEqualsCopyBox) {
  Random random(41);
  CopyOnCpu cpu;
  for (int round = 0; round < 1500; ++round) {
    const int rank = static_cast<int>(random.between(0, 5));
    Dims shape = Dims::filled(rank, 0);
    for (int d = 0; d < rank; ++d) shape[d] = random.below(20) == 0 ? 0 : random.between(1, rank <= 2 ? 100 : 8);
    const Index element_bytes = Index{1} << random.below(5);
    const Memory from = random_memory(random, shape, random.below(2) == 0);
    const Memory to = random_memory(random, shape, random.below(2) == 0);
    const Index most = random.below(4) == 0 ? random.between(1, 500) : kMaxCount;
    const Index misplaced = random.below(3) == 0 ? random.below(16) : 0;
    expect_equal_copies(random, shape, element_bytes, from, to, misplaced, random.below(3) == 0 ? 1 : misplaced, most,
                        cpu);
    if (HasFailure()) return;
  }
  EXPECT_GT(cpu.copies, 500);
  EXPECT_GT(cpu.transposes, 100);
}

TEST(CudaCopy, TransposesAtSizesAroundATile) {
  Random random(43);
  for (Index rows : {8, 31, 32, 33, 63, 64, 65, 128})
    for (Index columns : {9, 31, 32, 33, 64, 130, 256})
      for (Index element_bytes : {1, 2, 4, 8, 16}) {
        CopyOnCpu cpu;
        expect_equal_copies(random, {rows, columns}, element_bytes, {{columns, 1}, rows * columns},
                            {{1, rows}, rows * columns}, 0, 0, kMaxCount, cpu);
        EXPECT_EQ(cpu.transposes, 1);
        EXPECT_EQ(cpu.widest, element_bytes);
      }
}

TEST(CudaCopy, TransposesSmallUnitsInWordsWhereAllLieOnWholeOnes) {
  Random random(45);
  // Batches of matrices, with rows of `rows` and of `columns` elements, in memory that is slightly larger.
  const auto in_words = [&](Index element_bytes, Index batch, Index rows, Index columns, Index more, Index offset_from,
                            Index offset_to) {
    CopyOnCpu cpu;
    const Index from_row = columns + more, to_row = rows + more;
    expect_equal_copies(
        random, {batch, columns, rows}, element_bytes, {{rows * from_row + more, 1, from_row}, 4 * rows * from_row},
        {{columns * to_row + more, to_row, 1}, 4 * columns * to_row}, offset_from, offset_to, kMaxCount, cpu);
    EXPECT_EQ(cpu.transposes, 1);
    return cpu.in_words;
  };
  for (const Index bytes : {1, 2}) {
    const Index word = 4 / bytes;  // units
    for (const Index rows : {Index{64}, 128 - word, Index{128}, 128 + word})
      for (const Index columns : {Index{64}, 64 + word, Index{192}, Index{256}})
        for (const Index batch : {1, 3}) {
          EXPECT_EQ(in_words(bytes, batch, rows, columns, 0, 0, 0), 1);
          EXPECT_EQ(in_words(bytes, batch, rows, columns, word, 4, 12), 1);
          EXPECT_EQ(in_words(bytes, batch, rows, columns, word / 2, 0, 0), 0);
          EXPECT_EQ(in_words(bytes, batch, rows, columns, 0, 2, 0), 0);
          EXPECT_EQ(in_words(bytes, batch, rows, columns, 0, 0, 2), 0);
        }
  }
}

TEST(CudaCopy, MovesTheRowsOfAColumnShardInVectors) {
  Random random(47);
  // Rows of 4,096 and of 104 bytes, copied out of rows eight times as long and back.
  for (Index columns : {2048, 52, 8}) {
    CopyOnCpu cpu;
    expect_equal_copies(random, {5, columns}, 2, {{8 * columns, 1}, 40 * columns}, {{columns, 1}, 5 * columns}, 0, 0,
                        kMaxCount, cpu);
    expect_equal_copies(random, {5, columns}, 2, {{columns, 1}, 5 * columns}, {{8 * columns, 1}, 40 * columns}, 0, 0,
                        kMaxCount, cpu);
    EXPECT_EQ(cpu.widest, columns == 52 ? 8 : 16);
    EXPECT_EQ(cpu.copies, 2);
  }
  // Reorders the rows of heads from pairs to halves: torchtitan's order to Hugging Face's.
  CopyOnCpu cpu;
  expect_equal_copies(random, {4, 2, 32, 256}, 2, {{64 * 256, 256, 512, 1}, 4 * 64 * 256},
                      {{64 * 256, 32 * 256, 256, 1}, 4 * 64 * 256}, 0, 0, kMaxCount, cpu);
  EXPECT_EQ(cpu.widest, 16);
}

TEST(CudaCopy, TakesTheLongestWordThatEverythingAllows) {
  const auto word = [](Index unit, Index from_step, Index to_step, std::uintptr_t from, std::uintptr_t to) {
    CopyShape shape;
    shape.unit = unit;
    shape.loops = 1;
    shape.loop[0] = {3, from_step, to_step};
    return copy_word(shape, reinterpret_cast<const std::byte*>(from), reinterpret_cast<std::byte*>(to));
  };
  EXPECT_EQ(word(64, 128, 64, 4096, 8192), 16);
  EXPECT_EQ(word(64, -128, 64, 4096, 8192), 16);
  EXPECT_EQ(word(64, 128, 72, 4096, 8192), 8);
  EXPECT_EQ(word(20, 128, 64, 4096, 8192), 4);
  EXPECT_EQ(word(64, 128, 64, 4096, 8194), 2);
  EXPECT_EQ(word(64, 128, 64, 4097, 8192), 1);
}

TEST(CudaCopy, CountsPastFourGigabytes) {
  // Compares the offsets of units with locate(), for shapes that are too large to be copied.
  CopyShape shape;
  shape.unit = 16;
  shape.loops = 3;
  shape.loop[0] = {5, Index{1} << 40, Index{3} << 38};
  shape.loop[1] = {1 << 14, Index{1} << 21, Index{1} << 22};
  shape.loop[2] = {26214, 32, 48};
  ASSERT_LE(shape.count(), kMaxCount);
  const UnitGrid grid(shape);
  Random random(53);
  for (int i = 0; i < 2000; ++i) {
    const Index n = i == 0 ? shape.count() - 1 : random.below(shape.count());
    EXPECT_EQ(grid.locate(static_cast<std::uint32_t>(n)).from, locate(shape, n).from);
    EXPECT_EQ(grid.locate(static_cast<std::uint32_t>(n)).to, locate(shape, n).to);
  }
  shape.loop[0].extent = 1000;
  shape.unit = 4096;
  Index parts = 0, words = 0;
  for_each_part(shape, 16, kMaxCount, [&](const CopyShape& part, CopyOffsets) {
    ++parts;
    words += part.count() * (part.unit / 16);
    EXPECT_LE(part.count() * (part.unit / 16), kMaxCount);
  });
  EXPECT_GT(parts, 50);
  EXPECT_EQ(words, shape.count() * 256);
}

// ---- conversions

constexpr DType kFloats[] = {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat16,
                             DType::kBFloat16,   DType::kFloat32,    DType::kFloat64};

template <class Instructions = FloatInstructions>
void convert_on_cpu(DType from, DType to, const std::byte* in, std::byte* out, Index n) {
  with_conversion(from, to, [&](auto conversion) {
    using C = decltype(conversion);
    const ConvertJob job = C::make(in, out, n);
    constexpr std::uint32_t kThreads = 4;
    for (std::uint32_t tile = 0; tile * C::kBatch * kThreads < job.span.vectors; ++tile)
      for (std::uint32_t t = 0; t < kThreads; ++t) C::template convert_vectors<Instructions>(job, tile, t, kThreads);
    for (Index worker = 0; worker < 3; ++worker) C::convert_ends(job, worker, 3);
  });
}

TEST(CudaConvert, EqualsConvertForEveryPairOfTypes) {
  Random random(59);
  constexpr Index kMost = 700;
  Placed in(kMost * 8, 0), expected(kMost * 8, 0), actual(kMost * 8, 0);
  for (DType from : kFloats)
    for (DType to : kFloats) {
      if (from == to) continue;
      for (Index n : {Index{0}, Index{1}, Index{31}, Index{32}, Index{33}, kMost - 16})
        for (Index shift : {0, 1, 3}) {
          const Buffer values = random.bytes(n * byte_size(from));
          // Uses addresses that are aligned for elements but not for vectors, and some that are aligned for neither.
          const Index odd = n == 33 && shift == 3 ? 1 : 0;
          std::byte* source = in.data + shift * byte_size(from) + odd;
          std::copy(values.begin(), values.end(), source);
          const auto bytes = static_cast<std::size_t>(n * byte_size(to));
          std::byte* target = actual.data + (n == 32 ? 0 : shift * byte_size(to));
          std::fill(actual.memory.begin(), actual.memory.end(), std::byte{0xcc});
          convert(from, to, source, expected.data, n);
          convert_on_cpu(from, to, source, target, n);
          ASSERT_EQ(std::memcmp(target, expected.data, bytes), 0)
              << info(from).torch_name << " to " << info(to).torch_name << ", " << n << " at " << shift;
          ASSERT_EQ(target[bytes], std::byte{0xcc});
          std::fill(target, target + bytes, std::byte{0xcc});
          convert_on_cpu<DocumentedInstructions>(from, to, source, target, n);
          ASSERT_EQ(std::memcmp(target, expected.data, bytes), 0)
              << info(from).torch_name << " to " << info(to).torch_name << ", " << n << " at " << shift;
        }
    }
}

// Tries every pair of 8-bit patterns.
TEST(CudaConvert, MakesOfEveryShortPatternWhatConvertMakes) {
  constexpr Index kPatterns = 65536;
  Placed in(kPatterns * 2, 0), expected(kPatterns * 16, 0), actual(kPatterns * 16, 0);
  for (Index i = 0; i < kPatterns; ++i) {
    const auto v = static_cast<std::uint16_t>(i);
    std::memcpy(in.data + 2 * i, &v, 2);
  }
  for (DType from : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2})
    for (DType to : kFloats) {
      if (from == to) continue;
      const Index n = 2 * kPatterns / byte_size(from);
      const auto bytes = static_cast<std::size_t>(n * byte_size(to));
      convert(from, to, in.data, expected.data, n);
      convert_on_cpu(from, to, in.data, actual.data, n);
      EXPECT_EQ(std::memcmp(actual.data, expected.data, bytes), 0);
      std::memset(actual.data, 0xcc, bytes);
      convert_on_cpu<DocumentedInstructions>(from, to, in.data, actual.data, n);
      EXPECT_EQ(std::memcmp(actual.data, expected.data, bytes), 0);
    }
}

// Tries all of them in the soak, otherwise some ranges.
TEST(CudaConvert, MakesOfEveryFloatTheNearestNumber) {
  constexpr Index kStretch = 1 << 16;
  const std::uint32_t step = in_soak() ? 1 : 2039;
  for (DType to : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    const NearestNumbers nearest(to);
    const Status done = parallel_for((1 << 16) / step, thread_count(0), [&](int, Index i) -> Status {
      const auto first = static_cast<std::uint32_t>(i) * step << 16;
      const auto bytes = static_cast<std::size_t>(kStretch * byte_size(to));
      Placed in(kStretch * 4, 0), expected(kStretch * 2, 0), actual(kStretch * 2, 0);
      std::memcpy(in.data, floats_from(first, kStretch).data(), kStretch * 4);
      nearest.fill(first, kStretch, expected.data);
      convert_on_cpu(DType::kFloat32, to, in.data, actual.data, kStretch);
      const bool by_elements = std::memcmp(actual.data, expected.data, bytes) == 0;
      std::memset(actual.data, 0xcc, bytes);
      convert_on_cpu<DocumentedInstructions>(DType::kFloat32, to, in.data, actual.data, kStretch);
      if (by_elements && std::memcmp(actual.data, expected.data, bytes) == 0) return {};
      return internal_error(std::string(info(to).torch_name) + " of the floats " + std::to_string(first) + " and on");
    });
    EXPECT_TRUE(done) << done.error().message();
  }
}

// Calls `body` with the bits of each element of the 8- and 16-bit types. For floats, tries all upper halves, with lower
// halves on both sides of the rounding boundaries.
template <class From, class Body>
void for_each_border(const Body& body) {
  if constexpr (sizeof(From) < 4) {
    for (std::uint32_t bits = 0; bits < 1u << (8 * sizeof(From)); ++bits) body(bits);
  } else {
    for (std::uint32_t upper = 0; upper < 1u << 16; ++upper)
      for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u})
        body(upper << 16 | lower);
  }
}

// Tries one number after the other. Whenever the instructions' result is used, it equals that of elements.h, and it is
// used for every value in the target's range.
template <class From, class To>
void expect_instructions_as_elements() {
  using SourceBits = std::conditional_t<sizeof(From) == 1, std::uint8_t,
                                        std::conditional_t<sizeof(From) == 2, std::uint16_t, std::uint32_t>>;
  constexpr int kIn = 8 * sizeof(From), kOut = 8 * sizeof(To);
  constexpr std::uint64_t kMask = (std::uint64_t{1} << kOut) - 1;
  std::uint32_t previous = 0, differ = 0;
  bool previous_fits = true;
  for_each_border<From>([&](std::uint32_t bits) {
    const auto value = std::bit_cast<From>(static_cast<SourceBits>(bits));
    const float wide = widen(value);
    const bool fits = std::fabs(wide) <= std::bit_cast<float>(kLargest<To>);
    To expected;
    narrow(wide, expected);
    std::uint64_t expected_bits = 0;
    std::memcpy(&expected_bits, &expected, sizeof expected);
    const auto in = static_cast<Pair<From>>(Pair<From>{static_cast<SourceBits>(previous)} | std::uint64_t{bits} << kIn);
    Pair<To> out{};
    const bool taken = convert_by_instructions<DocumentedInstructions, From, To, 1>(&in, &out);
    if (taken != (fits && previous_fits) || (taken && (std::uint64_t{out} >> kOut & kMask) != expected_bits)) {
      if (++differ < 5) ADD_FAILURE() << std::hex << bits << ": " << taken << ' ' << out << ", not " << expected_bits;
    }
    previous = bits;
    previous_fits = fits;
  });
  EXPECT_EQ(differ, 0u);
}

TEST(CudaConvert, TakesOfInstructionsWhatIsElementsToo) {
  for (DType from : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat16, DType::kBFloat16, DType::kFloat32})
    for (DType to : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      SCOPED_TRACE(std::string(info(from).torch_name) + " to " + std::string(info(to).torch_name));
      with_conversion(from, to, []<class From, class To>(DTypeConversion<From, To>) {
        if constexpr (kHasInstructions<DocumentedInstructions, From, To>) expect_instructions_as_elements<From, To>();
      });
    }
}

TEST(CudaConvert, TellsAGpuWhatBecomesOfANan) {
  Random random(61);
  for (int i = 0; i < 20000; ++i) {
    const std::uint64_t payload = static_cast<std::uint64_t>(random.below(INT64_MAX)) >> random.below(63) | 1u << 29;
    const std::uint64_t wide =
        0x7ff0000000000000u | (payload & 0x800fffffffffffffu) | static_cast<std::uint64_t>(random.below(2)) << 63;
    float narrow_expected = 0;
    double value = 0;
    std::memcpy(&value, &wide, 8);
    if (!std::isnan(value)) continue;
    convert(DType::kFloat64, DType::kFloat32, reinterpret_cast<const std::byte*>(&wide),
            reinterpret_cast<std::byte*>(&narrow_expected), 1);
    const float narrowed = nan_to_float(wide);
    EXPECT_EQ(std::memcmp(&narrowed, &narrow_expected, 4), 0) << std::hex << wide;

    const auto single = static_cast<std::uint32_t>(wide >> 32) | 0x7f800001u;
    double wide_expected = 0;
    convert(DType::kFloat32, DType::kFloat64, reinterpret_cast<const std::byte*>(&single),
            reinterpret_cast<std::byte*>(&wide_expected), 1);
    const double widened = nan_to_double(single);
    EXPECT_EQ(std::memcmp(&widened, &wide_expected, 8), 0) << std::hex << single;
  }
}

// ---- digests

constexpr DigestWeights kWeights = make_digest_weights();

Digest digest_on_cpu(const Dims& shape, const Box& box, Index element_bytes, const std::byte* data, Index most,
                     std::uint32_t workers) {
  Digest total;
  plan_digest(shape, box, element_bytes, data, most, [&](auto kernel, const DigestJob& job) {
    for (std::uint32_t worker = 0; worker < workers; ++worker) {
      std::uint32_t sum[kDigestWords] = {};
      kernel.add_items(job, kWeights, worker, workers, sum);
      for (std::size_t k = 0; k < kDigestWords; ++k) total.words[k] += sum[k];
    }
  });
  return total;
}

TEST(CudaDigest, OfRandomBoxesEqualsDigestBox) {
  Random random(67);
  for (int round = 0; round < 600; ++round) {
    const int rank = static_cast<int>(random.between(0, 4));
    const Index side = std::array<Index, 5>{1, 9000, 200, 30, 9}[static_cast<std::size_t>(rank)];
    Box box{Dims::filled(rank, 0), Dims::filled(rank, 0)};
    Dims shape = Dims::filled(rank, 0);
    for (int d = 0; d < rank; ++d) {
      shape[d] = random.between(1, side);
      const bool all = random.below(2) == 0;
      box.origin[d] = all ? 0 : random.below(shape[d]);
      box.shape[d] = all ? shape[d] : random.between(random.below(10) == 0 ? 0 : 1, shape[d] - box.origin[d]);
      // Often uses multiples of the vector size, as in checkpoints.
      if (random.below(2) == 0) shape[d] = (shape[d] + 15) / 16 * 16;
    }
    const Index element_bytes = Index{1} << random.below(5);
    const Index bytes = volume(box) * element_bytes;
    Placed data(bytes, random.below(3) == 0 ? random.below(16) : 0);
    const Buffer values = random.bytes(bytes);
    std::copy(values.begin(), values.end(), data.data);
    const Index most = random.below(4) == 0 ? random.between(64, 5000) : kMaxCount / 4;
    ASSERT_EQ(digest_on_cpu(shape, box, element_bytes, data.data, most, random.below(2) == 0 ? 32 : 96),
              digest_box(shape, box, element_bytes, data.data))
        << to_string(shape) << ", " << to_string(box) << " x " << element_bytes;
  }
}

TEST(CudaDigest, OfSizesAroundABlock) {
  Random random(71);
  Placed data(9000, 0);
  const Buffer values = random.bytes(8000);
  std::copy(values.begin(), values.end(), data.data);
  for (Index element_bytes : {1, 2, 4})
    for (Index n : {0, 1, 31, 32, 33, 1023, 1024, 1025, 1900})
      for (Index first : {0, 1, 8, 1000, 1016, 1023, 1024})
        EXPECT_EQ(digest_on_cpu({4000}, {{first}, {n}}, element_bytes, data.data, kMaxCount / 4, 64),
                  digest_box({4000}, {{first}, {n}}, element_bytes, data.data))
            << n << " from " << first << " x " << element_bytes;
}

TEST(CudaDigest, KnowsPlacesPastFourGigabytes) {
  Placed data(4096, 0);
  const Buffer values = Random(73).bytes(4096);
  std::copy(values.begin(), values.end(), data.data);
  const Dims shape = {Index{1} << 22, Index{1} << 22};
  const Box box = {{(Index{1} << 22) - 5, 1 << 21}, {4, 512}};
  EXPECT_EQ(digest_on_cpu(shape, box, 2, data.data, kMaxCount / 4, 32), digest_box(shape, box, 2, data.data));
}

}  // namespace
}  // namespace reshard::cuda_kernels_test
