#include "lib/plan/overlay.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/support/layouts.h"

namespace reshard {
namespace {

TEST(SubMesh, NumbersTheRanksThatDifferAlongItsAxes) {
  const Mesh mesh = *Mesh::parse("pp=2,dp_shard=3,tp=4");
  const SubMesh dp(mesh, {"dp_shard"});
  EXPECT_EQ(dp.count(), 3);
  EXPECT_EQ(dp.rank(2), 8);
  EXPECT_EQ(dp.number(12 + 8 + 3), 2);
  const SubMesh both(mesh, {"tp", "pp"});  // pp the fastest
  EXPECT_EQ(both.count(), 8);
  EXPECT_EQ(both.rank(1), 12);
  EXPECT_EQ(both.rank(6), 3);
  EXPECT_EQ(both.number(12 + 8 + 3), 7);
  EXPECT_EQ(SubMesh(mesh, {"cp"}).count(), 1);
  EXPECT_EQ(SubMesh().rank(0), 0);
  EXPECT_EQ(SubMesh().number(17), 0);
}

TEST(SubMesh, RankAndNumberAreInverse) {
  Rng rng(51);
  for (int n = 0; n < 200; ++n) {
    const Mesh mesh = random_mesh(rng);
    std::vector<std::string> axes;
    for (const MeshAxis& axis : mesh.axes())
      if (below(rng, 2) == 0) axes.push_back(axis.name);
    std::shuffle(axes.begin(), axes.end(), rng);
    const SubMesh sub(mesh, axes);
    for (Index k = 0; k < sub.count(); ++k) {
      ASSERT_EQ(sub.number(sub.rank(k)), k);
      for (const MeshAxis& axis : mesh.axes())
        if (std::find(axes.begin(), axes.end(), axis.name) == axes.end()) {
          ASSERT_EQ(mesh.coordinate(sub.rank(k), axis.name), 0);
        }
    }
  }
}

TEST(Cuts, OfFsdpOverTensorParallelismAreStrided) {
  const Mesh mesh = *Mesh::parse("dp_shard=2,tp=2");
  const std::vector<Cut> cuts = cuts_of(mesh, {{{"tp"}, 0}, {{"dp_shard"}, 0}}, 8);
  ASSERT_EQ(cuts.size(), 4u);
  const Index ranks[] = {0, 2, 1, 3};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(cuts[i].begin, static_cast<Index>(2 * i));
    EXPECT_EQ(cuts[i].end, static_cast<Index>(2 * i + 2));
    EXPECT_EQ(cuts[i].part, static_cast<Index>(i));
    EXPECT_EQ(cuts[i].add, ranks[i]);
    EXPECT_EQ(cuts[i].at, 0);
  }
}

TEST(Cuts, OfSectionsStandBehindEachOtherInTheLocalTensor) {
  const std::vector<Cut> cuts = cuts_of(*Mesh::parse("tp=2"), {{{"tp"}, 1, 3}}, 12);
  ASSERT_EQ(cuts.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(cuts[i].part, static_cast<Index>(i % 2));
    EXPECT_EQ(cuts[i].at, static_cast<Index>(i / 2 * 2));
  }
}

TEST(Cuts, LeaveOutRanksThatHoldNothing) {
  const std::vector<Cut> cuts = cuts_of(*Mesh::parse("dp_shard=8"), {{{"dp_shard"}, 0}}, 5);
  EXPECT_EQ(cuts.size(), 5u);
  EXPECT_TRUE(cuts_of(*Mesh::parse("dp_shard=8"), {{{"dp_shard"}, 0}}, 0).empty());
  EXPECT_EQ(cuts_of(Mesh(), {}, 7).size(), 1u);
}

// Random cuts of [0, extent) by a few holders.
std::vector<Cut> random_cuts(Rng& rng, Index extent, Index parts) {
  std::vector<Cut> cuts;
  std::map<Index, Index> held;
  for (Index begin = 0; begin < extent;) {
    const Index end = std::min(extent, begin + 1 + below(rng, 9)), part = below(rng, parts);
    cuts.push_back({begin, end, held[part], part, 100 * part});
    held[part] += end - begin;
    begin = end;
  }
  return cuts;
}

// The cut that holds an index.
const Cut& holder(const std::vector<Cut>& cuts, Index i) {
  return *std::find_if(cuts.begin(), cuts.end(), [&](const Cut& c) { return i < c.end; });
}

TEST(Overlay, SaysOfEveryIndexWhoHoldsItAndWhere) {
  Rng rng(52);
  for (int n = 0; n < 300; ++n) {
    const Index extent = below(rng, 80);
    const std::vector<Cut> source = random_cuts(rng, extent, 6), target = random_cuts(rng, extent, 5);
    const auto overlay = Overlay::make(source, target);
    ASSERT_TRUE(overlay) << overlay.error().message();
    Index seen = 0, given = 0;
    for (Index part = 0; part < 7; ++part) {
      Index last = -1;
      for (const Overlap& o : overlay->into(part)) {
        ASSERT_GT(o.begin, last);
        last = o.begin;
        for (Index i = o.begin; i < o.end; ++i, ++seen) {
          const Cut &from = holder(source, i), &to = holder(target, i);
          ASSERT_EQ(to.part, part);
          ASSERT_EQ(from.add, o.from_add);
          ASSERT_EQ(to.add, o.to_add);
          ASSERT_EQ(from.at + i - from.begin, o.from_at + i - o.begin);
          ASSERT_EQ(to.at + i - to.begin, o.to_at + i - o.begin);
        }
      }
      for (const Overlap& o : overlay->out_of(part)) {
        ASSERT_EQ(holder(source, o.begin).part, part);
        given += o.end - o.begin;
      }
    }
    ASSERT_EQ(seen, extent);
    ASSERT_EQ(given, extent);
  }
}

TEST(Overlay, CountsTheOverlapsOfASourceCut) {
  const auto overlay = Overlay::make({{0, 6, 0, 0, 0}, {6, 8, 0, 1, 1}},
                                     {{0, 1, 0, 0, 0}, {1, 4, 0, 1, 1}, {4, 7, 0, 2, 2}, {7, 8, 0, 3, 3}});
  ASSERT_TRUE(overlay);
  std::vector<std::pair<Index, Index>> turns;
  for (const Index part : {0, 1})
    for (const Overlap& o : overlay->out_of(part)) turns.emplace_back(o.turn, o.turns);
  EXPECT_EQ(turns, (std::vector<std::pair<Index, Index>>{{0, 3}, {1, 3}, {2, 3}, {0, 2}, {1, 2}}));
}

TEST(Overlay, RefusesCutsThatCoverADimensionTwiceOrNot) {
  const std::vector<Cut> whole = {{0, 8, 0, 0, 0}};
  const auto message = [&](const std::vector<Cut>& source, const std::vector<Cut>& target) {
    const auto overlay = Overlay::make(source, target);
    return overlay ? "fine" : overlay.error().message();
  };
  EXPECT_EQ(message(whole, {{0, 4, 0, 0, 0}, {5, 8, 0, 1, 1}}),
            "plan: dimension of 8: expected a cut from 4 on, got 5 to 8");
  EXPECT_EQ(message({{0, 4, 0, 0, 0}, {3, 8, 0, 1, 1}}, whole),
            "plan: dimension of 8: expected a cut from 4 on, got 3 to 8");
  EXPECT_EQ(message(whole, {{0, 4, 0, 0, 0}}), "plan: expected cuts of a dimension of 8, got 4");
  EXPECT_EQ(message({}, whole), "plan: expected cuts of a dimension of 0, got 8");
  EXPECT_EQ(message({}, {}), "fine");
}

}  // namespace
}  // namespace reshard
