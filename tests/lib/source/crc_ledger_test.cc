#include "lib/source/crc_ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "lib/device/crc32.h"

namespace reshard::crc_ledger_test {
namespace {

std::vector<std::byte> random_bytes(std::mt19937& rng, std::size_t n) {
  std::vector<std::byte> out(n);
  for (std::byte& b : out) b = static_cast<std::byte>(rng());
  return out;
}

// Returns [0, size) in random pieces, in random order.
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

EachExtent of(std::vector<Extent> extents) {
  return [extents = std::move(extents)](const VisitExtent& visit) {
    for (const Extent& e : extents) visit(e);
  };
}

TEST(CrcLedger, JoinsPiecesInAnyOrder) {
  std::mt19937 rng(3);
  for (int n = 0; n < 300; ++n) {
    const auto bytes = random_bytes(rng, 1 + rng() % 500);
    const Extent extent{static_cast<std::uint32_t>(n), 64, static_cast<Index>(bytes.size())};
    CrcLedger ledger(of({extent}));
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
    CrcLedger ledger(of({extent}));
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
  const Extent begun{1, 0, 100}, done{1, 100, 10}, untouched{1, 110, 10}, other{1, 120, 10};
  CrcLedger ledger(of({untouched, done, begun}));
  EXPECT_FALSE(ledger.add(begun, 0, 40, 1));
  EXPECT_FALSE(ledger.add(begun, 60, 40, 2));
  EXPECT_EQ(ledger.add(done, 0, 10, 7), 7u);
  EXPECT_EQ(ledger.whole(begun), std::nullopt);
  EXPECT_EQ(ledger.whole(done), 7u);
  EXPECT_EQ(ledger.whole(untouched), std::nullopt);
  EXPECT_EQ(ledger.add(other, 0, 10, 7), std::nullopt) << "none of its extents";
  EXPECT_FALSE(ledger.is_new(other, 0, 10));
  EXPECT_EQ(ledger.whole(other), std::nullopt);
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
  CrcLedger ledger(of({extent}));
  EXPECT_FALSE(add(ledger, 20, 50));
  EXPECT_FALSE(add(ledger, 40, 60));  // overlaps the end
  EXPECT_FALSE(add(ledger, 10, 30));  // overlaps the beginning
  EXPECT_FALSE(add(ledger, 30, 40));  // is inside a known piece
  EXPECT_FALSE(add(ledger, 10, 60));  // contains a known piece
  EXPECT_FALSE(add(ledger, 20, 50));  // is known
  EXPECT_FALSE(add(ledger, 50, 100));
  EXPECT_EQ(add(ledger, 0, 20), crc32(0, bytes));
  EXPECT_FALSE(add(ledger, 0, 20));  // begins after the end

  CrcLedger other(of({extent}));
  EXPECT_FALSE(add(other, 20, 50));
  EXPECT_EQ(add(other, 0, 100), crc32(0, bytes));  // read from end to end
  EXPECT_TRUE(other.incomplete().empty());
}

// Compares the ledger with a list of all bytes. Extents of several files, some beyond 4 GiB, are added in any order and
// some twice; pieces come in any order, and some overlap or are outside of extents.
TEST(CrcLedger, KnowsWhatAListOfAllBytesKnows) {
  std::mt19937 rng(6);
  const auto place_of = [](const Extent& e) { return std::pair(e.file, e.offset); };
  for (int n = 0; n < 60; ++n) {
    struct Whole {
      Extent extent;
      std::vector<std::byte> bytes;
      std::vector<bool> known;
    };
    std::vector<Whole> all;
    std::vector<Extent> told;
    for (std::uint32_t file = 0; file < 3; ++file) {
      Index at = 0;
      for (std::size_t k = rng() % 60; k > 0; --k) {
        const auto bytes = random_bytes(rng, 1 + rng() % 9);
        all.push_back({{file, at, std::ssize(bytes)}, bytes, std::vector<bool>(bytes.size())});
        at += std::ssize(bytes) + (rng() % 8 == 0 ? static_cast<Index>(rng()) : 0);
      }
    }
    for (const Whole& w : all)
      for (std::size_t times = 1 + rng() % 8 / 7; times > 0; --times) told.push_back(w.extent);
    std::shuffle(told.begin(), told.end(), rng);

    CrcLedger ledger(of(told)), other(of(told)), recent(of(told));
    ledger.keep_recent();
    const auto add_to = [](CrcLedger& to) {
      return [&to](const CrcPiece& p) { to.add(p.extent, p.begin, p.length, p.crc); };
    };
    const auto hand_on_recent = [&] {
      const std::vector<CrcPiece> pieces = ledger.take_recent();
      std::for_each(pieces.begin(), pieces.end(), add_to(recent));
    };
    for (std::size_t k = 0; k < 4 * all.size(); ++k) {
      Whole& w = all[rng() % all.size()];
      const Index begin = rng() % w.extent.length, end = begin + 1 + rng() % (w.extent.length - begin);
      const auto from = w.known.begin() + begin, to = w.known.begin() + end;
      const bool was_whole = std::find(w.known.begin(), w.known.end(), false) == w.known.end();
      const bool is_new = std::find(from, to, true) == to, is_all = end - begin == w.extent.length;
      ASSERT_EQ(ledger.is_new(w.extent, begin, end - begin), is_new);
      if (is_new || is_all) std::fill(from, to, true);
      const bool is_whole = std::find(w.known.begin(), w.known.end(), false) == w.known.end();
      const auto part = Bytes(w.bytes).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
      const auto crc = ledger.add(w.extent, begin, end - begin, crc32(0, part));
      ASSERT_EQ(crc, is_whole && !was_whole ? std::optional(crc32(0, w.bytes)) : std::nullopt);
      ASSERT_EQ(ledger.add({w.extent.file, w.extent.offset + (Index{1} << 40), 8}, 0, 8, 1), std::nullopt);
      if (rng() % 8 == 0) hand_on_recent();
    }
    hand_on_recent();
    ledger.visit_all(add_to(other));
    EXPECT_TRUE(ledger.take_recent().empty());

    std::vector<Extent> begun;
    for (const Whole& w : all) {
      const bool is_whole = std::find(w.known.begin(), w.known.end(), false) == w.known.end();
      for (const CrcLedger* const each : {&ledger, &other, &recent})
        ASSERT_EQ(each->whole(w.extent), is_whole ? std::optional(crc32(0, w.bytes)) : std::nullopt);
      EXPECT_EQ(ledger.whole({w.extent.file + 4, w.extent.offset, w.extent.length}), std::nullopt);
      if (!is_whole && std::find(w.known.begin(), w.known.end(), true) != w.known.end()) begun.push_back(w.extent);
    }
    std::sort(begun.begin(), begun.end(), [&](const Extent& a, const Extent& b) { return place_of(a) < place_of(b); });
    for (const CrcLedger* const each : {&ledger, &other, &recent}) EXPECT_EQ(each->incomplete(), begun);
    ledger.clear();
    for (const Whole& w : all) EXPECT_EQ(ledger.whole(w.extent), std::nullopt);
    EXPECT_TRUE(ledger.incomplete().empty());
  }
}

TEST(CrcLedger, TakesPiecesFromSeveralThreads) {
  std::mt19937 rng(5);
  const auto bytes = random_bytes(rng, 20'000);
  const Extent extent{0, 0, 20'000};
  const auto pieces = random_pieces(rng, extent.length);
  CrcLedger ledger(of({extent}));
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
}  // namespace reshard::crc_ledger_test
