#include "lib/engine/crc_ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "lib/device/crc32.h"

namespace reshard {
namespace {

std::vector<std::byte> random_bytes(std::mt19937& rng, std::size_t n) {
  std::vector<std::byte> out(n);
  for (std::byte& b : out) b = static_cast<std::byte>(rng());
  return out;
}

// [0, size) in random pieces, in random order.
std::vector<std::pair<Index, Index>> random_pieces(std::mt19937& rng, Index size) {
  std::vector<std::pair<Index, Index>> out;
  for (Index at = 0; at < size;) {
    const Index n = std::min<Index>(size - at, 1 + static_cast<Index>(rng() % 50));
    out.emplace_back(at, n);
    at += n;
  }
  std::shuffle(out.begin(), out.end(), rng);
  return out;
}

TEST(CrcLedger, JoinsPiecesInAnyOrder) {
  std::mt19937 rng(3);
  for (int n = 0; n < 300; ++n) {
    const auto bytes = random_bytes(rng, 1 + rng() % 500);
    const Extent extent{static_cast<std::uint32_t>(n), 64, static_cast<Index>(bytes.size())};
    CrcLedger ledger;
    const auto pieces = random_pieces(rng, extent.length);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const auto [begin, length] = pieces[i];
      const auto part = Bytes(bytes).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(length));
      const auto whole = ledger.add(extent, begin, length, crc32(0, part));
      ASSERT_EQ(whole.has_value(), i + 1 == pieces.size());
      if (whole) {
        ASSERT_EQ(*whole, crc32(0, bytes));
      }
    }
    ASSERT_EQ(ledger.whole(extent), crc32(0, bytes));
    ASSERT_TRUE(ledger.incomplete().empty());
  }
}

TEST(CrcLedger, TellsTheGapsAndWhatIsNewOfThem) {
  std::mt19937 rng(5);
  for (int n = 0; n < 300; ++n) {
    const auto bytes = random_bytes(rng, 1 + rng() % 500);
    const Extent extent{2, 64, static_cast<Index>(bytes.size())};
    CrcLedger ledger;
    std::vector<bool> known(bytes.size());
    const auto add = [&](Index begin, Index length) {
      const auto part = Bytes(bytes).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(length));
      return ledger.add(extent, begin, length, crc32(0, part));
    };
    for (unsigned k = rng() % 8; k > 0; --k) {
      const Index begin = rng() % extent.length, end = begin + 1 + rng() % (extent.length - begin);
      const bool overlaps = std::find(known.begin() + begin, known.begin() + end, true) != known.begin() + end;
      EXPECT_EQ(ledger.is_new(extent, begin, end - begin), !overlaps);
      add(begin, end - begin);
      if (!overlaps) std::fill(known.begin() + begin, known.begin() + end, true);
    }
    std::optional<std::uint32_t> whole = ledger.whole(extent);
    for (const auto& [begin, end] : ledger.gaps(extent)) {
      EXPECT_TRUE(ledger.is_new(extent, begin, end - begin));
      EXPECT_TRUE(begin == 0 || known[static_cast<std::size_t>(begin - 1)]);
      for (Index i = begin; i < end; ++i) EXPECT_FALSE(known[static_cast<std::size_t>(i)]);
      whole = add(begin, end - begin);
    }
    EXPECT_EQ(whole, crc32(0, bytes));
    EXPECT_TRUE(ledger.gaps(extent).empty());
  }
}

TEST(CrcLedger, KnowsWhatIsMissing) {
  CrcLedger ledger;
  const Extent begun{1, 0, 100}, done{1, 100, 10}, untouched{1, 110, 10};
  EXPECT_FALSE(ledger.add(begun, 0, 40, 1));
  EXPECT_FALSE(ledger.add(begun, 60, 40, 2));
  EXPECT_EQ(ledger.add(done, 0, 10, 7), 7u);
  EXPECT_EQ(ledger.whole(begun), std::nullopt);
  EXPECT_EQ(ledger.whole(done), 7u);
  EXPECT_EQ(ledger.whole(untouched), std::nullopt);
  EXPECT_EQ(ledger.incomplete(), std::vector<Extent>{begun});
}

TEST(CrcLedger, LeavesOutWhatOverlaps) {
  std::mt19937 rng(4);
  const auto bytes = random_bytes(rng, 100);
  const Extent extent{0, 0, 100};
  const auto add = [&](CrcLedger& ledger, std::size_t begin, std::size_t end) {
    return ledger.add(extent, static_cast<Index>(begin), static_cast<Index>(end - begin),
                      crc32(0, Bytes(bytes).subspan(begin, end - begin)));
  };
  CrcLedger ledger;
  EXPECT_FALSE(add(ledger, 20, 50));
  EXPECT_FALSE(add(ledger, 40, 60));  // overlaps the end
  EXPECT_FALSE(add(ledger, 10, 30));  // the beginning
  EXPECT_FALSE(add(ledger, 30, 40));  // lies inside
  EXPECT_FALSE(add(ledger, 10, 60));  // around
  EXPECT_FALSE(add(ledger, 20, 50));  // again
  EXPECT_FALSE(add(ledger, 50, 100));
  EXPECT_EQ(add(ledger, 0, 20), crc32(0, bytes));
  EXPECT_FALSE(add(ledger, 0, 20));  // after the end

  CrcLedger other;
  EXPECT_FALSE(add(other, 20, 50));
  EXPECT_EQ(add(other, 0, 100), crc32(0, bytes));  // read from end to end after all
  EXPECT_TRUE(other.incomplete().empty());
}

// Files of equal parts, as ranks write them, and another ledger that is told.
TEST(CrcLedger, KnowsEachOfMany) {
  constexpr std::uint32_t kFiles = 100;
  constexpr Index kExtents = 300;
  for (const std::size_t expected : {std::size_t{0}, std::size_t{kFiles * kExtents}}) {
    CrcLedger ledger, other;
    ledger.expect(expected);
    ledger.keep_recent();
    const auto crc_of = [](std::uint32_t file, Index k) { return file * 1000 + static_cast<std::uint32_t>(k); };
    for (Index k = 0; k < kExtents; ++k)
      for (std::uint32_t file = 0; file < kFiles; ++file)
        ASSERT_EQ(ledger.add({file, 64 * k, 8}, 0, 8, crc_of(file, k)), crc_of(file, k));
    EXPECT_EQ(ledger.add({5, 64, 8}, 0, 8, 1), std::nullopt) << "there already";
    EXPECT_EQ(ledger.take_recent().size(), std::size_t{kFiles * kExtents});
    EXPECT_TRUE(ledger.take_recent().empty());
    for (const CrcPiece& piece : ledger.everything())
      EXPECT_TRUE(other.add(piece.extent, piece.begin, piece.length, piece.crc));
    for (const CrcLedger* const each : {&ledger, &other}) {
      for (Index k = 0; k < kExtents; ++k)
        for (std::uint32_t file = 0; file < kFiles; ++file) ASSERT_EQ(each->whole({file, 64 * k, 8}), crc_of(file, k));
      EXPECT_EQ(each->whole({kFiles, 0, 8}), std::nullopt);
      EXPECT_EQ(each->whole({0, 32, 8}), std::nullopt);
    }
  }
}

TEST(CrcLedger, TakesPiecesFromSeveralThreads) {
  std::mt19937 rng(5);
  const auto bytes = random_bytes(rng, 20'000);
  const Extent extent{0, 0, 20'000};
  const auto pieces = random_pieces(rng, extent.length);
  CrcLedger ledger;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::size_t i = t; i < pieces.size(); i += 4) {
        const auto part =
            Bytes(bytes).subspan(static_cast<std::size_t>(pieces[i].first), static_cast<std::size_t>(pieces[i].second));
        ledger.add(extent, pieces[i].first, pieces[i].second, crc32(0, part));
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(ledger.whole(extent), crc32(0, bytes));
}

}  // namespace
}  // namespace reshard
