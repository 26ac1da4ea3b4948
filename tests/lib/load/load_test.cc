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
#include "tests/lib/load/loads.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_ranks.h"
#include "tests/support/layouts.h"
#include "tests/support/local_ranks.h"
#include "tests/support/must.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::load_test {
namespace {

using namespace loads;
using testing::HasSubstr;

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

}  // namespace
}  // namespace reshard::load_test
