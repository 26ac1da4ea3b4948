#include "lib/transport/collectives.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

#include "tests/support/local_ranks.h"

namespace reshard::collectives_test {
namespace {

class Collectives : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, testing::Values(1, 2, 3, 4, 5, 7, 8, 16));

// Returns rank r's contribution: different for every rank, and of different length.
std::string word_of(int rank) { return std::string(static_cast<std::size_t>(rank * 3), static_cast<char>('a' + rank)); }

TEST_P(Collectives, BroadcastGivesRankZerosBytesToAll) {
  EXPECT_TRUE(run_local_ranks(GetParam(), [](Transport& ranks) -> Status {
    EXPECT_EQ(TRY(broadcast(&ranks, ranks.rank() == 0 ? "from zero" : "mine")), "from zero");
    EXPECT_EQ(TRY(broadcast(&ranks, "")), "");
    return {};
  }));
}

TEST_P(Collectives, GatherBringsEachRanksBytesToRankZero) {
  const int n = GetParam();
  EXPECT_TRUE(run_local_ranks(n, [n](Transport& ranks) -> Status {
    const auto got = TRY(gather(&ranks, word_of(ranks.rank())));
    if (ranks.rank() > 0) {
      EXPECT_TRUE(got.empty());
      return {};
    }
    EXPECT_EQ(static_cast<int>(got.size()), n);
    for (int r = 0; r < n; ++r) EXPECT_EQ(got[static_cast<std::size_t>(r)], word_of(r));
    return {};
  }));
}

TEST_P(Collectives, GatheredValuesLieInTheOrderOfTheRanks) {
  const int n = GetParam();
  EXPECT_TRUE(run_local_ranks(n, [n](Transport& ranks) -> Status {
    const std::vector<Index> mine(static_cast<std::size_t>(ranks.rank()), ranks.rank());
    const auto got = TRY(gather_values<Index>(&ranks, mine));
    if (ranks.rank() > 0) return {};
    std::vector<Index> expected;
    for (int r = 0; r < n; ++r) expected.insert(expected.end(), static_cast<std::size_t>(r), r);
    EXPECT_EQ(got, expected);
    return {};
  }));
}

TEST_P(Collectives, StreamedValuesComeInTheOrderOfTheRanks) {
  const int n = GetParam();
  constexpr int kStretch = (1 << 20) / sizeof(Index);  // values in one message
  for (const int all : {0, 1, kStretch - 1, kStretch, kStretch + 1, 2 * kStretch}) {
    EXPECT_TRUE(run_local_ranks(n, [n, all](Transport& ranks) -> Status {
      std::vector<Index> got;
      TRY(stream_values<Index>(
          &ranks,
          [&](const std::function<void(const Index&)>& visit) {
            for (Index i = 0; i < all; ++i) visit(i * ranks.rank());
          },
          [&](const Index& value) { got.push_back(value); }));
      std::vector<Index> expected;
      for (Index r = 1; ranks.rank() == 0 && r < n; ++r)
        for (Index i = 0; i < all; ++i) expected.push_back(i * r);
      EXPECT_TRUE(got == expected);
      return {};
    }));
  }
  EXPECT_TRUE(stream_values<Index>(
      nullptr, [](const auto&) {}, [](const Index&) {}));
}

TEST_P(Collectives, SumsMaximaAndMinimaAreTheSameEverywhere) {
  const int n = GetParam();
  EXPECT_TRUE(run_local_ranks(n, [n](Transport& ranks) -> Status {
    const auto r = static_cast<std::uint32_t>(ranks.rank());
    std::uint32_t sums[3] = {1, r, 0xffffffffu};
    TRY(combine_values(&ranks, std::span<std::uint32_t>(sums), [](std::uint32_t& a, std::uint32_t b) { a += b; }));
    const auto size = static_cast<std::uint32_t>(n);
    EXPECT_EQ(sums[0], size);
    EXPECT_EQ(sums[1], size * (size - 1) / 2);
    EXPECT_EQ(sums[2], 0u - size) << "modulo 2^32";
    Index most[2] = {ranks.rank(), -ranks.rank()};
    TRY(maximum(&ranks, most));
    EXPECT_EQ(most[0], n - 1);
    EXPECT_EQ(most[1], 0);
    EXPECT_EQ(TRY(minimum(&ranks, 10 - ranks.rank())), 11 - n);
    EXPECT_TRUE(TRY(all_equal(&ranks, 0x8000000000000001u)));
    EXPECT_EQ(TRY(all_equal(&ranks, ranks.rank() == n - 1 ? 5 : 4)), n == 1);
    return {};
  }));
}

TEST_P(Collectives, NobodyLeavesABarrierBeforeAllHaveCome) {
  const int n = GetParam();
  std::atomic<int> come{0};
  EXPECT_TRUE(run_local_ranks(n, [&](Transport& ranks) -> Status {
    for (int round = 1; round <= 20; ++round) {
      ++come;
      TRY(barrier(&ranks));
      EXPECT_GE(come, n * round);
      TRY(barrier(&ranks));
    }
    return {};
  }));
}

TEST_P(Collectives, OneRanksFailureEndsThemAll) {
  const int n = GetParam();
  for (int failing = 0; failing < n; ++failing) {
    int failed = -1;
    std::atomic<int> others{0};
    const Status status = run_local_ranks(
        n,
        [&](Transport& ranks) -> Status {
          if (ranks.rank() == failing) return io_error("disk full");
          Status end = barrier(&ranks);
          EXPECT_FALSE(end);
          EXPECT_EQ(end.error().code(), ErrorCode::kPeer);
          EXPECT_TRUE(ranks.stopped());
          ++others;
          return end;
        },
        &failed);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().message(), "disk full");
    EXPECT_EQ(failed, failing);
    EXPECT_EQ(others, n - 1);
  }
}

TEST_P(Collectives, SeveralTransfersMayBeUnderWay) {
  const int n = GetParam();
  EXPECT_TRUE(run_local_ranks(n, [n](Transport& ranks) -> Status {
    // Each rank sends two messages to every other one, in each of two transfers, and waits for the second first.
    std::vector<std::vector<int>> sent(4), got(4);
    std::unique_ptr<Transfer> transfers[2];
    for (int k = 0; k < 4; ++k) {
      sent[static_cast<std::size_t>(k)].assign(static_cast<std::size_t>(n), 0);
      got[static_cast<std::size_t>(k)] = sent[static_cast<std::size_t>(k)];
      for (int p = 0; p < n; ++p)
        sent[static_cast<std::size_t>(k)][static_cast<std::size_t>(p)] = 100 * ranks.rank() + 10 * p + k;
    }
    for (std::size_t t = 0; t < 2; ++t) {
      std::vector<Outgoing> out;
      std::vector<Incoming> in;
      for (int p = 0; p < n; ++p)
        for (std::size_t k = 2 * t; k < 2 * t + 2 && p != ranks.rank(); ++k) {
          out.push_back({p, std::as_bytes(std::span(&sent[k][static_cast<std::size_t>(p)], 1))});
          in.push_back({p, std::as_writable_bytes(std::span(&got[k][static_cast<std::size_t>(p)], 1))});
        }
      transfers[t] = TRY(ranks.start(out, in));
    }
    TRY(transfers[1]->wait());
    TRY(transfers[0]->wait());
    for (int k = 0; k < 4; ++k)
      for (int p = 0; p < n; ++p) {
        if (p == ranks.rank()) continue;
        EXPECT_EQ(got[static_cast<std::size_t>(k)][static_cast<std::size_t>(p)], 100 * p + 10 * ranks.rank() + k);
      }
    return {};
  }));
}

TEST(CollectivesAlone, ReturnAtOnce) {
  EXPECT_TRUE(barrier(nullptr));
  EXPECT_EQ(*broadcast(nullptr, "x"), "x");
  EXPECT_EQ(gather(nullptr, "y")->front(), "y");
  EXPECT_EQ(*minimum(nullptr, 3), 3);
  EXPECT_TRUE(*all_equal(nullptr, 3));
}

}  // namespace
}  // namespace reshard::collectives_test
