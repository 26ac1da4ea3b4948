#include "lib/device/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "lib/device/copy.h"

namespace reshard::digest_test {
namespace {

using Buffer = std::vector<std::byte>;

Buffer random_bytes(std::size_t n, unsigned seed = 5) {
  std::mt19937 random(seed);
  Buffer out(n);
  for (std::byte& b : out) b = static_cast<std::byte>(random());
  return out;
}

// Computes the digest by its definition.
Digest by_definition(Bytes run, Index first_element, Index element_bytes) {
  Digest d;
  const std::size_t lane_bytes = element_bytes == 1 ? 1 : 2;
  for (std::size_t i = 0; i < run.size() / lane_bytes; ++i) {
    std::uint16_t lane = std::to_integer<std::uint16_t>(run[i * lane_bytes]);
    if (lane_bytes == 2) lane = static_cast<std::uint16_t>(lane | std::to_integer<std::uint32_t>(run[2 * i + 1]) << 8);
    const Index number = first_element * digest_lanes(element_bytes) + static_cast<Index>(i);
    for (int k = 0; k < kDigestWords; ++k) {
      const std::int64_t product = std::int64_t{static_cast<std::int16_t>(lane)} * digest_weight(k, number % 1024);
      d.words[static_cast<std::size_t>(k)] += static_cast<std::uint32_t>(product) * digest_key(k, number / 1024);
    }
  }
  return d;
}

Digest whole(const Buffer& data, Index element_bytes = 2) { return digest_run(data, 0, element_bytes); }

TEST(Digest, EveryVariantEqualsTheDefinition) {
  const Buffer data = random_bytes(70000);
  for (const DigestVariant& variant : digest_variants())
    for (Index element_bytes : {1, 2, 4, 8, 16})
      for (Index first : {0, 1, 31, 1000, 1023, 1024, 123456789})
        for (Index n : {0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 1000, 1023, 1024, 1025, 2048, 3001}) {
          const Bytes run = Bytes(data).subspan(1, static_cast<std::size_t>(n * element_bytes));
          EXPECT_EQ(variant.run(run, first, element_bytes), by_definition(run, first, element_bytes))
              << variant.name << ", " << element_bytes << " bytes, " << n << " from " << first;
        }
}

TEST(Digest, EveryVariantSurvivesTheExtremeLanes) {
  const Buffer lowest = [] {
    Buffer b(1 << 16);
    for (std::size_t i = 1; i < b.size(); i += 2) b[i] = std::byte{0x80};
    return b;
  }();
  for (const DigestVariant& variant : digest_variants()) {
    EXPECT_EQ(variant.run(lowest, 0, 2), by_definition(lowest, 0, 2)) << variant.name;
    EXPECT_EQ(variant.run(Buffer(5000, std::byte{0xff}), 0, 1), by_definition(Buffer(5000, std::byte{0xff}), 0, 1));
  }
}

TEST(Digest, HasNotChanged) {
  // Manifests contain digests, so these values are part of the format.
  Buffer data(5000);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7 + i / 256);
  EXPECT_EQ(digest_run(data, 0, 1).hex(), "d46e7e761c248da4475182d81565f1e0");
  EXPECT_EQ(digest_run(data, 0, 2).hex(), "078f6d5c4aa54b681405ec58d145802a");
  EXPECT_EQ(digest_run(data, Index{1} << 45, 8).hex(), "345629600411fdb8d1df954c8353de5e");
}

TEST(Digest, OfAnyPartitionIntoRunsIsTheWhole) {
  const Buffer data = random_bytes(1 << 16);
  std::mt19937 random(17);
  for (Index element_bytes : {1, 2, 4, 8, 16}) {
    const Index n = (1 << 16) / element_bytes;
    for (int round = 0; round < 10; ++round) {
      Digest sum;
      for (Index first = 0; first < n;) {
        const Index part = std::min<Index>(n - first, random() % 3000);
        sum += digest_run(Bytes(data).subspan(static_cast<std::size_t>(first * element_bytes),
                                              static_cast<std::size_t>(part * element_bytes)),
                          first, element_bytes);
        first += part;
      }
      EXPECT_EQ(sum, whole(data, element_bytes));
    }
  }
}

// Cuts `box` at random positions, and adds up the digests of the pieces.
Digest digest_of_pieces(std::mt19937& random, const Dims& shape, const Box& box, Index element_bytes,
                        const Buffer& tensor, int cuts) {
  if (cuts > 0 && box.rank() > 0) {
    const int d = static_cast<int>(random() % static_cast<unsigned>(box.rank()));
    const Index at = static_cast<Index>(random() % static_cast<std::uint64_t>(box.shape[d] + 1));
    Box low = box, high = box;
    low.shape[d] = at;
    high.origin[d] += at;
    high.shape[d] -= at;
    Digest sum = digest_of_pieces(random, shape, high, element_bytes, tensor, cuts - 1);
    return sum += digest_of_pieces(random, shape, low, element_bytes, tensor, cuts - 1);
  }
  const Dims strides = row_major_strides(shape);
  Index first = 0;
  for (int d = 0; d < shape.rank(); ++d) first += box.origin[d] * strides[d];
  Buffer piece(static_cast<std::size_t>(volume(box) * element_bytes));
  if (!box.empty())
    copy_box(box.shape, element_bytes, tensor.data() + first * element_bytes, strides, piece.data(),
             row_major_strides(box.shape));
  return digest_box(shape, box, element_bytes, piece.data());
}

TEST(Digest, OfAnyPartitionIntoBoxesIsTheWhole) {
  std::mt19937 random(23);
  for (int round = 0; round < 300; ++round) {
    Dims shape;
    const int rank = static_cast<int>(random() % 6);
    for (int d = 0; d < rank; ++d) shape.push_back(1 + random() % (rank <= 2 ? 100 : 8));
    const Index element_bytes = Index{1} << random() % 5;
    const Buffer tensor =
        random_bytes(static_cast<std::size_t>(volume(shape) * element_bytes), static_cast<unsigned>(round));
    EXPECT_EQ(digest_of_pieces(random, shape, reshard::whole(shape), element_bytes, tensor, 4),
              whole(tensor, element_bytes))
        << to_string(shape) << " x " << element_bytes;
  }
}

TEST(Digest, OfNothingAndOfZerosIsZero) {
  EXPECT_EQ(whole({}), Digest{});
  EXPECT_EQ(whole(Buffer(4096)), Digest{});
  EXPECT_EQ(digest_box({0, 5}, reshard::whole({0, 5}), 2, nullptr), Digest{});
}

// Returns the number of words in which two digests agree.
int equal_words(const Digest& a, const Digest& b) {
  int n = 0;
  for (std::size_t k = 0; k < a.words.size(); ++k) n += a.words[k] == b.words[k] ? 1 : 0;
  return n;
}

TEST(Digest, ShowsEverySingleFlippedBitInEveryWord) {
  Buffer data = random_bytes(2500);
  const Digest two = whole(data, 2), one = whole(data, 1);
  for (std::size_t bit = 0; bit < 8 * data.size(); ++bit) {
    const auto flip = static_cast<std::byte>(1 << bit % 8);
    data[bit / 8] ^= flip;
    EXPECT_EQ(equal_words(whole(data, 2), two), 0);
    EXPECT_EQ(equal_words(whole(data, 1), one), 0);
    data[bit / 8] ^= flip;
  }
}

TEST(Digest, ShowsExchangedRowsShiftsAndTransposes) {
  for (Index element_bytes : {1, 2, 4, 8}) {
    const Index side = 64, row = side * element_bytes, bytes = side * row;
    const Buffer data = random_bytes(static_cast<std::size_t>(bytes));
    const Digest expected = whole(data, element_bytes);
    for (Index i : {0, 1, 40}) {
      Buffer exchanged = data;
      std::swap_ranges(exchanged.begin() + i * row, exchanged.begin() + (i + 1) * row, exchanged.end() - row);
      EXPECT_EQ(equal_words(whole(exchanged, element_bytes), expected), 0);
    }
    for (Index by : {Index{1}, element_bytes, row, Index{2048}, bytes / 2}) {
      Buffer shifted = data;
      std::rotate(shifted.begin(), shifted.begin() + by, shifted.end());
      EXPECT_NE(whole(shifted, element_bytes), expected) << by;
    }
    Buffer transposed(data.size());
    copy_box({side, side}, element_bytes, data.data(), {side, 1}, transposed.data(), {1, side});
    EXPECT_NE(whole(transposed, element_bytes), expected);
    Buffer dropped = data;
    std::fill(dropped.begin() + row, dropped.begin() + 2 * row, std::byte{0});
    EXPECT_NE(whole(dropped, element_bytes), expected);
  }
}

TEST(Digest, ShowsExchangedBlocks) {
  const Buffer data = random_bytes(16 * 2048);
  for (std::size_t a = 0; a < 16; ++a)
    for (std::size_t b = a + 1; b < 16; ++b) {
      Buffer exchanged = data;
      std::swap_ranges(&exchanged[a * 2048], &exchanged[a * 2048] + 2048, &exchanged[b * 2048]);
      EXPECT_EQ(equal_words(whole(exchanged), whole(data)), 0);
    }
}

TEST(Digest, WeightsAndKeysAreOddAndNoTwoPlacesAreAlike) {
  // The guarantees in digest.h depend on this.
  std::set<std::array<std::int16_t, kDigestWords>> places;
  for (Index lane = 0; lane < kDigestBlock; ++lane) {
    std::array<std::int16_t, kDigestWords> weights{};
    for (int k = 0; k < kDigestWords; ++k) weights[static_cast<std::size_t>(k)] = digest_weight(k, lane);
    for (std::int16_t w : weights) EXPECT_EQ(w & 1, 1);
    places.insert(weights);
  }
  EXPECT_EQ(places.size(), static_cast<std::size_t>(kDigestBlock));
  for (int k = 0; k < kDigestWords; ++k)
    for (Index block = 0; block < 5000; ++block) EXPECT_EQ(digest_key(k, block) & 1, 1u);
}

TEST(Digest, AWordMissesTheWorstErrorsAboutOnceIn65536Times) {
  // Errors in the top bits of a few lanes, near each other or far apart: only 16 bits per word can reveal them.
  std::mt19937_64 random(31);
  constexpr int kTrials = 1 << 18;
  int missed[kDigestWords] = {}, missed_twice = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::uint32_t error[kDigestWords] = {};
    const std::uint64_t spread = trial % 2 == 0 ? 1024 : 1 << 30;
    std::set<Index> wrong;
    for (std::uint64_t n = 2 + 2 * (random() % 4); wrong.size() < n;)
      wrong.insert(static_cast<Index>(random() % spread));
    for (Index lane : wrong) {
      const std::uint32_t difference = random() % 2 == 0 ? 0x8000u : 0u - 0x8000u;
      for (int k = 0; k < kDigestWords; ++k)
        error[k] += difference * static_cast<std::uint32_t>(digest_weight(k, lane % kDigestBlock)) *
                    digest_key(k, lane / kDigestBlock);
    }
    int words = 0;
    for (int k = 0; k < kDigestWords; ++k) {
      missed[k] += error[k] == 0 ? 1 : 0;
      words += error[k] == 0 ? 1 : 0;
    }
    missed_twice += words > 1 ? 1 : 0;
  }
  for (int m : missed) EXPECT_LT(m, 20);  // 4 expected
  EXPECT_EQ(missed_twice, 0);
}

TEST(DigestHex, BeginsWithTheFirstWord) {
  const Digest d{{0x01234567, 0x89abcdef, 0, 0xffffffff}};
  EXPECT_EQ(d.hex(), "0123456789abcdef00000000ffffffff");
}

}  // namespace
}  // namespace reshard::digest_test
