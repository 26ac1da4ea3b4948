// Tests several ranks as threads of one process: for any number and strategy, the output is that of one process, byte
// for byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "formats/open.h"
#include "lib/audit/comparison.h"
#include "lib/audit/values.h"
#include "lib/base/memory_limit.h"
#include "lib/convert/conversion.h"
#include "lib/engine/exchange.h"
#include "lib/transport/collectives.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_ranks.h"
#include "tests/support/local_ranks.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::convert_ranks_test {
namespace {

struct Request {
  std::string to = "hf";
  std::string mesh = "";
  std::optional<DType> dtype = std::nullopt;
  Index memory = Index{1} << 30;
  int threads = 2;
  Strategy strategy = Strategy::kDirect;
  Device* device = nullptr;
  Transport* data = nullptr;
  Compression compression = {};
};

Status convert_one(const std::string& from, const std::string& into, const Request& job, Transport* ranks,
                   Conversion::Outcome* outcome = nullptr) {
  const Format* format = TRY(find_format(job.to));
  auto source = TRY(open_checkpoint(from));
  ConversionOptions o;
  o.source_path = "the source";  // for the manifest
  o.config_path = *path_exists(parent_path(from) + "/config.json") ? parent_path(from) + "/config.json" : "";
  if (!job.mesh.empty()) o.placement.mesh = TRY(Mesh::parse(job.mesh));
  o.typing.dtype = job.dtype;
  o.compression = job.compression;
  o.run.memory = job.memory;
  o.run.threads = job.threads;
  o.run.ranks = ranks;
  o.run.strategy = job.strategy;
  o.run.device = job.device;
  if (job.data) o.run.data = [data = job.data]() -> Result<Transport*> { return data; };
  auto conversion = TRY(Conversion::prepare(*source.reader, *format, std::move(o)));
  auto done = TRY(conversion->run({into}));
  if (outcome && rank_of(ranks) == 0) *outcome = done;
  return {};
}

Status convert_on(int n, const std::string& from, const std::string& into, const Request& job,
                  Conversion::Outcome* outcome = nullptr) {
  return run_local_ranks(n, [&](Transport& ranks) { return convert_one(from, into, job, &ranks, outcome); });
}

// Runs the same job on the devices of `n` ranks. Elements are sent between the devices or between the hosts.
Status on_devices(int n, RankDevice kind, const Request& job, bool between_devices,
                  const std::function<Status(Transport& ranks, const Request& job)>& convert) {
  return run_device_ranks(n, kind, [&](Transport& ranks, Transport& data, Device& device) {
    Request mine = job;
    mine.device = &device;
    if (between_devices) mine.data = &data;
    return convert(ranks, mine);
  });
}

// Checkpoints among the samples.
class Ranks : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Samples, Ranks,
                         testing::Values("tp8/checkpoint", "fsdp8/checkpoint", "fsdp16/checkpoint",
                                         "hsdp2x4/checkpoint", "fsdp4_tp2/checkpoint", "fsdp2_tp2_optim/checkpoint",
                                         "pp2_tp4/checkpoint", "single/checkpoint",
                                         "colossalai/healthy_st/epoch-0_step-7", "colossalai/pp2_bin",
                                         "colossalai/unsharded_tied.bin", "fsdp4_tp2/hf.safetensors"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                           return name;
                         });

TEST_P(Ranks, WriteWhatOneProcessWrites) {
  const TempDir dir;
  const std::string source = sample(GetParam());
  int made = 0;
  for (const Request& job : {Request{.to = "hf"}, Request{.to = "dcp", .mesh = "tp=2,dp_shard=3"},
                             Request{.to = "hf", .dtype = DType::kFloat16}, Request{.to = "hdf5"}}) {
    const std::string alone = dir / ("alone" + std::to_string(made));
    Conversion::Outcome one;
    ASSERT_TRUE(convert_one(source, alone, job, nullptr, &one));
    const auto read = [&](const std::string& path) {
      return *is_directory(path) ? all_files(path) : std::map<std::string, std::string>{{"", read_file(path)}};
    };
    const auto expected = read(alone);
    for (const Strategy strategy : {Strategy::kDirect, Strategy::kExchange})
      for (const int n : every_nth(2) == 1 ? std::vector<int>{1, 2, 3, 4, 7} : std::vector<int>{3, 7}) {
        if (n != 3 && (job.dtype || job.to == "hdf5")) continue;
        const std::string out = dir / ("out" + std::to_string(made++));
        Request with = job;
        with.strategy = strategy;
        Conversion::Outcome outcome;
        const Status status = convert_on(n, source, out, with, &outcome);
        ASSERT_TRUE(status) << status.error().message();
        EXPECT_TRUE(read(out) == expected)
            << job.to << " " << strategy_name(strategy) << " on " << n << " ranks differs";
        // A storage that two tensors share may be read, and summed, by two ranks.
        const Index again = source.ends_with("unsharded_tied.bin") ? 1 : 0;
        EXPECT_GE(outcome.checksums, one.checksums) << job.to << " " << strategy_name(strategy) << " on " << n;
        EXPECT_LE(outcome.checksums, one.checksums + again) << job.to << " " << strategy_name(strategy) << " on " << n;
      }
  }
}

// Tensors that are large enough for many slabs and steps, cut in rows and columns, with little memory.
class ManySlabs : public testing::Test {
 protected:
  ManySlabs() {
    std::mt19937 random(7);
    const auto add = [&](const std::string& name, const Dims& shape) {
      std::string bytes(static_cast<std::size_t>(volume(shape) * 2), '\0');
      for (std::size_t i = 0; i < bytes.size(); i += 4) {
        const auto v = static_cast<std::uint32_t>(random());
        std::memcpy(bytes.data() + i, &v, std::min<std::size_t>(4, bytes.size() - i));
      }
      tensors_[name] = {DType::kInt16, shape, bytes};
    };
    add("a.weight", {1021, 2048});
    add("b.weight", {4096, 509});
    add("c.bias", {5});
    add("d.weight", {3, 257, 1000});
    add("e.scalar", {});
    write_dcp(tensors_, dir_ / "rows", *Mesh::parse("dp_shard=5"));
  }
  TempDir dir_;
  TensorValues tensors_;
};

TEST_F(ManySlabs, ArriveWholeInLittleMemory) {
  int made = 0;
  ASSERT_TRUE(convert_one(dir_ / "rows", dir_ / "alone", {.to = "dcp", .mesh = "tp=3"}, nullptr));
  const auto expected = all_files(dir_ / "alone");
  for (const Strategy strategy : {Strategy::kDirect, Strategy::kExchange})
    for (const int n : {2, 3, 7})
      for (const int threads : {1, 3}) {
        const std::string out = dir_ / ("out" + std::to_string(made++));
        // The process contains `n` ranks with different limits; they agree on one.
        Request job{.to = "dcp", .mesh = "tp=3", .threads = threads, .strategy = strategy};
        const auto convert = [&](Transport& ranks, Request mine) {
          mine.memory += ranks.rank() * (Index{3} << 20);
          return convert_one(dir_ / "rows", out, mine, &ranks);
        };
        const Status status = threads == 3 ? on_devices(n, RankDevice::kSplit, job, true, convert)
                                           : run_local_ranks(n, [&](Transport& ranks) { return convert(ranks, job); });
        ASSERT_TRUE(status) << status.error().message();
        EXPECT_TRUE(all_files(out) == expected) << strategy_name(strategy) << " on " << n << " ranks";
      }
  EXPECT_TRUE(load_checkpoint(dir_ / "out0") == tensors_);
}

// Each rank writes a part of every file, and most read nothing of most tensors.
TEST_F(ManySlabs, AreWrittenByAThousandRanks) {
  const int n = in_soak() ? 1024 : 96;
  Request job{.to = "dcp", .mesh = "tp=8,dp_shard=" + std::to_string(n / 8), .memory = Index{1} << 40, .threads = 1};
  ASSERT_TRUE(convert_one(dir_ / "rows", dir_ / "alone", job, nullptr));
  const auto expected = all_files(dir_ / "alone");
  EXPECT_GT(std::ssize(expected), n);
  EXPECT_TRUE(load_checkpoint(dir_ / "alone") == tensors_);
  for (const Strategy strategy : {Strategy::kDirect, Strategy::kExchange}) {
    job.strategy = strategy;
    const std::string out = dir_ / std::string(strategy_name(strategy));
    const Status status = convert_on(n, dir_ / "rows", out, job);
    ASSERT_TRUE(status) << status.error().message();
    EXPECT_TRUE(all_files(out) == expected) << strategy_name(strategy);
  }
}

// Uses elements in memory that the host does not see: a GPU's or a stand-in's.
void expect_same_on_devices(const std::string& name, const std::vector<int>& ranks, RankDevice kind) {
  const TempDir dir;
  const std::string source = sample(name);
  const int step = every_nth(2);
  int made = 0, n_cases = static_cast<int>(name.size());  // other cases for each sample
  for (const Request& job : {Request{.to = "hf"}, Request{.to = "dcp", .mesh = "tp=2,dp_shard=3"},
                             Request{.to = "hf", .dtype = DType::kFloat16}}) {
    const std::string alone = dir / ("alone" + std::to_string(made));
    ASSERT_TRUE(convert_one(source, alone, job, nullptr));
    const auto expected = all_files(alone);
    for (const bool between_devices : {false, true})
      for (const int n : ranks) {
        if (n_cases++ % step != 0) continue;
        Request with = job;
        with.strategy = Strategy::kExchange;
        // A stand-in fills all that it allocates. A sanitizer's memory counts too, and grows with each test.
        if (kind == RankDevice::kSplit) with.memory = held_bytes() + (Index{128} << 20);
        const std::string out = dir / ("out" + std::to_string(made++));
        const Status status = on_devices(n, kind, with, between_devices, [&](Transport& control, const Request& mine) {
          return convert_one(source, out, mine, &control);
        });
        ASSERT_TRUE(status) << status.error().message();
        EXPECT_TRUE(all_files(out) == expected) << job.to << " on " << n << " ranks, " << between_devices;
      }
  }
}

TEST_P(Ranks, WorkOnADeviceAsOnTheHost) { expect_same_on_devices(GetParam(), {1, 3}, RankDevice::kSplit); }

TEST_P(Ranks, WorkOnAGpuAsOnTheHost) {
  if (const std::string why = why_no_gpu_ranks(); !why.empty()) GTEST_SKIP() << why;
  expect_same_on_devices(GetParam(), {2, 4, 8}, RankDevice::kGpu);
}

// A source that counts the bytes read from it.
class CountingSource : public TensorSource {
 public:
  CountingSource(TensorSource& inner, std::atomic<Index>& elements) : inner_(inner), elements_(elements) {}
  const Catalog& catalog() const override { return inner_.catalog(); }
  std::vector<StoredPiece> pieces(std::size_t tensor, const Box& box) override { return inner_.pieces(tensor, box); }
  Status read_pieces(std::size_t tensor, const Box& box, const PieceFilter& wanted, MutableBytes out,
                     MutableBytes scratch) override {
    for (const StoredPiece& part : inner_.pieces(tensor, box))
      if (!wanted || wanted(part)) elements_ += volume(part.box);
    return inner_.read_pieces(tensor, box, wanted, out, scratch);
  }
  Status finish(MutableBytes scratch, Transport* ranks) override { return inner_.finish(scratch, ranks); }
  Index columns(std::size_t tensor) const override { return inner_.columns(tensor); }

 private:
  TensorSource& inner_;
  std::atomic<Index>& elements_;
};

// A transport that counts how many messages it has for one peer in one transfer.
class CountingTransport : public Transport {
 public:
  explicit CountingTransport(Transport& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  bool stopped() const override { return inner_.stopped(); }
  Result<std::unique_ptr<Transfer>> start(std::vector<Outgoing> out, std::vector<Incoming> in) override {
    count(out);
    count(in);
    return inner_.start(std::move(out), std::move(in));
  }
  int all() const { return all_; }
  int most() const { return most_; }

 private:
  void count(const auto& messages) {
    std::map<int, int> of_peer;
    for (const auto& message : messages) {
      ++all_;
      most_ = std::max(most_, ++of_peer[message.peer]);
    }
  }
  Transport& inner_;
  int all_ = 0, most_ = 0;
};

TEST_F(ManySlabs, GoToARankInOneMessageAtATime) {
  const Request job{.to = "dcp", .mesh = "tp=3", .threads = 1, .strategy = Strategy::kExchange};
  const Status status = run_local_ranks(3, [&](Transport& ranks) -> Status {
    CountingTransport data(ranks);
    Request mine = job;
    mine.data = &data;
    TRY(convert_one(dir_ / "rows", dir_ / "out", mine, &ranks));
    EXPECT_GT(data.all(), 0);
    EXPECT_EQ(data.most(), 1);
    return {};
  });
  EXPECT_TRUE(status) << status.error().message();
}

TEST_F(ManySlabs, AreReadOnceInTheWholeJob) {
  for (const Strategy strategy : {Strategy::kDirect, Strategy::kExchange}) {
    std::atomic<Index> read{0};
    std::mutex mutex;
    std::vector<Index> by_rank;
    const int n = 4;
    std::vector<std::vector<TensorProof>> proofs;
    const Status status = run_local_ranks(n, [&](Transport& ranks) -> Status {
      auto open = TRY(open_checkpoint(dir_ / "rows"));
      Catalog& catalog = open.reader->catalog();
      std::vector<std::size_t> all(catalog.tensors().size());
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
      TRY(open.reader->locate(all, 1, dir_ / ""));
      FileSource files(catalog, open.reader->files());
      std::atomic<Index> mine{0};
      CountingSource source(files, mine);
      std::vector<DigestRequest> requests;
      for (const std::size_t i : all) requests.push_back({i, catalog.tensors()[i].dtype});
      RunOptions run;
      run.memory = Index{1} << 30;
      run.threads = 2;
      run.ranks = &ranks;
      run.strategy = strategy;
      const auto digests = TRY(digest_tensors(requests, source, run));
      const std::lock_guard lock(mutex);
      read += mine;
      by_rank.push_back(mine);
      proofs.push_back(digests);
      return {};
    });
    ASSERT_TRUE(status) << status.error().message();
    Index elements = 0;
    for (const auto& [name, value] : tensors_) elements += volume(value.shape);
    EXPECT_EQ(read, elements) << strategy_name(strategy);
    // No rank reads more than a fourth of the elements and a slab.
    EXPECT_LE(*std::max_element(by_rank.begin(), by_rank.end()), elements / n + (1 << 19)) << strategy_name(strategy);
    for (const auto& p : proofs)
      for (std::size_t i = 0; i < p.size(); ++i) EXPECT_EQ(p[i].target, proofs[0][i].target);
  }
}

TEST(SlabList, SharesAreEqualButForASlab) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    Catalog catalog;
    std::vector<WalkItem> items;
    const int tensors = 1 + static_cast<int>(random() % 12);
    for (int i = 0; i < tensors; ++i) {
      Tensor t;
      t.name = "t" + std::to_string(i);
      t.shape = {static_cast<Index>(random() % 300), static_cast<Index>(1 + random() % 3000)};
      if (random() % 8 == 0) t.shape = {};
      ASSERT_TRUE(catalog.add(std::move(t)));
      items.push_back({static_cast<std::size_t>(i)});
    }
    const Index slab = Index{1} << (14 + random() % 6);
    const SlabList list(items, catalog, slab, slab);
    const int n = 1 + static_cast<int>(random() % 9);
    for (const bool whole_tensors : {false, true}) {
      const std::vector<Index> shares = list.shares(n, whole_tensors);
      ASSERT_EQ(static_cast<int>(shares.size()), n + 1);
      EXPECT_EQ(shares.front(), 0);
      EXPECT_EQ(shares.back(), list.total());
      Index total = 0, largest_tensor = 0;
      for (const Tensor& t : catalog.tensors()) {
        total += t.bytes();
        largest_tensor = std::max(largest_tensor, t.bytes());
      }
      std::set<std::size_t> seen;
      for (int r = 0; r < n; ++r) {
        Index bytes = 0;
        std::set<std::size_t> mine;
        ASSERT_LE(shares[static_cast<std::size_t>(r)], shares[static_cast<std::size_t>(r) + 1]);
        for (Index k = shares[static_cast<std::size_t>(r)]; k < shares[static_cast<std::size_t>(r) + 1]; ++k) {
          const WalkSlab s = list.get(k);
          bytes += volume(s.box) * byte_size(catalog.tensors()[s.item].dtype);
          mine.insert(s.item);
        }
        const Index unit = whole_tensors ? largest_tensor : list.largest();
        EXPECT_LE(std::abs(bytes - total / n), unit + n) << "rank " << r << " of " << n;
        for (const std::size_t i : mine)
          EXPECT_TRUE(seen.insert(i).second || !whole_tensors) << "two ranks share a tensor";
      }
    }
  }
}

TEST_F(ManySlabs, HealthAndDistancesAreThoseOfOneProcess) {
  ASSERT_TRUE(
      convert_one(sample("tp8") + "/checkpoint", dir_ / "half", {.to = "hf", .dtype = DType::kFloat16}, nullptr));
  const auto look = [&](Transport* ranks, std::vector<TensorHealth>& health,
                        std::vector<Comparison::Distance>& distances, Index& checksums) -> Status {
    RunOptions run;
    run.memory = Index{1} << 30;
    run.threads = 2;
    run.ranks = ranks;
    for (const char* path : {"rows", "half"}) {
      auto open = TRY(open_checkpoint(dir_ / path));
      std::vector<std::size_t> all(open.reader->catalog().tensors().size());
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
      TRY(open.reader->locate(all, 1, dir_ / ""));
      const auto report = TRY(check_values(open.reader->catalog(), open.reader->files(), {.exponents = true}, run));
      for (const ValueRow& row : report.tensors) health.push_back(row.health);
      if (rank_of(ranks) == 0) checksums += report.checksums_checked;
    }
    auto a = TRY(open_checkpoint(sample("tp8") + "/checkpoint")), b = TRY(open_checkpoint(dir_ / "half"));
    ComparisonOptions options;
    options.config = sample("tp8") + "/config.json";
    options.spool = dir_ / "";
    options.run = run;
    auto comparison = TRY(Comparison::prepare(*a.reader, *b.reader, options));
    distances = TRY(comparison->distances());
    return {};
  };
  std::vector<TensorHealth> health;
  std::vector<Comparison::Distance> distances;
  Index checksums = 0;
  ASSERT_TRUE(look(nullptr, health, distances, checksums));
  EXPECT_GT(checksums, 0);
  EXPECT_TRUE(std::any_of(health.begin(), health.end(), [](const auto& h) { return h.exponents.counts.size() > 1; }));
  for (const int n : {2, 3, 7}) {
    const Status status = run_local_ranks(n, [&](Transport& ranks) -> Status {
      std::vector<TensorHealth> mine;
      std::vector<Comparison::Distance> far;
      Index sums = 0;
      TRY(look(&ranks, mine, far, sums));
      EXPECT_TRUE(mine == health) << "rank " << ranks.rank() << " of " << n;
      EXPECT_EQ(far.size(), distances.size());
      for (std::size_t i = 0; i < far.size(); ++i) {
        EXPECT_EQ(far[i].different, distances[i].different);
        EXPECT_EQ(far[i].max_abs, distances[i].max_abs);
        EXPECT_NEAR(far[i].relative_l2, distances[i].relative_l2, 1e-12);
      }
      EXPECT_EQ(sums, ranks.rank() == 0 ? checksums : 0);
      return {};
    });
    ASSERT_TRUE(status) << status.error().message();
  }
}

TEST_F(ManySlabs, AFailingRankLeavesNothing) {
  for (const Strategy strategy : {Strategy::kDirect, Strategy::kExchange})
    for (int failing = 0; failing < 3; ++failing) {
      int failed = -1;
      const std::string out = dir_ / "never";
      const Status status = run_local_ranks(
          3,
          [&](Transport& ranks) -> Status {
            Request job{.to = "dcp", .mesh = "tp=3", .strategy = strategy};
            if (ranks.rank() == failing) job.memory = 1 << 20;  // cannot fit
            return convert_one(dir_ / "rows", out, job, &ranks);
          },
          &failed);
      ASSERT_FALSE(status);
      EXPECT_EQ(status.error().code(), ErrorCode::kUsage) << status.error().message();
      EXPECT_EQ(failed, failing);
      EXPECT_FALSE(*path_exists(out));
      EXPECT_FALSE(*path_exists(out + ".partial"));
    }
}

TEST_F(ManySlabs, RanksThatSeeOtherFilesAreFoundOut) {
  write_dcp(tensors_, dir_ / "other", *Mesh::parse("dp_shard=4"));
  const Status status = run_local_ranks(2, [&](Transport& ranks) {
    return convert_one(dir_ / (ranks.rank() == 0 ? "rows" : "other"), dir_ / "never", {.to = "dcp"}, &ranks);
  });
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message().find("the plans of the ranks differ"), std::string::npos);
}

// Chunks of ranks other than the first, which compression does not make smaller, wait in a file.
TEST_F(ManySlabs, ACompressedFileIsThatOfOneProcess) {
  Request job{.to = "hdf5"};
  job.compression.zstd_level = 1;
  ASSERT_TRUE(convert_one(dir_ / "rows", dir_ / "alone.h5", job, nullptr));
  const std::string expected = read_file(dir_ / "alone.h5");
  EXPECT_EQ(load_checkpoint(dir_ / "alone.h5"), tensors_);
  int made = 0;
  for (const Strategy strategy : {Strategy::kDirect, Strategy::kExchange})
    for (const int n : {1, 2, 3, 7}) {
      const std::string out = dir_ / (std::to_string(made++) + ".h5");
      job.strategy = strategy;
      job.threads = 1 + made % 3;
      const Status status = convert_on(n, dir_ / "rows", out, job);
      ASSERT_TRUE(status) << status.error().message();
      EXPECT_TRUE(read_file(out) == expected) << strategy_name(strategy) << " on " << n << " ranks differs";
      EXPECT_FALSE(*path_exists(out + ".partial"));
    }
}

}  // namespace
}  // namespace reshard::convert_ranks_test
