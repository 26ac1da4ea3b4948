#include "formats/ranks/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "formats/encoding/tensor_file.h"
#include "formats/open.h"
#include "formats/tensor_files/local_files.h"
#include "tests/support/checkpoints.h"
#include "tests/support/layouts.h"
#include "tests/support/temp_dir.h"

namespace reshard::ranks_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// Returns the values 0, 1, 2, ... modulo 251, starting with `seed`.
TensorValue counted(const Dims& shape, int seed = 0, DType dtype = DType::kUint8) {
  TensorValue v{dtype, shape, std::string(static_cast<std::size_t>(volume(shape) * byte_size(dtype)), '\0')};
  for (std::size_t i = 0; i < v.bytes.size(); ++i) v.bytes[i] = static_cast<char>((i + seed) % 251);
  return v;
}

TargetTensor wanted(const std::string& name, const TensorValue& value, Placement placement = {}) {
  TargetTensor t;
  t.name = name;
  t.dtype = value.dtype;
  t.shape = value.shape;
  t.placement = std::move(placement);
  return t;
}

// Returns the content of a rank's file: "abc" for the bytes 0, 1, 2.
std::map<std::string, std::vector<int>> contents(const std::string& path) {
  const File file = *File::open(path);
  const auto read = TensorFile::open(file);
  EXPECT_TRUE(read) << read.error().message();
  const std::string bytes = read_file(path);
  std::map<std::string, std::vector<int>> out;
  for (const auto& e : read->tensors()) {
    std::vector<int>& values = out[e.name];
    for (Index i = 0; i < e.tensor.extent.length; ++i)
      values.push_back(static_cast<unsigned char>(bytes[static_cast<std::size_t>(e.tensor.extent.offset + i)]));
  }
  return out;
}

std::string error_of(const std::string& path, const OpenOptions& options = {}) {
  const auto open = open_with(kRanksFormat, path, options);
  if (open) return "";
  return shortened(open.error().message(), path);
}

// A model on tp=2 with a fused tensor, one cut on dimension 1, a replicated one, and a scalar.
struct Fused {
  LayoutRequest request;
  TensorValues values;
  Fused() {
    request.mesh = Mesh({{"tp", 2}});
    add("c_attn", {2, 12}, {{{{"tp"}, 1, 3}}, -1});
    add("c_proj", {4, 2}, {{{{"tp"}, 0}}, -1});
    add("ln", {3}, {});
    add("step", {}, {});
  }
  void add(const std::string& name, const Dims& shape, Placement placement) {
    values[name] = counted(shape);
    request.tensors.push_back(wanted(name, values[name], std::move(placement)));
  }
  void write(const std::string& path, Container container = Container::kSafetensors) {
    request.container = container;
    const auto target = kRanksFormat.lay_out(request);
    ASSERT_TRUE(target) << target.error().message();
    write_target(values, **target, path);
  }
};

TEST(Ranks, EachFileIsWhatARankHolds) {
  for (const Container container : {Container::kSafetensors, Container::kTorchSave}) {
    const TempDir dir;
    Fused model;
    model.write(dir / "out", container);
    const std::string end = container == Container::kSafetensors ? ".safetensors" : ".bin";
    // Rank 0 has the first half of each of the three sections, in every row.
    auto rank0 = contents(dir / ("out/rank-00000" + end)), rank1 = contents(dir / ("out/rank-00001" + end));
    EXPECT_THAT(rank0["c_attn"], ElementsAre(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21));
    EXPECT_THAT(rank1["c_attn"], ElementsAre(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23));
    EXPECT_THAT(rank1["c_proj"], ElementsAre(4, 5, 6, 7));
    for (auto* rank : {&rank0, &rank1}) {  // replicated tensors are in every file
      EXPECT_THAT((*rank)["ln"], ElementsAre(0, 1, 2));
      EXPECT_THAT((*rank)["step"], ElementsAre(0));
    }
    EXPECT_TRUE(load_checkpoint(dir / "out") == model.values);
  }
}

TEST(Ranks, TheDescriptorBesideThemIsALayout) {
  const TempDir dir;
  Fused().write(dir / "out");
  const auto layout = LayoutDescriptor::parse(read_file(dir / "out/reshard_layout.json"), "l");
  ASSERT_TRUE(layout) << layout.error().message();
  EXPECT_EQ(layout->mesh->to_string(), "tp=2");
  ASSERT_EQ(layout->tensors.size(), 3u);
  EXPECT_EQ(layout->tensors[0].names, std::vector<std::string>{"c_attn"});
  EXPECT_EQ(layout->tensors[0].splits[0].groups, 3);
  EXPECT_EQ(layout->tensors[2].names, (std::vector<std::string>{"ln", "step"}));
}

TEST(Ranks, AnyPlacementReadsBack) {
  Rng rng(29);
  for (int round = 0; round < 25; ++round) {
    const TempDir dir;
    LayoutRequest request;
    request.mesh = random_mesh(rng);
    request.container = below(rng, 2) == 0 ? Container::kSafetensors : Container::kTorchSave;
    TensorValues values;
    for (Index i = 0; i < 6; ++i) {
      const std::string name = "layers." + std::to_string(i) + ".[w]*" + std::to_string(below(rng, 2));
      const Dims shape = random_shape(rng);
      values[name] = counted(shape, static_cast<int>(below(rng, 200)), DType::kInt16);
      Placement placement = random_placement(rng, request.mesh, shape);
      // A layout does not cut along the axis of replicas.
      std::erase_if(placement.splits, [](const Split& cut) {
        return std::find(cut.axes.begin(), cut.axes.end(), "dp_replicate") != cut.axes.end();
      });
      request.tensors.push_back(wanted(name, values[name], std::move(placement)));
    }
    const auto target = kRanksFormat.lay_out(request);
    ASSERT_TRUE(target) << target.error().message();
    write_target(values, **target, dir / "out");
    EXPECT_TRUE(load_checkpoint(dir / "out") == values) << request.mesh.to_string();
    // Every copy is stored: exchanging the files of replicas changes nothing.
    const auto open = open_checkpoint(dir / "out");
    ASSERT_TRUE(open);
    for (const Tensor& t : open->reader->catalog().tensors()) {
      Index held = 0;
      const auto it = std::find_if(request.tensors.begin(), request.tensors.end(),
                                   [&](const TargetTensor& w) { return w.name == t.name; });
      for (Index rank = 0; rank < request.mesh.ranks(); ++rank)
        for (const LocalBox& b : owned_boxes(request.mesh, it->placement, t.shape, rank))
          held += b.box.empty() && t.elements() > 0 ? 0 : 1;
      EXPECT_EQ(static_cast<Index>(t.fragments.size() + t.replicas.size()), held) << t.name;
    }
  }
}

TEST(Ranks, MissingFilesAreNamed) {
  const TempDir dir;
  Fused model;
  model.request.mesh = Mesh({{"tp", 2}, {"dp_replicate", 2}});
  model.write(dir / "out");
  fs::remove(dir / "out/rank-00003.safetensors");
  EXPECT_EQ(error_of(dir / "out"),
            "D: the file of rank 3 is missing; the layout reshard_layout.json has 4 ranks (tp=2, dp_replicate=2)");
  fs::remove(dir / "out/rank-00001.safetensors");
  EXPECT_EQ(error_of(dir / "out"), "D: the file of rank 1 is missing; got 2 files, of ranks up to 2");
}

TEST(Ranks, APartThatIsNotTheLayoutsIsNamed) {
  const TempDir dir;
  Fused model;
  model.write(dir / "out");
  // Rank 1 has one row too few.
  LayoutRequest other = model.request;
  other.tensors[1].shape = {3, 2};
  TensorValues values = model.values;
  values["c_proj"] = counted({3, 2});
  write_target(values, **kRanksFormat.lay_out(other), dir / "other");
  fs::copy_file(dir / "other/rank-00001.safetensors", dir / "out/rank-00001.safetensors",
                fs::copy_options::overwrite_existing);
  EXPECT_EQ(error_of(dir / "out"), "");  // 2 + 1 rows, as torch.chunk cuts 3
  fs::copy_file(dir / "other/rank-00001.safetensors", dir / "out/rank-00000.safetensors",
                fs::copy_options::overwrite_existing);
  fs::copy_file(dir / "other/rank-00000.safetensors", dir / "out/rank-00001.safetensors",
                fs::copy_options::overwrite_existing);
  EXPECT_EQ(error_of(dir / "out"),
            "D/rank-00000.safetensors: tensor 'c_proj': expected [2, 2], the part of rank 0 of [3, 2] cut as layout "
            "reshard_layout.json has it (dim 0 by tp), got [1, 2]");
}

TEST(Ranks, ATensorThatARankLacksIsNamed) {
  const TempDir dir;
  Fused model;
  model.write(dir / "out");
  LayoutRequest other = model.request;
  other.tensors.pop_back();
  TensorValues values = model.values;
  values.erase("step");
  write_target(values, **kRanksFormat.lay_out(other), dir / "other");
  fs::copy_file(dir / "other/rank-00001.safetensors", dir / "out/rank-00001.safetensors",
                fs::copy_options::overwrite_existing);
  EXPECT_EQ(error_of(dir / "out"),
            "D/rank-00001.safetensors: tensor 'step': expected it, as rank 0 has it; it is missing");
}

TEST(Ranks, AGivenLayoutJoinsFilesThatSayNothing) {
  const TempDir dir;
  Fused model;
  model.write(dir / "out");
  fs::remove(dir / "out/reshard_layout.json");
  fs::rename(dir / "out/rank-00000.safetensors", dir / "out/model_rank0.safetensors");
  fs::rename(dir / "out/rank-00001.safetensors", dir / "out/model_rank1.safetensors");
  ASSERT_TRUE(recognises(kRanksFormat, dir.path() + "/out"));
  EXPECT_THAT(error_of(dir / "out"), AllOf(HasSubstr("D: no model family knows"), HasSubstr("--source-layout")));
  const auto layout = LayoutDescriptor::parse(
      R"({"reshard_layout": 1, "name": "mine", "files": "shards", "tensors": [
        {"names": ["c_attn"], "splits": [{"axes": ["tp"], "dim": 1, "groups": 3}]},
        {"names": ["c_proj"], "splits": [{"axes": ["tp"], "dim": 0}]}, {"names": ["*"], "splits": []}]})",
      "mine.json");
  ASSERT_TRUE(layout) << layout.error().message();
  const auto open = open_with(kRanksFormat, dir / "out", {.layout = &*layout});
  ASSERT_TRUE(open) << open.error().message();
  const Catalog& catalog = (*open)->catalog();
  EXPECT_EQ(catalog.tensors()[*catalog.find("c_attn")].shape, (Dims{2, 12}));
  EXPECT_EQ(catalog.tensors()[*catalog.find("c_attn")].fragments.size(), 6u);
  EXPECT_EQ(catalog.tensors()[*catalog.find("ln")].replicas.size(), 1u);
}

// Whatever shapes the files claim under any layout, the result is an error or a consistent catalog. A trainer's own
// config.json describes no model, so it changes nothing.
TEST(Ranks, AConfigOfNoModelIsPassedOver) {
  const std::string from = sample("per_rank_tp2") + "/checkpoint";
  const TempDir dir;
  fs::create_directories(dir / "ranks");
  for (const auto& [name, bytes] : all_files(from)) write_file(dir / ("ranks/" + name), bytes);
  write_file(dir / "ranks/config.json", R"({"a": 1})");
  const auto with = open_with(kRanksFormat, dir / "ranks");
  ASSERT_TRUE(with) << with.error().message();
  const auto values = load_values(**with);
  ASSERT_TRUE(values) << values.error().message();
  fs::remove(dir / "ranks/config.json");
  EXPECT_TRUE(*values == load_checkpoint(dir / "ranks"));
}

TEST(Ranks, AnyShapesUnderAnyLayoutAreRefusedOrHold) {
  Rng rng(31);
  int joined = 0;
  for (int round = 0; round < 200; ++round) {
    const TempDir dir;
    const Mesh mesh = random_mesh(rng);
    const Dims base = random_shape(rng);
    LayoutDescriptor layout;
    layout.name = "random";
    layout.mesh = mesh;
    Placement p = random_placement(rng, mesh, base);
    if (!p.splits.empty() && below(rng, 3) == 0) p.splits[0].groups = 1 + below(rng, 4);
    layout.tensors.push_back({{"w"}, p.splits});
    if (!LayoutDescriptor::parse(to_text(layout.to_json()), "l")) continue;
    for (Index rank = 0; rank < mesh.ranks(); ++rank) {
      Dims shape = base;
      const auto boxes = owned_boxes(mesh, {p.splits, -1}, base, rank);
      shape = local_shape(boxes);
      if (below(rng, 8) == 0 && shape.rank() > 0) shape[static_cast<int>(below(rng, shape.rank()))] += 1;
      if (below(rng, 20) == 0) shape.push_back(1 + below(rng, 3));
      std::vector<FileTensor> tensors = {{.name = "x", .dtype = DType::kUint8, .shape = {}, .extent = {}}};
      layout.tensors.push_back({{"x"}, {}});
      if (below(rng, 30) != 0) tensors.push_back({"w", DType::kUint8, shape, {}});
      TensorFilesTarget target;
      ASSERT_TRUE(target.add_file("rank", Container::kSafetensors, tensors));
      std::string bytes(static_cast<std::size_t>(target.catalog().files[0].size), '\0');
      ASSERT_TRUE(target.seal(nullptr, [&](std::uint32_t, Index offset, Bytes text) -> Status {
        bytes.replace(static_cast<std::size_t>(offset), text.size(), as_string(text));
        return {};
      }));
      dir.write("d/rank" + std::to_string(rank) + ".safetensors", bytes);
    }
    const auto open = open_with(kRanksFormat, dir / "d", {.layout = &layout});
    if (!open) continue;
    ++joined;
    EXPECT_TRUE(validate((*open)->catalog()));
  }
  EXPECT_GT(joined, 10);
}

TEST(Ranks, NamesOfRankFilesAreRecognised) {
  const auto recognised = [](const std::vector<std::string>& names) {
    const TempDir dir;
    for (const std::string& name : names) dir.write("d/" + name, "x");
    return recognises(kRanksFormat, dir / "d");
  };
  EXPECT_TRUE(recognised({"model-rank0.bin", "model-rank1.bin"}));
  EXPECT_TRUE(recognised({"tp_0.pt", "tp_1.pt"}));
  EXPECT_TRUE(recognised({"mp_rank_00.pt", "mp_rank_01.pt", "config.json"}));
  EXPECT_TRUE(recognised({"rank0_of_2.pth", "rank1_of_2.pth"}));
  EXPECT_TRUE(recognised({"sdp_00.pt", "sdp_01.pt"}));
  EXPECT_FALSE(recognised({"model-rank0.bin"}));
  EXPECT_FALSE(recognised({"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}));
  EXPECT_FALSE(recognised({"model-rank0.bin", "optim-rank0.bin", "model-rank1.bin", "optim-rank1.bin"}));
  EXPECT_FALSE(recognised({"model-rank0.bin", "model-rank1.bin", "pytorch_model.bin.index.json"}));
  EXPECT_FALSE(recognised({"model-rank-0-part-0.safetensors", "model-rank-0-part-1.safetensors"}));
}

}  // namespace
}  // namespace reshard::ranks_test
