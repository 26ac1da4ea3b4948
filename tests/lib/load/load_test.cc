// Compares each rank's part of a checkpoint with whole tensors that are cut by hand.
#include "lib/load/load.h"

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
#include "lib/transport/collectives.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_ranks.h"
#include "tests/support/layouts.h"
#include "tests/support/local_ranks.h"
#include "tests/support/must.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

using testing::HasSubstr;

// Computes torch.chunk(whole, n, dim)[k].
TensorValue chunk_of(const TensorValue& whole, int dim, Index n, Index k) {
  const Index size = whole.shape[dim], piece = ceil_div(size, n);
  const Index begin = std::min(size, k * piece), end = std::min(size, begin + piece);
  TensorValue out{whole.dtype, whole.shape, {}};
  out.shape[dim] = end - begin;
  const Index row = row_major_strides(whole.shape)[dim] * byte_size(whole.dtype);
  for (Index at = 0; at < std::ssize(whole.bytes); at += size * row)
    out.bytes +=
        whole.bytes.substr(static_cast<std::size_t>(at + begin * row), static_cast<std::size_t>((end - begin) * row));
  return out;
}

// Returns the dimension that tensor parallelism cuts in a Llama, in either convention; -1: none.
int tp_dim(const std::string& name) {
  for (const char* rows : {"wq.", "wk.", "wv.", "q_proj", "k_proj", "v_proj", "w1.", "w3.", "gate_proj", "up_proj",
                           "tok_embeddings", "embed_tokens", "lm_head"})
    if (name.find(rows) != std::string::npos) return 0;
  for (const char* columns : {"wo.", "o_proj", "w2.", "down_proj"})
    if (name.find(columns) != std::string::npos) return 1;
  return name.starts_with("output.") ? 0 : -1;
}

// Cuts a tensor by hand, for meshes of tp, dp_shard and dp_replicate.
TensorValue part_of(const TensorValue& whole, const std::string& name, const Mesh& mesh, Index rank) {
  TensorValue out = whole;
  if (out.shape.rank() == 0) return out;
  if (tp_dim(name) >= 0) out = chunk_of(out, tp_dim(name), mesh.size("tp"), mesh.coordinate(rank, "tp"));
  return chunk_of(out, 0, mesh.size("dp_shard"), mesh.coordinate(rank, "dp_shard"));
}

struct Loaded {
  TensorValues tensors;
  LoadReport report;
};

// Loads into new memory on the device of the options, which is first filled with a pattern.
Result<Loaded> load_all(const std::string& path, LoadOptions options) {
  Device& device = options.run.device ? *options.run.device : cpu_device();
  const auto stream = TRY(device.stream());
  Loaded out;
  std::vector<std::pair<TensorValue*, std::unique_ptr<Device::Memory>>> parts;
  out.report = TRY(load(path, std::move(options), [&](const LoadTensor& t) -> Result<Destination> {
    TensorValue& value = out.tensors[t.name] = {t.dtype, t.shape, {}};
    parts.emplace_back(&value, TRY(device.allocate(t.bytes())));
    const DeviceBuffer memory = parts.back().second->buffer();
    std::fill(memory.host.begin(), memory.host.end(), std::byte{0xA5});
    TRY(stream->upload(memory, t.bytes()));
    TRY(stream->wait());
    return Destination{memory.device.data(), std::nullopt};
  }));
  for (const auto& [value, memory] : parts) {
    const MutableBytes bytes = memory->buffer().host;
    TRY(stream->download(memory->buffer(), std::ssize(bytes)));
    TRY(stream->wait());
    value->bytes.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return out;
}

void expect_equal(const TensorValue& got, const TensorValue& expected, const std::string& what) {
  EXPECT_EQ(got.dtype, expected.dtype) << what;
  EXPECT_EQ(got.shape, expected.shape) << what;
  EXPECT_TRUE(got.bytes == expected.bytes) << what;
}

void expect_parts(const Loaded& loaded, const TensorValues& truth, const Mesh& mesh, Index rank) {
  for (const auto& [name, value] : loaded.tensors) {
    ASSERT_TRUE(truth.contains(name)) << name;
    expect_equal(value, part_of(truth.at(name), name, mesh, rank),
                 name + " of rank " + std::to_string(rank) + " of " + mesh.to_string());
  }
}

LoadOptions options_for(const std::string& mesh, Index rank = 0) {
  LoadOptions options;
  options.placement.mesh = must(Mesh::parse(mesh));
  options.rank = rank;
  options.run.threads = 2;
  options.run.memory = 16 << 20;
  return options;
}

std::set<std::string> names_of(const TensorValues& tensors) {
  std::set<std::string> out;
  for (const auto& [name, value] : tensors) out.insert(name);
  return out;
}

TEST(Load, GivesEachRankItsPartOfEveryTensor) {
  for (const std::string name : {"tp8", "fsdp4_tp2", "hsdp2x4", "pp2_tp4"}) {
    const TensorValues truth = load_checkpoint(sample(name) + "/full.safetensors");
    for (const std::string text : {"tp=2,dp_shard=3", "dp_shard=7", "dp_replicate=2,tp=2"}) {
      const Mesh mesh = must(Mesh::parse(text));
      for (Index rank = 0; rank < mesh.ranks(); rank += 1 + rank / 2) {
        const Loaded loaded = must(load_all(sample_checkpoint(name), options_for(text, rank)));
        EXPECT_EQ(names_of(loaded.tensors), names_of(truth));
        expect_parts(loaded, truth, mesh, rank);
      }
    }
  }
}

TEST(Load, ReadsChunksOfOrbax) {
  for (const std::string name : {"two_processes", "tensorstore", "raw"}) {
    const TensorValues truth = load_checkpoint(test_data("orbax/" + name));
    for (const Index rank : {0, 1, 2}) {
      const Loaded loaded = must(load_all(test_data("orbax/" + name), options_for("dp_shard=3", rank)));
      EXPECT_EQ(names_of(loaded.tensors), names_of(truth));
      expect_parts(loaded, truth, must(Mesh::parse("dp_shard=3")), rank);
    }
  }
}

TEST(Load, PermutesRotaryRowsEitherWay) {
  const std::string hf = sample("fsdp4_tp2") + "/hf.safetensors", full = sample("fsdp4_tp2") + "/full.safetensors";
  for (const auto& [from, convention, to] : {std::tuple(sample_checkpoint("fsdp4_tp2"), Convention::kHf, hf),
                                             std::tuple(hf, Convention::kTorchtitan, full)}) {
    const TensorValues truth = load_checkpoint(to);
    for (const std::string text : {"tp=2", "tp=2,dp_shard=3", "dp_shard=5"}) {
      const Mesh mesh = must(Mesh::parse(text));
      for (Index rank = 0; rank < mesh.ranks(); ++rank) {
        LoadOptions options = options_for(text, rank);
        options.naming.convention = convention;
        options.config_path = sample("fsdp4_tp2") + "/config.json";
        const Loaded loaded = must(load_all(from, options));
        EXPECT_EQ(names_of(loaded.tensors), names_of(truth));
        expect_parts(loaded, truth, mesh, rank);
      }
    }
  }
}

// A rank loads what `reshard convert --to ranks` writes to its file: also with other families' cuts, pipeline stages,
// repeated heads and padded vocabularies.
TEST(Load, GivesWhatTheFileOfARankHolds) {
  struct Case {
    std::string from, layout, mesh;
    std::vector<std::string> options;
  };
  const std::string config = sample("fsdp4_tp2") + "/config.json";
  const std::vector<Case> cases = {
      {sample_checkpoint("pp2_tp4"), "", "pp=2,tp=2", {"--names", "hf"}},
      {sample_checkpoint("fsdp4_tp2"), "", "tp=4", {"--names", "hf"}},  // more ranks than key-value heads
      {sample_checkpoint("fsdp8"), "", "pp=2,dp_shard=3", {"--names", "keep"}},
      {sample("colossalai") + "/healthy_st/epoch-0_step-7/modeling", "", "tp=2,dp_replicate=2", {"--names", "hf"}},
      {sample_checkpoint("fsdp4_tp2"), "colossalai-llama", "tp=2", {"--names", "hf", "--vocab-padding", "zero"}},
  };
  const TempDir dir;
  int n = 0;
  for (const Case& c : cases) {
    const std::string out = dir / std::to_string(n++);
    std::vector<std::string> args = {"convert", c.from, out, "-q", "--to", "ranks", "--mesh", c.mesh};
    args.insert(args.end(), c.options.begin(), c.options.end());
    if (!c.layout.empty()) args.insert(args.end(), {"--layout", c.layout});
    const CommandResult converted = reshard_cli(args);
    ASSERT_EQ(converted.exit_code, 0) << converted.out << converted.err;
    const Mesh mesh = must(Mesh::parse(c.mesh));
    for (Index rank = 0; rank < mesh.ranks(); ++rank) {
      LoadOptions options = options_for(c.mesh, rank);
      if (c.options[1] == "hf") options.naming.convention = Convention::kHf;
      if (!c.layout.empty()) options.placement.layout = must(load_layout(c.layout, c.mesh));
      if (!c.layout.empty()) options.vocabulary.vocab_padding = PaddingFill::kZero;
      options.selection.exclude = {"train_state*", "optimizer*"};
      const Loaded loaded = must(load_all(c.from, options));
      const TensorValues file = load_checkpoint(out + "/rank-0000" + std::to_string(rank) + ".safetensors");
      EXPECT_EQ(names_of(loaded.tensors), names_of(file)) << c.from << " " << rank;
      for (const auto& [name, value] : loaded.tensors)
        if (file.contains(name)) expect_equal(value, file.at(name), name + " of rank " + std::to_string(rank));
    }
  }
}

TEST(Load, BringsOptimizerStateToo) {
  const TensorValues truth = load_checkpoint(sample_checkpoint("fsdp2_tp2_optim"));
  for (Index rank = 0; rank < 3; ++rank) {
    const LoadOptions options = options_for("dp_shard=3", rank);
    const Loaded loaded = must(load_all(sample_checkpoint("fsdp2_tp2_optim"), options));
    EXPECT_EQ(names_of(loaded.tensors), names_of(truth));
    expect_parts(loaded, truth, options.placement.mesh, rank);
  }
}

TEST(Load, ConvertsDtypes) {
  TensorValues truth = load_checkpoint(sample("tp8") + "/full.safetensors");
  for (auto& [name, value] : truth) {
    const std::string bytes = std::exchange(value.bytes, std::string(2 * value.bytes.size(), '\0'));
    convert(value.dtype, DType::kFloat32, as_bytes(bytes).data(), reinterpret_cast<std::byte*>(value.bytes.data()),
            volume(value.shape));
    value.dtype = DType::kFloat32;
  }
  LoadOptions options = options_for("tp=2,dp_shard=2", 2);
  options.typing.dtype = DType::kFloat32;
  expect_parts(must(load_all(sample_checkpoint("tp8"), options)), truth, options.placement.mesh, 2);
}

// Strides with gaps and the columns first, like an engine that stores its weights transposed and aligned.
TEST(Load, FillsStridesOfTheCallersChoice) {
  const TensorValues truth = load_checkpoint(sample("fsdp4_tp2") + "/hf.safetensors");
  LoadOptions options = options_for("tp=2,dp_shard=2", 3);
  options.naming.convention = Convention::kHf;
  const OpenLoad open = must(open_load(sample_checkpoint("fsdp4_tp2"), options));
  std::vector<std::string> memory;
  std::vector<Destination> destinations;
  const auto strides_for = [](const Dims& shape) {
    Dims strides = shape;
    for (int d = 0; d < shape.rank(); ++d) strides[d] = d == 0 ? 3 : 3 * (shape[0] + 1);
    return strides;
  };
  for (const LoadTensor& t : open.load->tensors())
    memory.emplace_back(static_cast<std::size_t>(8 * (t.shape[0] + 1) * (volume(t.shape) / t.shape[0] + 1)), '\xA5');
  for (std::size_t i = 0; i < memory.size(); ++i)
    destinations.push_back(
        {reinterpret_cast<std::byte*>(memory[i].data()), strides_for(open.load->tensors()[i].shape)});
  ASSERT_TRUE(open.load->run(destinations));
  for (std::size_t i = 0; i < memory.size(); ++i) {
    const LoadTensor& t = open.load->tensors()[i];
    const TensorValue expected = part_of(truth.at(t.name), t.name, options.placement.mesh, 3);
    const Dims from = row_major_strides(t.shape), to = *destinations[i].strides;
    std::size_t wrong = 0, filled = 0;
    for (Index e = 0; e < volume(t.shape); ++e) {
      Index at = 0;
      for (int d = 0; d < t.shape.rank(); ++d) at += e / from[d] % t.shape[d] * to[d];
      std::string_view got(memory[i].data() + 2 * at, 2);
      if (got != std::string_view(expected.bytes).substr(static_cast<std::size_t>(2 * e), 2)) ++wrong;
      memory[i].replace(static_cast<std::size_t>(2 * at), 2, "\xA5\xA5");
      ++filled;
    }
    EXPECT_EQ(wrong, 0u) << t.name;
    EXPECT_EQ(memory[i].find_first_not_of('\xA5'), std::string::npos) << t.name << ": a gap was written to";
  }
}

TEST(Load, SaysWhatARankIsToHold) {
  LoadOptions options = options_for("tp=2,dp_shard=3", 5);
  const OpenLoad open = must(open_load(sample_checkpoint("tp8"), options));
  Index bytes = 0;
  for (const LoadTensor& t : open.load->tensors()) {
    bytes += t.bytes();
    if (t.name != "tok_embeddings.weight") continue;
    // 257 rows are cut into 129 and 128, and the latter into 43, 43 and 42.
    EXPECT_EQ(t.global_shape, (Dims{257, 64}));
    EXPECT_EQ(t.shape, (Dims{42, 64}));
    EXPECT_EQ(t.dtype, DType::kBFloat16);
    ASSERT_EQ(t.boxes.size(), 1u);
    EXPECT_EQ(t.boxes[0].box, (Box{{215, 0}, {42, 64}}));
  }
  EXPECT_EQ(open.load->bytes(), bytes);
  EXPECT_EQ(open.load->tensors().size(), load_checkpoint(sample("tp8") + "/full.safetensors").size());
}

TEST(Load, GivesStagesTheirTensorsAndEmptyPartsToo) {
  const TensorValues truth = load_checkpoint(sample("pp2_tp4") + "/full.safetensors");
  std::map<std::string, int> held;
  for (Index rank = 0; rank < 4; ++rank) {
    const Loaded loaded = must(load_all(sample_checkpoint("pp2_tp4"), options_for("pp=2,tp=2", rank)));
    for (const auto& [name, value] : loaded.tensors) ++held[name];
    expect_parts(loaded, truth, must(Mesh::parse("tp=2")), rank % 2);
  }
  EXPECT_EQ(held.size(), truth.size());
  for (const auto& [name, n] : held) EXPECT_EQ(n, 2) << name;
  // 64 rows of a norm over 40 ranks: two each, and none for the last eight.
  const OpenLoad open = must(open_load(sample_checkpoint("pp2_tp4"), options_for("dp_shard=40", 39)));
  for (const LoadTensor& t : open.load->tensors())
    EXPECT_TRUE(t.name != "norm.weight" || t.shape == Dims{0}) << to_string(t.shape);
}

// ---- ranks together

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

// ---- Refused loads

std::string refusal(const std::string& path, const LoadOptions& options) {
  const auto loaded = load_all(path, options);
  return loaded ? "loaded" : loaded.error().message();
}

TEST(Load, RefusesWhatMakesNoSense) {
  const std::string path = sample_checkpoint("tp8");
  EXPECT_THAT(refusal(path, options_for("tp=2", 2)), HasSubstr("rank 2: a mesh of tp=2 has ranks 0 to 1"));
  LoadOptions options = options_for("tp=2");
  options.run.strategy = Strategy::kExchange;
  EXPECT_THAT(refusal(path, options), HasSubstr("needs a transport (ranks), got none"));
  options = options_for("tp=2");
  options.placement.layout = must(load_layout("torchtitan-llama", ""));
  EXPECT_THAT(refusal(path, options), HasSubstr("has no mesh"));
  options = options_for("tp=2");
  options.run.memory = 100'000;
  EXPECT_THAT(refusal(path, options), HasSubstr("loading needs at least 524 kB of memory for buffers, got 100 kB"));
  const Status done = run_local_ranks(3, [&](Transport& ranks) -> Status {
    LoadOptions mine = options_for("tp=2");
    mine.run.ranks = &ranks;
    TRY(load_all(path, mine));
    return {};
  });
  ASSERT_FALSE(done);
  EXPECT_THAT(done.error().message(), HasSubstr("mesh tp=2 has 2 ranks, but this job has 3"));
}

TEST(Load, RefusesDestinationsThatDoNotFit) {
  LoadOptions options = options_for("tp=2");
  options.selection.include = {"tok_embeddings.weight"};
  const OpenLoad open = must(open_load(sample_checkpoint("tp8"), options));
  ASSERT_EQ(open.load->tensors().size(), 1u);
  ASSERT_EQ(open.load->tensors()[0].shape, (Dims{129, 64}));
  std::vector<std::byte> memory(129 * 64 * 2);
  const auto refused = [&](std::vector<Destination> to) {
    const auto report = open.load->run(to);
    return report ? "loaded" : report.error().message();
  };
  EXPECT_EQ(refused({}), "expected destinations for 1 tensor, got 0");
  EXPECT_EQ(refused({{nullptr, std::nullopt}}),
            "destination of tensor 'tok_embeddings.weight': expected memory of 16.5 kB, got none");
  const std::string what = "destination of tensor 'tok_embeddings.weight': strides ";
  EXPECT_EQ(refused({{memory.data(), Dims{1}}}), what + "[1] of shape [129, 64]: expected 2 strides, got 1");
  EXPECT_EQ(refused({{memory.data(), Dims{63, 1}}}),
            what + "[63, 1] of shape [129, 64]: expected no two elements at the same address");
  EXPECT_EQ(refused({{memory.data(), Dims{64, -1}}}),
            what + "[64, -1] of shape [129, 64]: expected no negative stride");
  EXPECT_EQ(refused({{memory.data(), Dims{Index{1} << 60, 1}}}),
            what + "[1152921504606846976, 1] of shape [129, 64]: expected a reach of at most 2^63 bytes");
  EXPECT_EQ(refused({{memory.data(), std::nullopt}}), "loaded");
}

TEST(Load, NamesTensorAndFileOfAFlippedByte) {
  const TempDir dir;
  copy_sample("fsdp4_tp2", dir / "c");
  const std::string path = dir / "c/checkpoint";
  auto open = must(open_checkpoint(path));
  const std::size_t norm = *open.reader->catalog().find("norm.weight");
  ASSERT_TRUE(open.reader->locate({norm}, 1, "."));
  const Tensor& t = open.reader->catalog().tensors()[norm];
  const Extent extent = t.fragments.extent(0);
  const std::string file = open.reader->catalog().file_path(extent.file);
  std::string bytes = read_file(file);
  bytes[static_cast<std::size_t>(extent.offset)] ^= 1;
  write_file(file, bytes);
  // A rank that reads the whole item finds it. Two ranks that read half each find it only if they check whole items.
  EXPECT_THAT(refusal(path, options_for("tp=1")),
              AllOf(HasSubstr(at(file, extent.offset)), HasSubstr("tensor 'norm.weight'"), HasSubstr("CRC-32")));
  LoadOptions half = options_for("dp_shard=16");
  EXPECT_EQ(refusal(path, half), "loaded");
  half.check_whole_items = true;
  EXPECT_THAT(refusal(path, half), HasSubstr("tensor 'norm.weight'"));
  half.check_whole_items = false;
  for (const Strategy strategy : {Strategy::kExchange, Strategy::kDirect}) {
    const Status done = run_local_ranks(16, [&](Transport& ranks) -> Status {
      LoadOptions mine = half;
      mine.run.ranks = &ranks;
      mine.run.strategy = strategy;
      TRY(load_all(path, mine));
      return {};
    });
    ASSERT_FALSE(done);
    EXPECT_THAT(done.error().message(), HasSubstr("tensor 'norm.weight'"));
  }
}

// ---- DLPack

TEST(Dlpack, EveryDtypeHasACodeOfItsOwn) {
  std::set<std::pair<int, int>> seen;
  for (int i = 0; i <= static_cast<int>(DType::kComplex128); ++i) {
    const auto dtype = static_cast<DType>(i);
    const dlpack::DLDataType type = dlpack::data_type(dtype);
    EXPECT_EQ(type.bits, 8 * byte_size(dtype));
    EXPECT_EQ(type.lanes, 1);
    EXPECT_TRUE(seen.emplace(type.code, type.bits).second) << info(dtype).torch_name;
  }
  EXPECT_EQ(dlpack::data_type(DType::kBFloat16), (dlpack::DLDataType{4, 16, 1}));
  EXPECT_EQ(dlpack::data_type(DType::kFloat8E4M3), (dlpack::DLDataType{10, 8, 1}));
}

TEST(Dlpack, LoadsIntoATensorOfSomebodyElses) {
  const TensorValue expected =
      part_of(load_checkpoint(sample("tp8") + "/full.safetensors").at("layers.0.attention.wo.weight"),
              "layers.0.attention.wo.weight", must(Mesh::parse("tp=2")), 1);
  LoadOptions options = options_for("tp=2", 1);
  options.selection.include = {"layers.0.attention.wo.weight"};
  const OpenLoad open = must(open_load(sample_checkpoint("tp8"), options));
  const LoadTensor& t = open.load->tensors()[0];
  ASSERT_EQ(t.shape, (Dims{64, 32}));
  std::string memory(64 * 40 * 2 + 6, '\xA5');
  std::int64_t shape[] = {64, 32}, strides[] = {40, 1};
  const dlpack::DLTensor theirs = {memory.data(), {}, 2, {dlpack::kBfloat, 16, 1}, shape, strides, 6};
  const Destination to = must(dlpack::destination(theirs, t, cpu_device()));
  ASSERT_TRUE(open.load->run({{to}}));
  for (std::size_t row = 0; row < 64; ++row) {
    EXPECT_EQ(memory.substr(6 + row * 80, 64), expected.bytes.substr(row * 64, 64)) << row;
    EXPECT_EQ(memory.substr(6 + row * 80 + 64, 16), std::string(16, '\xA5')) << row;
  }
  const dlpack::TensorView view(t, to, {});
  EXPECT_EQ(view.tensor().data, memory.data() + 6);
  EXPECT_EQ(view.tensor().ndim, 2);
  EXPECT_EQ(view.tensor().shape[1], 32);
  EXPECT_EQ(view.tensor().strides[0], 40);
}

TEST(Dlpack, AHandedOverTensorKeepsItsMemoryUntilItIsDeleted) {
  const LoadTensor t{"w", DType::kFloat32, {2, 3}, {2, 3}, {}};
  auto memory = std::make_shared<std::vector<std::byte>>(24);
  const std::weak_ptr<std::vector<std::byte>> watched = memory;
  dlpack::DLManagedTensor* out = dlpack::managed(t, {memory->data(), std::nullopt}, {}, memory);
  memory.reset();
  ASSERT_FALSE(watched.expired());
  EXPECT_EQ(out->dl_tensor.data, watched.lock()->data());
  EXPECT_EQ(out->dl_tensor.strides[0], 3);
  out->deleter(out);
  EXPECT_TRUE(watched.expired());
}

TEST(Dlpack, RefusesATensorThatIsNotTheOne) {
  const LoadTensor t{"w", DType::kBFloat16, {2, 3}, {2, 3}, {}};
  std::byte memory[12];
  std::int64_t shape[] = {2, 3}, other[] = {3, 2};
  const dlpack::DLTensor good = {memory, {}, 2, {dlpack::kBfloat, 16, 1}, shape, nullptr, 0};
  const auto refused = [&](const dlpack::DLTensor& tensor) {
    const auto to = dlpack::destination(tensor, t, cpu_device());
    return to ? "accepted" : to.error().message();
  };
  EXPECT_EQ(refused(good), "accepted");
  dlpack::DLTensor bad = good;
  bad.device.device_type = dlpack::kCuda;
  EXPECT_EQ(refused(bad), "DLTensor for 'w': device: expected memory of cpu, got device type 2, number 0");
  bad = good;
  bad.dtype.code = dlpack::kFloat;
  EXPECT_EQ(
      refused(bad),
      "DLTensor for 'w': dtype: expected bfloat16 (type code 4 of 16 bits and 1 lane), got type code 2 of 16 bits "
      "and 1 lane");
  bad = good;
  bad.ndim = 1;
  EXPECT_EQ(refused(bad), "DLTensor for 'w': dimensions: expected 2, got 1");
  bad = good;
  bad.shape = other;
  EXPECT_EQ(refused(bad), "DLTensor for 'w': shape: expected [2, 3], got [3, 2]");
}

}  // namespace
}  // namespace reshard
