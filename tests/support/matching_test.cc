#include "tests/support/matching.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace reshard::matching_test {
namespace {

using Buffer = std::vector<std::byte>;
using Ends = Matcher<int>::Ends;

TEST(Matching, BringsTheEndsOfAMessageTogetherWhoeverComesFirst) {
  Matcher<int> matcher;
  Buffer a(3), b(3), c(5), d(5);
  auto first = matcher.add(0, 2, {{1, a}}, {{1, d}});
  ASSERT_TRUE(first);
  EXPECT_EQ(first->mine.size(), 2u);
  EXPECT_TRUE(first->complete.empty());
  auto second = matcher.add(1, 2, {{0, c}}, {{0, b}});
  ASSERT_TRUE(second);
  ASSERT_EQ(second->complete.size(), 2u);
  EXPECT_EQ(second->complete[0], first->mine[1]);
  EXPECT_EQ(second->complete[0]->from.data(), c.data());
  EXPECT_EQ(second->complete[0]->to.data(), d.data());
  EXPECT_EQ(second->complete[1], first->mine[0]);
  EXPECT_EQ(second->complete[1]->to.data(), b.data());
}

TEST(Matching, RefusesEndsOfUnequalLengthAndPeersThatAreNone) {
  const auto message = [](int peer, std::size_t wanted) {
    Matcher<int> matcher;
    Buffer three(3), to(wanted);
    EXPECT_TRUE(matcher.add(0, 2, {{1, three}}, {}));
    const auto ends = matcher.add(1, 2, {}, {{peer, to}});
    return ends ? "" : ends.error().message();
  };
  EXPECT_EQ(message(0, 3), "");
  EXPECT_EQ(message(0, 4), "rank 0 sent 3 bytes where rank 1 expected 4");
  EXPECT_EQ(message(1, 3), "a message from rank 1 to rank 1 of 2");
  EXPECT_EQ(message(2, 3), "a message from rank 2 to rank 1 of 2");
  EXPECT_EQ(message(-1, 3), "a message from rank -1 to rank 1 of 2");
}

TEST(Matching, MovesWhatRanksExchangeInAnyOrderOfRanks) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    const int n = 2 + static_cast<int>(random() % 6);
    // Messages between two ranks, in order, some of them empty. Their bytes identify them.
    std::vector<std::vector<Outgoing>> out(static_cast<std::size_t>(n));
    std::vector<std::vector<Incoming>> in(static_cast<std::size_t>(n));
    std::vector<std::pair<Buffer, Buffer>> messages;
    messages.reserve(1000);
    for (int from = 0; from < n; ++from)
      for (int to = 0; to < n; ++to)
        for (unsigned i = random() % 4; from != to && i > 0; --i) {
          messages.emplace_back(Buffer(random() % 5, static_cast<std::byte>(messages.size())), Buffer());
          messages.back().second.resize(messages.back().first.size());
          out[static_cast<std::size_t>(from)].push_back({to, messages.back().first});
          in[static_cast<std::size_t>(to)].push_back({from, messages.back().second});
        }
    std::vector<int> order(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) order[static_cast<std::size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), random);
    Matcher<bool> matcher;
    std::vector<Matcher<bool>::Message> all;
    for (const int rank : order) {
      const auto r = static_cast<std::size_t>(rank);
      auto ends = matcher.add(rank, n, out[r], in[r]);
      ASSERT_TRUE(ends);
      for (const auto& message : ends->complete) {
        std::copy(message->from.begin(), message->from.end(), message->to.begin());
        EXPECT_FALSE(message->state);
        message->state = true;
      }
      all.insert(all.end(), ends->mine.begin(), ends->mine.end());
    }
    for (const auto& message : all) EXPECT_TRUE(message->state);
    for (const auto& [from, to] : messages) EXPECT_EQ(from, to);
  }
}

}  // namespace
}  // namespace reshard::matching_test
