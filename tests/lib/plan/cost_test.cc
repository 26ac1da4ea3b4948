#include "lib/plan/cost.h"

#include <gtest/gtest.h>

#include "tests/support/layouts.h"

namespace reshard::cost_test {
namespace {

// Returns a tensor whose shards are stored one after the other, each in a file of its own.
Tensor sharded(const std::string& name, const Dims& shape, const std::vector<Box>& boxes) {
  Tensor t;
  t.name = name;
  t.dtype = DType::kBFloat16;
  t.shape = shape;
  t.fragments = FragmentList(shape.rank());
  std::uint32_t file = 0;
  for (const Box& box : boxes) t.fragments.add(box, {file++, 0, volume(box) * 2});
  return t;
}

Catalog catalog_of(std::vector<Tensor> tensors, std::size_t files) {
  Catalog out;
  out.files.resize(files);
  for (Tensor& t : tensors) EXPECT_TRUE(out.add(std::move(t)));
  return out;
}

// Returns n equal parts along a dimension.
std::vector<Box> parts(const Dims& shape, int dim, Index n) {
  std::vector<Box> out;
  for (Index k = 0; k < n; ++k) {
    Box box = whole(shape);
    box.shape[dim] /= n;
    box.origin[dim] = k * box.shape[dim];
    out.push_back(box);
  }
  return out;
}

StrategyChoice choice_of(const Catalog& source, const Catalog& target, Index ranks, bool one_machine = false) {
  const auto plan = make_plan(source, target);
  EXPECT_TRUE(plan) << plan.error().message();
  return choose_strategy(*plan, source, ranks, one_machine);
}

const Dims kShape = {4096, 8192};  // 64 MiB
const Index kBytes = volume(Dims{4096, 8192}) * 2;

TEST(Strategy, CountsWhatTheWaysDifferIn) {
  const StrategyChoice c = choice_of(catalog_of({sharded("w", kShape, parts(kShape, 1, 8))}, 8),
                                     catalog_of({sharded("w", kShape, parts(kShape, 0, 4))}, 4), 4);
  EXPECT_EQ(c.direct.bytes_sent, 0);
  EXPECT_EQ(c.direct.reads, (8 + 32 * 8) / 4) << "a slab of 2 MiB is read in eight pieces";
  EXPECT_EQ(c.exchange.bytes_sent, kBytes / 4 * 3 / 4);
  EXPECT_EQ(c.exchange.reads, 2) << "eight files of 8 MiB over four ranks";
  EXPECT_EQ(c.exchange.opens, 2);
  EXPECT_EQ(c.exchange.total_opens, 8);
}

TEST(Strategy, CountsPiecesOfOneStoredItemOnce) {
  Tensor t = sharded("w", kShape, {});
  for (const Box& row : parts(kShape, 0, 64)) t.fragments.add(row, {0, 0, kBytes});
  const StrategyChoice c = choice_of(catalog_of({t}, 1), catalog_of({sharded("w", kShape, {whole(kShape)})}, 1), 2);
  EXPECT_EQ(c.exchange.reads, 4) << "one item of 64 MiB, read 8 MiB at a time by two ranks";
  EXPECT_EQ(c.direct.opens, 1);
  EXPECT_EQ(c.direct.total_opens, 2);
}

// Plans 64 tensors that are all spread over the same files, so that converting one opens all files.
StrategyChoice scattered(Index files, const Dims& shape, Index ranks, bool one_machine) {
  std::vector<Tensor> tensors, wanted;
  for (int i = 0; i < 64; ++i) {
    tensors.push_back(sharded("w" + std::to_string(i), shape, parts(shape, 0, files)));
    wanted.push_back(sharded("w" + std::to_string(i), shape, {whole(shape)}));
  }
  return choice_of(catalog_of(tensors, static_cast<std::size_t>(files)), catalog_of(wanted, 1), ranks, one_machine);
}

TEST(Strategy, IsExchangeWhereEveryRankWouldOpenEveryFile) {
  const StrategyChoice c = scattered(64, {4096, 64}, 8, false);
  EXPECT_EQ(c.direct.opens, 64);
  EXPECT_EQ(c.direct.total_opens, 8 * 64);
  EXPECT_EQ(c.exchange.opens, 8);
  EXPECT_EQ(c.exchange.total_opens, 64);
  EXPECT_EQ(c.strategy, Strategy::kExchange);
  EXPECT_EQ(strategy_name(c.strategy), "exchange");
  EXPECT_EQ(c.reason, "sending costs less than reading piece by piece");
}

TEST(Strategy, IsDirectWhereMuchWouldTravelToSaveFewReads) {
  const StrategyChoice c = choice_of(catalog_of({sharded("w", kShape, parts(kShape, 0, 8))}, 8),
                                     catalog_of({sharded("w", kShape, {whole(kShape)})}, 1), 4);
  EXPECT_EQ(c.strategy, Strategy::kDirect);
  EXPECT_EQ(strategy_name(c.strategy), "direct");
  EXPECT_EQ(c.reason, "every byte is read once either way, and nothing has to be sent");
  EXPECT_LT(c.direct.seconds, c.exchange.seconds);
}

TEST(Strategy, RanksOfOneMachineShareItsMemoryAndOpenFilesFast) {
  const StrategyChoice cluster = scattered(64, {16384, 64}, 8, false), machine = scattered(64, {16384, 64}, 8, true);
  EXPECT_LT(machine.direct.seconds, cluster.direct.seconds);
  EXPECT_GT(machine.exchange.seconds, cluster.exchange.seconds);
}

TEST(Strategy, OfOneRankIsDirect) {
  const StrategyChoice c = scattered(64, {4096, 64}, 1, false);
  EXPECT_EQ(c.strategy, Strategy::kDirect);
  EXPECT_EQ(c.reason, "there is only one rank");
  EXPECT_EQ(c.exchange.bytes_sent, 0);
}

TEST(Strategy, OfNothingIsDirect) { EXPECT_EQ(choice_of({}, {}, 3).strategy, Strategy::kDirect); }

TEST(Strategy, CostsAreSaidInWords) {
  EXPECT_EQ(to_string(StrategyCost{1130, 64, 512, 0, 0.3}), "0.3 s for 1,130 reads of 64 files");
  EXPECT_EQ(to_string(StrategyCost{1, 1, 1, 2'500'000'000, 1.5}), "1.5 s for 1 read of 1 file and 2.50 GB sent");
}

}  // namespace
}  // namespace reshard::cost_test
