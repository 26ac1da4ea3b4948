#include "lib/plan/cost.h"

#include <gtest/gtest.h>

#include "tests/support/layouts.h"

namespace reshard {
namespace {

// A tensor stored shard after shard, in one file each.
Tensor sharded(const std::string& name, const Dims& shape, const std::vector<Box>& boxes,
               const std::vector<Box>& copies = {}) {
  Tensor t;
  t.name = name;
  t.dtype = DType::kBFloat16;
  t.shape = shape;
  t.fragments = t.replicas = FragmentList(shape.rank());
  std::uint32_t file = 0;
  for (const Box& box : boxes) t.fragments.add(box, {file++, 0, volume(box) * 2});
  for (const Box& box : copies) t.replicas.add(box, {file++, 0, volume(box) * 2});
  return t;
}

Catalog catalog_of(std::vector<Tensor> tensors, std::size_t files) {
  Catalog out;
  out.files.resize(files);
  for (Tensor& t : tensors) EXPECT_TRUE(out.add(std::move(t)));
  return out;
}

// n equal parts along a dimension.
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

JobWork work_of(const Catalog& source, const Catalog& target, Index ranks, JobKind job) {
  const auto plan = make_plan(source, target);
  EXPECT_TRUE(plan) << plan.error().message();
  return job_work(*plan, source, target, ranks, job);
}

const Dims kShape = {4096, 8192};  // 64 MiB
const Index kBytes = volume(Dims{4096, 8192}) * 2;

TEST(JobWork, OfAConversionReadsEveryByteOnceEitherWay) {
  const JobWork work = work_of(catalog_of({sharded("w", kShape, parts(kShape, 1, 8))}, 8),
                               catalog_of({sharded("w", kShape, parts(kShape, 0, 4))}, 4), 4, JobKind::kConvert);
  EXPECT_EQ(work.ranks, 4);
  EXPECT_EQ(work.source_bytes, kBytes);
  for (const Work& w : {work.direct, work.exchange}) {
    EXPECT_EQ(w.total_bytes_read, kBytes);
    EXPECT_EQ(w.bytes_read, kBytes / 4);
    EXPECT_EQ(w.total_bytes_written, kBytes);
    EXPECT_EQ(w.bytes_written, kBytes / 4);
  }
  EXPECT_EQ(work.direct.bytes_sent + work.direct.bytes_received + work.direct.messages, 0);
  EXPECT_EQ(work.exchange.bytes_received, kBytes / 4 * 3 / 4);
  EXPECT_EQ(work.exchange.bytes_sent, work.exchange.bytes_received);
  EXPECT_EQ(work.exchange.messages, 3);
  EXPECT_EQ(work.exchange.requests, 2) << "eight files of 8 MiB over four ranks";
  EXPECT_EQ(work.exchange.opens, 2);
  EXPECT_EQ(work.exchange.total_opens, 8);
  EXPECT_EQ(work.direct.requests, (8 + 32 * 8) / 4) << "a slab of 2 MiB is read in eight pieces";
}

TEST(JobWork, OfALoadReadsNarrowColumnsWithTheirNeighbours) {
  const Catalog source = catalog_of({sharded("w", kShape, {whole(kShape)})}, 1);
  const JobWork work = work_of(source, catalog_of({sharded("w", kShape, parts(kShape, 1, 8))}, 8), 8, JobKind::kLoad);
  const Index span = kBytes - 7 * 1024 * 2;  // from the first element of a column to its last
  EXPECT_EQ(work.direct.total_bytes_read, 8 * span);
  EXPECT_EQ(work.direct.bytes_read, span);
  EXPECT_EQ(work.direct.requests, 64);
  EXPECT_EQ(work.direct.opens, 1);
  EXPECT_EQ(work.direct.total_opens, 8);
  EXPECT_EQ(work.direct.total_bytes_written, 0);
  EXPECT_EQ(work.exchange.total_bytes_read, kBytes);
  EXPECT_EQ(work.exchange.bytes_received, kBytes / 8 * 7 / 8);
}

TEST(JobWork, OfALoadReadsReplicasAgain) {
  const Catalog source = catalog_of({sharded("w", kShape, {whole(kShape)})}, 1);
  const auto half = parts(kShape, 0, 2);
  const Catalog target = catalog_of({sharded("w", kShape, half, {half[0], half[1], half[0], half[1]})}, 6);
  const JobWork work = work_of(source, target, 6, JobKind::kLoad);
  EXPECT_EQ(work.source_bytes, kBytes);
  EXPECT_EQ(work.direct.total_bytes_read, 3 * kBytes);
  EXPECT_EQ(work.exchange.total_bytes_read, kBytes);
  EXPECT_EQ(work.exchange.bytes_received, kBytes / 2 - ceil_div(kBytes / 2, 6));
}

TEST(JobWork, OfLayersIsThatOfOneTimesTheirNumber) {
  const auto model = [](Index layers, bool is_target) {
    std::vector<Tensor> tensors;
    for (Index i = 0; i < layers; ++i) {
      const std::string layer = "layers." + std::to_string(i);
      tensors.push_back(sharded(layer + ".up", kShape, parts(kShape, is_target ? 1 : 0, 4)));
      tensors.push_back(sharded(layer + ".down", kShape, parts(kShape, is_target ? 0 : 1, 8)));
    }
    return catalog_of(std::move(tensors), 8);
  };
  const JobWork one = work_of(model(1, false), model(1, true), 1, JobKind::kLoad);
  const JobWork nine = work_of(model(9, false), model(9, true), 1, JobKind::kLoad);
  EXPECT_EQ(nine.direct.total_bytes_read, 9 * one.direct.total_bytes_read);
  EXPECT_EQ(nine.direct.requests, 9 * one.direct.requests);
  EXPECT_EQ(nine.source_bytes, 9 * one.source_bytes);
}

TEST(JobWork, OfPiecesOfOneStoredItemCountsTheItemOnce) {
  Tensor t = sharded("w", kShape, {});
  for (const Box& row : parts(kShape, 0, 64)) t.fragments.add(row, {0, 0, kBytes});
  const JobWork work =
      work_of(catalog_of({t}, 1), catalog_of({sharded("w", kShape, {whole(kShape)})}, 1), 2, JobKind::kConvert);
  EXPECT_EQ(work.exchange.requests, 4) << "one item of 64 MiB, read 8 MiB at a time by two ranks";
  EXPECT_EQ(work.direct.opens, 1);
  EXPECT_EQ(work.direct.total_opens, 2);
}

TEST(JobWork, OfManySmallShardsOpensManyFilesADirectRank) {
  // 64 tensors, each over the same 64 files: whoever converts one of them opens all files.
  std::vector<Tensor> tensors, wanted;
  for (int i = 0; i < 64; ++i) {
    tensors.push_back(sharded("w" + std::to_string(i), {4096, 64}, parts({4096, 64}, 0, 64)));
    wanted.push_back(sharded("w" + std::to_string(i), {4096, 64}, {whole({4096, 64})}));
  }
  const JobWork work = work_of(catalog_of(tensors, 64), catalog_of(wanted, 1), 8, JobKind::kConvert);
  EXPECT_EQ(work.direct.opens, 64);
  EXPECT_EQ(work.direct.total_opens, 8 * 64);
  EXPECT_EQ(work.exchange.opens, 8);
  EXPECT_EQ(work.exchange.total_opens, 64);
}

TEST(JobWork, OfNothingIsNothing) {
  const JobWork work = work_of(catalog_of({}, 0), catalog_of({}, 0), 3, JobKind::kConvert);
  EXPECT_EQ(work.direct.total_bytes_read, 0);
  EXPECT_EQ(work.exchange.bytes_sent, 0);
  EXPECT_EQ(choose(work).strategy, Strategy::kDirect);
}

TEST(Cost, IsBytesOverBandwidthsAndCountsTimesLatencies) {
  CostParameters p;
  p.rank_read = 2e9;
  p.file_system = 10e9;
  p.request = 1e-3;
  p.open = 1e-2;
  p.file_system_opens = 1000;
  p.network = 5e9;
  p.message = 1e-3;
  p.copy = 10e9;
  p.rank_write = 1e9;
  Work w;
  w.bytes_read = 4'000'000'000;
  w.total_bytes_read = 8'000'000'000;
  w.requests = 100;
  w.opens = 10;
  w.total_opens = 20;
  w.bytes_sent = 1'000'000'000;
  w.bytes_received = 5'000'000'000;
  w.messages = 7;
  w.bytes_written = 3'000'000'000;
  w.total_bytes_written = 6'000'000'000;
  const Estimate e = estimate(w, p);
  EXPECT_DOUBLE_EQ(e.read, 2 + 0.1 + 0.1);
  EXPECT_DOUBLE_EQ(e.traffic, 1 + 0.007);
  EXPECT_DOUBLE_EQ(e.copies, 0.6);
  EXPECT_DOUBLE_EQ(e.write, 3);
  EXPECT_DOUBLE_EQ(e.seconds(), 2.2 + 1.007 + 0.6 + 3);
  EXPECT_DOUBLE_EQ(e.slowest(), 3);
  EXPECT_EQ(to_string(e), "6.8 s (read 2.2 s, traffic 1.0 s, copies 0.6 s, write 3.0 s)");

  w.total_bytes_read = 80'000'000'000;  // now the file system is what everybody waits for
  w.total_opens = 500;
  w.total_bytes_written = 60'000'000'000;
  EXPECT_DOUBLE_EQ(estimate(w, p).read, 8 + 0.1 + 0.5);
  EXPECT_DOUBLE_EQ(estimate(w, p).write, 6);
}

// What a model sharded in both ways costs; `copies` is how often the load's ranks hold each byte.
JobWork load_of(Index ranks, Index bytes, Index copies) {
  JobWork work{ranks, bytes, {}, {}};
  work.direct.total_bytes_read = bytes * copies;
  work.direct.bytes_read = bytes * copies / ranks;
  work.exchange.total_bytes_read = bytes;
  work.exchange.bytes_read = bytes / ranks;
  work.exchange.bytes_sent = work.exchange.bytes_received = bytes * copies / ranks * (ranks - 1) / ranks;
  work.exchange.messages = ranks - 1;
  return work;
}

TEST(Cost, ChoosesDirectWhereNothingIsReadTwice) {
  const Choice choice = choose(load_of(64, 141'000'000'000, 1));
  EXPECT_EQ(choice.strategy, Strategy::kDirect);
  EXPECT_EQ(strategy_name(choice.strategy), "direct");
  EXPECT_EQ(choice.reason, "every byte is read once either way, and nothing has to travel");
  EXPECT_LT(choice.direct.seconds(), choice.exchange.seconds());
}

TEST(Cost, ChoosesExchangeWhereReplicasWouldReadTheFileSystemDry) {
  const Choice choice = choose(load_of(1024, 810'000'000'000, 128));
  EXPECT_EQ(choice.strategy, Strategy::kExchange);
  EXPECT_EQ(strategy_name(choice.strategy), "exchange");
  EXPECT_EQ(choice.reason,
            "direct reads every byte 128.0 times: 43 m 12 s of reading, where exchange reads for 20.2 s and "
            "sends for 33.7 s");
}

TEST(Cost, ChoosesDirectWhereTheNetworkIsSlowerThanReadingTwice) {
  CostParameters slow;
  slow.network = 1e8;
  const Choice choice = choose(load_of(16, 141'000'000'000, 2), slow);
  EXPECT_EQ(choice.strategy, Strategy::kDirect);
  EXPECT_TRUE(choice.reason.starts_with("direct reads every byte 2.0 times, but exchanging costs more: "))
      << choice.reason;
}

TEST(Cost, ChoosesExchangeWhereEveryRankWouldOpenEveryFile) {
  JobWork work = load_of(1024, 810'000'000'000, 1);
  work.direct.opens = 16'384;
  work.direct.total_opens = 1024 * 16'384;
  work.exchange.opens = 16;
  work.exchange.total_opens = 16'384;
  const Choice choice = choose(work);
  EXPECT_EQ(choice.strategy, Strategy::kExchange);
  EXPECT_TRUE(choice.reason.starts_with("direct takes 0 reads and opens 16,384 files a rank: ")) << choice.reason;
}

TEST(Cost, OfOneRankIsDirect) {
  const Choice choice = choose(load_of(1, 141'000'000'000, 8));
  EXPECT_EQ(choice.strategy, Strategy::kDirect);
  EXPECT_EQ(choice.reason, "one rank has nobody to exchange with");
}

TEST(Cost, OnOneMachineRanksShareTheDiskAndTheMemory) {
  const JobWork convert = load_of(2, 3'000'000'000, 1);
  const CostParameters machine = CostParameters::one_machine(2);
  EXPECT_EQ(choose(convert, machine).strategy, Strategy::kDirect);
  EXPECT_DOUBLE_EQ(estimate(convert.direct, machine).read, 1.0) << "one disk, however many ranks";
}

}  // namespace
}  // namespace reshard
