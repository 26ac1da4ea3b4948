// Tests loads of ranks that read each byte once and exchange the rest.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "formats/load.h"
#include "formats/open.h"
#include "lib/device/convert.h"
#include "lib/load/dlpack.h"
#include "lib/load/exchange_schedule.h"
#include "lib/load/load.h"
#include "lib/transport/collectives.h"
#include "tests/lib/load/loads.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_ranks.h"
#include "tests/support/layouts.h"
#include "tests/support/local_ranks.h"
#include "tests/support/must.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::load_together_test {
namespace {

using namespace loads;
using testing::HasSubstr;

// Loads on a thread per rank of the mesh. Returns the tensors of each rank.
std::vector<Loaded> load_on_ranks(const std::string& path, const LoadOptions& options) {
  std::vector<Loaded> out(static_cast<std::size_t>(options.placement.mesh.ranks()));
  const Status done =
      run_local_ranks(static_cast<int>(options.placement.mesh.ranks()), [&](Transport& ranks) -> Status {
        LoadOptions mine = options;
        mine.run.ranks = &ranks;
        out[static_cast<std::size_t>(ranks.rank())] = TRY(load_all(path, mine));
        return {};
      });
  EXPECT_TRUE(done) << done.error().message();
  return out;
}

// Does the same into the memories of devices. Elements are sent between the devices or between the hosts.
std::vector<Loaded> load_on_devices(const std::string& path, const LoadOptions& options, RankDevice kind,
                                    bool between_devices) {
  std::vector<Loaded> out(static_cast<std::size_t>(options.placement.mesh.ranks()));
  const Status done = run_device_ranks(static_cast<int>(options.placement.mesh.ranks()), kind,
                                       [&](Transport& ranks, Transport& data, Device& device) -> Status {
                                         LoadOptions mine = options;
                                         mine.run.ranks = &ranks;
                                         mine.run.device = &device;
                                         if (between_devices)
                                           mine.run.data = [&]() -> Result<Transport*> { return &data; };
                                         out[static_cast<std::size_t>(ranks.rank())] = TRY(load_all(path, mine));
                                         return {};
                                       });
  EXPECT_TRUE(done) << done.error().message();
  return out;
}

void expect_same_on_devices(const std::string& mesh, RankDevice kind) {
  for (const bool converts : {false, true})
    for (const Strategy strategy : {Strategy::kExchange, Strategy::kDirect}) {
      LoadOptions options = options_for(mesh);
      options.run.strategy = strategy;
      options.naming.convention = Convention::kHf;
      if (converts) options.typing.dtype = DType::kFloat32;
      const std::vector<Loaded> host = load_on_ranks(sample_checkpoint("fsdp4_tp2"), options);
      for (const bool between_devices : {false, true}) {
        const std::vector<Loaded> device =
            load_on_devices(sample_checkpoint("fsdp4_tp2"), options, kind, between_devices);
        for (std::size_t r = 0; r < host.size(); ++r) {
          EXPECT_EQ(names_of(device[r].tensors), names_of(host[r].tensors));
          for (const auto& [name, value] : device[r].tensors) expect_equal(value, host[r].tensors.at(name), name);
          EXPECT_EQ(device[r].report.bytes_received, host[r].report.bytes_received);
          ASSERT_EQ(device[r].report.proofs.size(), host[r].report.proofs.size());
          for (std::size_t p = 0; p < host[r].report.proofs.size(); ++p)
            EXPECT_EQ(device[r].report.proofs[p].whole, host[r].report.proofs[p].whole);
        }
      }
    }
}

TEST(LoadTogether, GivesTheSameAndReadsEachByteOnce) {
  for (const std::string name : {"fsdp4_tp2", "pp2_tp4"}) {
    const TensorValues truth = load_checkpoint(sample(name) + "/full.safetensors");
    Index all = 0;
    for (const auto& [tensor, value] : truth) all += std::ssize(value.bytes);
    for (const std::string text : {"dp_replicate=2,tp=2", "dp_shard=7", "dp_replicate=3", "tp=1"}) {
      const Mesh mesh = must(Mesh::parse(text));
      for (const Strategy strategy : {Strategy::kExchange, Strategy::kDirect}) {
        LoadOptions options = options_for(text);
        options.run.strategy = strategy;
        const std::vector<Loaded> ranks = load_on_ranks(sample_checkpoint(name), options);
        Index read = 0;
        for (std::size_t r = 0; r < ranks.size(); ++r) {
          expect_parts(ranks[r], truth, mesh, static_cast<Index>(r));
          EXPECT_EQ(names_of(ranks[r].tensors), names_of(truth));
          read += ranks[r].report.bytes_read;
          EXPECT_TRUE(strategy == Strategy::kExchange || ranks[r].report.bytes_received == 0);
        }
        EXPECT_TRUE(strategy == Strategy::kDirect || read == all) << name << " " << text << " " << read;
        EXPECT_GT(ranks[0].report.checksums, 0);
      }
    }
  }
}

TEST(LoadTogether, FillsTheMemoryOfADevice) { expect_same_on_devices("dp_replicate=2,tp=3", RankDevice::kSplit); }

TEST(LoadTogether, FillsTheMemoryOfAGpu) {
  if (const std::string why = why_no_gpu_ranks(); !why.empty()) GTEST_SKIP() << why;
  for (const std::string mesh : {"tp=2", "dp_replicate=2,tp=2", "dp_shard=4,tp=2"})
    expect_same_on_devices(mesh, RankDevice::kGpu);
}

TEST(LoadTogether, AddsUpToTheDigestsOfAConversion) {
  const TempDir dir;
  const std::string from = sample_checkpoint("fsdp4_tp2");
  ASSERT_EQ(reshard_cli({"convert", from, dir / "hf", "-q", "--to", "hf", "--dtype", "float32"}).exit_code, 0);
  const Json manifest = must(parse_json(read_file(dir / "hf/reshard_manifest.json"), "manifest"));
  std::map<std::string, std::string> digests;
  for (const Json::Member& m : must(manifest.get_object("tensors")))
    digests[m.key] = std::string(must(m.value.get_string("digest")));
  for (const Strategy strategy : {Strategy::kExchange, Strategy::kDirect}) {
    LoadOptions options = options_for("dp_replicate=2,tp=2,pp=2");
    options.run.strategy = strategy;
    options.naming.convention = Convention::kHf;
    options.typing.dtype = DType::kFloat32;
    const std::vector<Loaded> ranks = load_on_ranks(from, options);
    const Loaded alone = must(load_all(from, options_for("tp=1")));
    for (const Loaded& rank : ranks) {
      ASSERT_EQ(rank.report.proofs.size(), alone.report.proofs.size());
      for (const LoadProof& proof : rank.report.proofs) {
        ASSERT_TRUE(proof.whole.has_value());
        EXPECT_EQ(proof.whole->hex(), digests[proof.name]) << proof.name;
      }
    }
  }
}

TEST(LoadTogether, EveryChecksumOfTheSourceIsChecked) {
  Index recorded = 0;
  const auto open = must(open_checkpoint(sample_checkpoint("fsdp4_tp2")));
  for (const Tensor& t : open.reader->catalog().tensors())
    for (std::size_t i = 0; i < t.fragments.size(); ++i) recorded += t.fragments.box(i).empty() ? 0 : 1;
  for (const Strategy strategy : {Strategy::kExchange, Strategy::kDirect}) {
    LoadOptions options = options_for("dp_replicate=2,tp=3");
    options.run.strategy = strategy;
    options.model.detect = false;
    const std::vector<Loaded> ranks = load_on_ranks(sample_checkpoint("fsdp4_tp2"), options);
    // Ranks that load independently read some items twice.
    EXPECT_GE(ranks[0].report.checksums, recorded);
    EXPECT_TRUE(strategy == Strategy::kDirect || ranks[0].report.checksums == recorded);
  }
}

TEST(LoadTogether, EndsForAllWhenOneFails) {
  const TempDir dir;
  copy_sample("fsdp4_tp2", dir / "c");
  for (const Strategy strategy : {Strategy::kExchange, Strategy::kDirect}) {
    int failed = -1;
    const Status done = run_local_ranks(
        3,
        [&](Transport& ranks) -> Status {
          LoadOptions options = options_for("dp_shard=3");
          options.run.ranks = &ranks;
          options.run.strategy = strategy;
          const OpenLoad open = TRY(open_load(dir / "c/checkpoint", options));
          std::vector<std::string> memory;
          for (const LoadTensor& t : open.load->tensors())
            memory.emplace_back(static_cast<std::size_t>(t.bytes()), ' ');
          std::vector<Destination> destinations;
          for (std::string& m : memory) destinations.push_back({reinterpret_cast<std::byte*>(m.data()), std::nullopt});
          if (ranks.rank() == 1) destinations.pop_back();
          TRY(open.load->run(destinations));
          return {};
        },
        &failed);
    ASSERT_FALSE(done);
    EXPECT_EQ(failed, 1);
    EXPECT_THAT(done.error().message(), HasSubstr("expected destinations for"));
  }
}

TEST(LoadTogether, RefusesRanksThatWantDifferentThings) {
  const Status done = run_local_ranks(2, [&](Transport& ranks) -> Status {
    LoadOptions options = options_for("tp=2");
    options.run.ranks = &ranks;
    options.run.strategy = Strategy::kExchange;
    if (ranks.rank() == 1) options.typing.dtype = DType::kFloat32;
    TRY(open_load(sample_checkpoint("tp8"), options));
    return {};
  });
  ASSERT_FALSE(done);
  EXPECT_THAT(done.error().message(), HasSubstr("the plans of the ranks differ"));
}

// Schedules rounds of one slab and of all slabs, on random placements: every element is read once, every rank gets each
// of its elements once, no buffer overflows, and both sides of a message agree.
TEST(ExchangeSchedule, DeliversEveryElementOnceWithinItsLimits) {
  Rng rng(7);
  for (int round = 0; round < 60; ++round) {
    LayoutRequest request;
    request.mesh = random_mesh(rng);
    const Index n = request.mesh.ranks();
    Catalog source;
    std::vector<WalkItem> items;
    for (int t = 0; t < 4; ++t) {
      TargetTensor wanted{"t" + std::to_string(t), DType::kInt16, random_shape(rng), {}, {}};
      wanted.placement = random_placement(rng, request.mesh, wanted.shape);
      Tensor tensor;
      tensor.name = wanted.name;
      tensor.dtype = wanted.dtype;
      tensor.shape = wanted.shape;
      tensor.fragments = FragmentList(wanted.shape.rank());
      if (volume(tensor.shape) > 0) tensor.fragments.add(whole(tensor.shape), {});
      items.push_back({static_cast<std::size_t>(t), wanted.dtype, 1, 1, nullptr});
      must(source.add(std::move(tensor)));
      request.tensors.push_back(std::move(wanted));
    }
    const auto placed = request.tensors;
    const auto target = must(MemoryTarget::lay_out(request));
    const auto& memory = static_cast<const MemoryTarget&>(*target);
    const Plan plan = must(make_plan(source, target->catalog()));
    const Index slab = 512 << below(rng, 6);
    const SlabList slabs(items, source, slab, slab);
    const Index limit = std::max(slab, slabs.largest()) * (1 + below(rng, 3));
    std::vector<ExchangeSchedule> schedules;
    for (int r = 0; r < n; ++r) schedules.emplace_back(plan, target->catalog(), memory, slabs, r, limit);
    std::vector<std::vector<Index>> got(static_cast<std::size_t>(n), std::vector<Index>(4, 0));
    Index read = 0;
    for (bool more = true; more;) {
      more = false;
      std::map<std::pair<int, int>, std::vector<Index>> sent, expected;  // lengths, by sender and receiver
      for (int r = 0; r < n; ++r) {
        ExchangeRound work;
        const bool goes_on = schedules[static_cast<std::size_t>(r)].next(work);
        EXPECT_TRUE(r == 0 || goes_on == more);
        more = goes_on;
        EXPECT_LE(work.sent_bytes, limit);
        EXPECT_LE(work.received_bytes, limit);
        for (const auto& s : work.reads) read += volume(s.slab);
        for (const auto& m : work.messages.out) sent[{r, m.peer}].push_back(m.bytes);
        for (const auto& m : work.messages.in) expected[{m.peer, r}].push_back(m.bytes);
        for (const auto& a : work.arrivals)
          for (const Box& piece : a.pieces) got[static_cast<std::size_t>(r)][a.planned] += volume(piece);
      }
      EXPECT_EQ(sent, expected);
      // One message per kind of replication; these four have at most that many.
      for (const auto& [ends, lengths] : sent) EXPECT_LE(lengths.size(), 4u);
    }
    Index all = 0;
    for (std::size_t t = 0; t < 4; ++t) {
      all += volume(placed[t].shape);
      for (Index r = 0; r < n; ++r) {
        Index owned = 0;
        for (const LocalBox& b : owned_boxes(request.mesh, placed[t].placement, placed[t].shape, r))
          owned += volume(b.box);
        EXPECT_EQ(got[static_cast<std::size_t>(r)][plan.tensors[t].to], owned) << request.mesh.to_string();
      }
    }
    EXPECT_EQ(read, all);
  }
}

}  // namespace
}  // namespace reshard::load_together_test
