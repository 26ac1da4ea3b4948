#include "lib/device/copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace reshard::copy_test {
namespace {

using Buffer = std::vector<std::byte>;

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  Index below(Index n) { return static_cast<Index>(engine_() % static_cast<std::uint64_t>(n)); }
  Index between(Index low, Index high) { return low + below(high - low + 1); }

 private:
  std::mt19937_64 engine_;
};

// Memory with random strides: the dimensions in some order, each padded, so that no two elements overlap.
struct Memory {
  Dims strides;
  Index elements = 0;  // elements that the strides reach
};

Memory random_memory(Random& random, const Dims& shape, bool padded) {
  std::vector<int> order(static_cast<std::size_t>(shape.rank()));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(static_cast<Index>(i)))]);
  Memory memory{Dims::filled(shape.rank(), 0), 1};
  for (int d : order) {
    memory.strides[d] = memory.elements;
    memory.elements *= std::max<Index>(shape[d], 1) + (padded ? random.below(3) : 0);
  }
  return memory;
}

Buffer numbered(Index bytes) {
  Buffer out(static_cast<std::size_t>(bytes));
  std::mt19937 random(3);
  for (std::byte& b : out) b = static_cast<std::byte>(random());
  return out;
}

// Copies by the definition: element by element, in row-major order.
void copy_slowly(const Dims& shape, Index element_bytes, const std::byte* from, const Dims& from_strides, std::byte* to,
                 const Dims& to_strides) {
  for (Index n = 0; n < volume(shape); ++n) {
    Index rest = n, source = 0, target = 0;
    for (int d = shape.rank() - 1; d >= 0; --d) {
      source += rest % shape[d] * from_strides[d];
      target += rest % shape[d] * to_strides[d];
      rest /= shape[d];
    }
    std::memcpy(to + target * element_bytes, from + source * element_bytes, static_cast<std::size_t>(element_bytes));
  }
}

void expect_equal_copies(const Dims& shape, Index element_bytes, const Memory& from, const Memory& to) {
  const Buffer source = numbered(from.elements * element_bytes);
  Buffer expected(static_cast<std::size_t>(to.elements * element_bytes), std::byte{0xcc});
  Buffer actual = expected;
  Buffer by_units = expected;
  copy_slowly(shape, element_bytes, source.data(), from.strides, expected.data(), to.strides);

  copy_box(shape, element_bytes, source.data(), from.strides, actual.data(), to.strides);
  EXPECT_EQ(actual, expected) << to_string(shape) << " x " << element_bytes << ": " << to_string(from.strides) << " -> "
                              << to_string(to.strides);

  const CopyShape simple = simplify_copy(shape, element_bytes, from.strides, to.strides);
  for (Index n = 0; n < simple.count(); ++n) {
    const CopyOffsets at = locate(simple, n);
    std::memcpy(by_units.data() + at.to, source.data() + at.from, static_cast<std::size_t>(simple.unit));
  }
  EXPECT_EQ(by_units, expected);
}

TEST(CopyBox, EqualsTheElementwiseDefinition) {
  Random random(11);
  for (int round = 0; round < 2000; ++round) {
    const int rank = static_cast<int>(random.between(0, 5));
    Dims shape = Dims::filled(rank, 0);
    for (int d = 0; d < rank; ++d) shape[d] = random.below(20) == 0 ? 0 : random.between(1, rank <= 2 ? 80 : 7);
    const Index element_bytes = Index{1} << random.below(5);
    const Memory from = random_memory(random, shape, random.below(2) == 0);
    const Memory to = random.below(3) == 0 ? from : random_memory(random, shape, random.below(2) == 0);
    expect_equal_copies(shape, element_bytes, from, to);
    if (HasFailure()) return;
  }
}

TEST(CopyBox, TransposesAtSizesAroundATile) {
  for (Index rows : {1, 2, 31, 32, 33, 65})
    for (Index columns : {1, 3, 31, 32, 33, 64})
      for (Index element_bytes : {1, 2, 4, 8, 16})
        expect_equal_copies({rows, columns}, element_bytes, {{columns, 1}, rows * columns},
                            {{1, rows}, rows * columns});
}

TEST(CopyBox, CopiesWithEightDimensions) {
  const Dims shape = Dims::filled(8, 2);
  const Dims backwards = {1, 2, 4, 8, 16, 32, 64, 128};
  expect_equal_copies(shape, 4, {row_major_strides(shape), 256}, {backwards, 256});
}

TEST(CopyBox, ReadsBackwardsAndRepeatsWhereTheSourceStridesSaySo) {
  const Buffer source = numbered(8);
  Buffer out(8);
  copy_box({8}, 1, source.data() + 7, {-1}, out.data(), {1});
  EXPECT_TRUE(std::equal(source.rbegin(), source.rend(), out.begin()));
  copy_box({4, 2}, 1, source.data(), {0, 1}, out.data(), {2, 1});
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(out[i], source[i % 2]);
}

TEST(SimplifyCopy, MakesAWholeTensorOneRun) {
  const Dims shape = {4, 1, 8, 16};
  const CopyShape simple = simplify_copy(shape, 2, row_major_strides(shape), row_major_strides(shape));
  EXPECT_EQ(simple.unit, 4 * 8 * 16 * 2);
  EXPECT_EQ(simple.loops, 0);
  EXPECT_EQ(simple.count(), 1);
}

TEST(SimplifyCopy, MakesAColumnShardOneLoopOfRows) {
  const CopyShape simple = simplify_copy({4, 8, 16}, 2, {8 * 64, 64, 1}, {8 * 16, 16, 1});
  EXPECT_EQ(simple.unit, 32);
  ASSERT_EQ(simple.loops, 1);
  EXPECT_EQ(simple.loop[0], (CopyLoop{32, 128, 32}));
}

TEST(SimplifyCopy, SortsByTheDestinationSoThatATransposeWritesInOrder) {
  const CopyShape simple = simplify_copy({3, 5}, 4, {5, 1}, {1, 3});
  EXPECT_EQ(simple.unit, 4);
  ASSERT_EQ(simple.loops, 2);
  EXPECT_EQ(simple.loop[0], (CopyLoop{5, 4, 12}));
  EXPECT_EQ(simple.loop[1], (CopyLoop{3, 20, 4}));
}

TEST(SimplifyCopy, SeesThatAnEmptyBoxIsNothing) {
  EXPECT_EQ(simplify_copy({3, 0}, 4, {1, 1}, {1, 1}).count(), 0);
  EXPECT_EQ(simplify_copy({}, 4, {}, {}).count(), 1);
}

TEST(SwapBytes, ReversesEachUnit) {
  for (Index unit : {1, 2, 4, 8})
    for (Index units : {0, 1, 2, 7, 33}) {
      const Buffer before = numbered(unit * units);
      Buffer after = before;
      swap_bytes(after, unit);
      for (Index i = 0; i < unit * units; ++i)
        EXPECT_EQ(after[static_cast<std::size_t>(i)],
                  before[static_cast<std::size_t>(i / unit * unit + unit - 1 - i % unit)]);
    }
}

}  // namespace
}  // namespace reshard::copy_test
