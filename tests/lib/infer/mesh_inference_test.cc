#include "lib/infer/mesh_inference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "formats/open.h"
#include "lib/base/text.h"

namespace reshard::mesh_inference_test {
namespace {

using testing::HasSubstr;

const std::string kCheckpoints = std::string(RESHARD_SOURCE_DIR) + "/samples/checkpoints/";
const std::string kSmall = std::string(RESHARD_TEST_DATA) + "/dcp_small/";

InferredMesh infer(const std::string& path, std::optional<Index> dataloader_ranks = std::nullopt) {
  const auto open = open_checkpoint(path, {.files_too = false});
  EXPECT_TRUE(open.has_value()) << open.error().message();
  return infer_mesh(open->reader->catalog(), dataloader_ranks);
}

// Returns the placement of one tensor of a checkpoint.
std::string placement(const std::string& path, std::string_view tensor) {
  const auto open = open_checkpoint(path, {.files_too = false});
  EXPECT_TRUE(open.has_value()) << open.error().message();
  return infer_mesh(open->reader->catalog()).placements.at(open->reader->catalog().find(tensor).value());
}

std::string mesh_of(const InferredMesh& inferred) {
  return inferred.hypotheses.empty() ? "" : inferred.hypotheses[0].to_string();
}

// ---- Constructed meshes: the boxes that each rank would write

struct Parameter {
  std::string name;
  Dims shape;
  Placement placement;
};

enum class Dedup { kLowest, kAlternate };

// Returns a catalog with the boxes that torch's ranks own, each written by one of its owners, without empty boxes.
Catalog catalog_of(const Mesh& mesh, const std::vector<Parameter>& parameters, Dedup dedup = Dedup::kLowest) {
  Catalog catalog;
  for (Index r = 0; r < mesh.ranks(); ++r) catalog.files.push_back({"__" + std::to_string(r) + "_0.distcp", 0, r});
  int turn = 0;
  for (const Parameter& p : parameters) {
    Tensor t;
    t.name = p.name;
    t.shape = p.shape;
    t.fragments = FragmentList(p.shape.rank());
    ++turn;
    std::vector<Box> boxes;
    std::vector<std::vector<Index>> owners;
    for (Index r = 0; r < mesh.ranks(); ++r) {
      const auto box = owned(mesh, p.placement, p.shape, r);
      if (!box || box->empty()) continue;
      const auto it = std::find(boxes.begin(), boxes.end(), *box);
      if (it == boxes.end()) {
        boxes.push_back(*box);
        owners.push_back({r});
      } else {
        owners[static_cast<std::size_t>(it - boxes.begin())].push_back(r);
      }
    }
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      Fragment f;
      f.box = boxes[i];
      f.strides = row_major_strides(f.box.shape);
      const std::size_t k = dedup == Dedup::kLowest ? 0 : static_cast<std::size_t>(turn) % owners[i].size();
      f.extent = {static_cast<std::uint32_t>(owners[i][k]), 0, 0};
      t.fragments.add(f);
    }
    EXPECT_TRUE(catalog.add(std::move(t)).has_value());
  }
  return catalog;
}

Mesh mesh(std::string text) {
  std::erase(text, ' ');
  return Mesh::parse(text).value();
}

// Returns a Llama's parameters as FSDP2, TP and PP shard them.
std::vector<Parameter> llama(const Mesh& mesh, Index layers) {
  std::vector<std::string> fsdp;
  for (const char* axis : {"dp_shard", "cp"})
    if (mesh.size(axis) > 1) fsdp.emplace_back(axis);
  const auto cut = [&](int tp_dim) {
    Placement p;
    if (tp_dim >= 0 && mesh.size("tp") > 1) p.splits.push_back({{"tp"}, tp_dim});
    if (!fsdp.empty()) p.splits.push_back({fsdp, 0});
    return p;
  };
  std::vector<Parameter> out;
  const auto add = [&](const std::string& name, const Dims& shape, int tp_dim, Index stage) {
    Placement p = cut(tp_dim);
    p.stage = mesh.size("pp") > 1 ? stage : -1;
    out.push_back({name, shape, p});
  };
  const Index stages = mesh.size("pp");
  add("tok_embeddings.weight", {1003, 64}, 0, 0);
  for (Index l = 0; l < layers; ++l) {
    const std::string layer = "layers." + std::to_string(l) + ".";
    const Index stage = l * stages / layers;
    add(layer + "attention.wq.weight", {64, 64}, 0, stage);
    add(layer + "attention.wo.weight", {64, 64}, 1, stage);
    add(layer + "feed_forward.w1.weight", {176, 64}, 0, stage);
    add(layer + "feed_forward.w2.weight", {64, 176}, 1, stage);
    add(layer + "attention_norm.weight", {64}, -1, stage);
  }
  add("norm.weight", {64}, -1, stages - 1);
  return out;
}

// ---- real checkpoints

TEST(MeshInference, FindsTheMeshThatWroteEachRealCheckpoint) {
  const std::pair<const char*, const char*> kMeshes[] = {
      {"tp8", "tp=8"},
      {"fsdp8", "dp_shard=8"},
      {"fsdp16", "dp_shard=16"},
      {"hsdp2x4", "dp_replicate=2, dp_shard=4"},
      {"fsdp4_tp2", "dp_shard=4, tp=2"},
      {"fsdp2_tp2_optim", "dp_shard=2, tp=2"},
      {"pp2_tp4", "pp=2, tp=4"},
      {"single", "one rank"},
  };
  for (const auto& [name, truth] : kMeshes) {
    const InferredMesh m = infer(kCheckpoints + name + "/checkpoint");
    EXPECT_EQ(mesh_of(m), truth) << name;
    EXPECT_EQ(m.hypotheses.size(), 1u) << name << ": nothing else explains it";
    for (const InferredAxis& axis : m.axes) {
      if (axis.size > 1) {
        EXPECT_EQ(axis.confidence, Confidence::kCertain) << name << ": " << axis.name;
      }
      EXPECT_FALSE(axis.evidence.empty()) << name << ": " << axis.name;
    }
  }
}

TEST(MeshInference, NamesItsEvidence) {
  const InferredMesh tp8 = infer(kCheckpoints + "tp8/checkpoint");
  EXPECT_EQ(tp8.find("tp")->evidence,
            "wo, w2 cut in 8 on dim 1; wk, wq, wv, ... in 8 on dim 0; attention_norm, ffn_norm, norm whole");
  const InferredMesh hsdp = infer(kCheckpoints + "hsdp2x4/checkpoint");
  EXPECT_THAT(hsdp.find("dp_replicate")->evidence,
              HasSubstr("some boxes were written by rank r, others by rank r + 4"));
  const InferredMesh pp = infer(kCheckpoints + "pp2_tp4/checkpoint");
  EXPECT_EQ(pp.find("pp")->evidence, "ranks 0 to 3 write layers 0 to 1; ranks 4 to 7 write layers 2 to 3");
}

TEST(MeshInference, SaysThatContextParallelismLeavesNoTraceOfItsOwn) {
  const InferredMesh m = infer(kCheckpoints + "fsdp8/checkpoint");
  ASSERT_NE(m.find("cp"), nullptr);
  EXPECT_EQ(m.find("cp")->size, 0);
  EXPECT_EQ(m.find("cp")->confidence, Confidence::kUnknown);
}

TEST(MeshInference, TakesContextParallelismFromTheDataLoader) {
  EXPECT_EQ(mesh_of(infer(kCheckpoints + "fsdp8/checkpoint", 4)), "dp_shard=4, cp=2");
  const InferredMesh plain = infer(kCheckpoints + "fsdp8/checkpoint", 8);
  EXPECT_EQ(mesh_of(plain), "dp_shard=8");
  EXPECT_EQ(plain.find("cp"), nullptr);
  EXPECT_EQ(mesh_of(infer(kCheckpoints + "hsdp2x4/checkpoint", 4)), "dp_replicate=2, dp_shard=2, cp=2");
  const InferredMesh odd = infer(kCheckpoints + "fsdp8/checkpoint", 3);
  EXPECT_EQ(mesh_of(odd), "dp_shard=8");
  ASSERT_EQ(odd.notes.size(), 1u);
  EXPECT_EQ(odd.notes[0], "dataloader.world_size = 3 does not fit 8 data-parallel ranks.");
}

TEST(MeshInference, OneReplicaIsOnlyLikelyBecauseASaveOfOneGroupLooksTheSame) {
  const InferredMesh m = infer(kCheckpoints + "tp8/checkpoint");
  ASSERT_NE(m.find("dp_replicate"), nullptr);
  EXPECT_EQ(m.find("dp_replicate")->size, 1);
  EXPECT_EQ(m.find("dp_replicate")->confidence, Confidence::kLikely);
}

TEST(MeshInference, ReadsTheSmallCornerCases) {
  const std::pair<const char*, const char*> kMeshes[] = {
      {"ck1", "one rank"},
      {"ck2", "one rank"},
      {"ckf_fsdp", "dp_shard=4"},
      {"ckf_hsdp", "dp_replicate=2, dp_shard=2"},
      {"ckf_fsdptp", "dp_shard=2, tp=2"},
      {"ckz", "dp_replicate=3"},
  };
  for (const auto& [name, truth] : kMeshes) EXPECT_EQ(mesh_of(infer(kSmall + name)), truth) << name;
}

TEST(MeshInference, EmptyFilesTellOfRanksThatWroteNothing) {
  const InferredMesh m = infer(kSmall + "ckz");
  EXPECT_EQ(m.ranks, 3);
  EXPECT_EQ(m.find("dp_replicate")->confidence, Confidence::kLikely);
  EXPECT_EQ(m.find("dp_replicate")->evidence,
            "ranks 1 to 2 wrote no tensor: they hold copies, and the lowest ranks saved them");
}

// The tensors of ck4 are placed on two meshes of four ranks, (4) and (2, 2), which no single run would do.
TEST(MeshInference, ACheckpointOfTwoMeshesIsNotCertain) {
  const InferredMesh m = infer(kSmall + "ck4");
  EXPECT_EQ(m.find("tp")->confidence, Confidence::kLikely);
  EXPECT_THAT(m.notes, testing::Contains(HasSubstr("'uneven5'")));
}

TEST(MeshInference, DescribesPlacements) {
  const std::string both = kCheckpoints + "fsdp4_tp2/checkpoint";
  EXPECT_EQ(placement(both, "layers.0.attention.wq.weight"), "strided shard(0): tp 2 x dp_shard 4");
  EXPECT_EQ(placement(both, "layers.0.attention.wo.weight"), "shard(0) x 4, shard(1) x 2");
  EXPECT_EQ(placement(both, "norm.weight"), "shard(0) x 4");
  const std::string tp = kCheckpoints + "tp8/checkpoint";
  EXPECT_EQ(placement(tp, "tok_embeddings.weight"), "shard(0) x 8") << "257 rows, the last rank has 26";
  EXPECT_EQ(placement(tp, "layers.3.feed_forward.w2.weight"), "shard(1) x 8");
  EXPECT_EQ(placement(tp, "norm.weight"), "whole");
  EXPECT_EQ(placement(kSmall + "ck4", "uneven5"), "shard(0) x 3") << "5 rows for 4 ranks: 2, 2, 1, none";
  EXPECT_EQ(placement(kSmall + "ck4", "empty_t"), "empty");
  EXPECT_EQ(placement(kSmall + "ck4", "scalar"), "whole");
  EXPECT_EQ(placement(kCheckpoints + "tp8/hf.safetensors", "lm_head.weight"), "whole");
}

TEST(MeshInference, SaysNothingOfRanksWhereFilesDoNotName) {
  const InferredMesh m = infer(kCheckpoints + "tp8/hf.safetensors");
  EXPECT_EQ(m.ranks, 0);
  EXPECT_TRUE(m.axes.empty());
  EXPECT_TRUE(m.hypotheses.empty());
  EXPECT_THAT(m.notes, testing::ElementsAre(HasSubstr("nothing tells how many ranks")));
}

// ---- made meshes

TEST(MeshInference, FindsEveryMeshOfALlama) {
  for (const char* text : {"tp=2",
                           "tp=4",
                           "tp=8",
                           "dp_shard=2",
                           "dp_shard=3",
                           "dp_shard=7",
                           "dp_shard=16",
                           "dp_shard=64",
                           "dp_shard=2, tp=2",
                           "dp_shard=2, tp=8",
                           "dp_shard=8, tp=4",
                           "dp_shard=5, tp=3",
                           "pp=2, dp_shard=4",
                           "pp=4, dp_shard=2, tp=2",
                           "pp=2, tp=2",
                           "dp_replicate=2, dp_shard=8",
                           "dp_replicate=3, dp_shard=2, tp=2",
                           "dp_replicate=2, tp=4",
                           "pp=2, dp_replicate=2, dp_shard=2",
                           "pp=2, dp_replicate=2, dp_shard=2, tp=2"}) {
    for (const Dedup dedup : {Dedup::kLowest, Dedup::kAlternate}) {
      const Mesh truth = mesh(text);
      const InferredMesh m = infer_mesh(catalog_of(truth, llama(truth, 8), dedup));
      EXPECT_EQ(mesh_of(m), truth.to_string()) << (dedup == Dedup::kLowest ? "lowest" : "alternate");
      EXPECT_EQ(m.hypotheses.size(), 1u) << text;
      EXPECT_EQ(m.ranks, truth.ranks());
    }
  }
}

TEST(MeshInference, AHybridOfTwoByEightIsNotAnFsdpOfSixteen) {
  const Mesh hybrid = mesh("dp_replicate=2,dp_shard=8"), plain = mesh("dp_shard=16");
  EXPECT_EQ(infer_mesh(catalog_of(hybrid, llama(hybrid, 2), Dedup::kAlternate)).find("dp_replicate")->size, 2);
  EXPECT_EQ(infer_mesh(catalog_of(plain, llama(plain, 2))).find("dp_replicate")->size, 1);
}

// 64 rows in pieces of 8 fit 8 ranks, and also 9; 16 rows in pieces of 1 fit any number from 16 up.
TEST(MeshInference, ATrueDegreeMayExceedThePiecesOneSees) {
  const Mesh truth = mesh("dp_shard=6");
  const std::vector<Parameter> parameters = {{"a", {5, 2}, {{{{"dp_shard"}, 0}}, -1}},
                                             {"b", {4}, {{{{"dp_shard"}, 0}}, -1}}};
  const Catalog catalog = catalog_of(truth, parameters);
  const InferredMesh m = infer_mesh(catalog);
  EXPECT_EQ(mesh_of(m), "dp_shard=6");
  EXPECT_EQ(m.placements[0], "shard(0) x 6, some of them empty");
}

TEST(MeshInference, PrefersFsdpWhereNothingIsCutOnDim1) {
  const Mesh truth = mesh("dp_shard=4");
  const InferredMesh m = infer_mesh(catalog_of(truth, {{"a", {8, 8}, {{{{"dp_shard"}, 0}}, -1}}}));
  EXPECT_EQ(mesh_of(m), "dp_shard=4");
}

// Two rows on four ranks: FSDP over all four, two of them with nothing, or FSDP over two, with two replicas.
TEST(MeshInference, ListsEveryMeshThatFits) {
  const Mesh truth = mesh("dp_shard=4");
  const InferredMesh m = infer_mesh(catalog_of(truth, {{"a", {2, 8}, {{{{"dp_shard"}, 0}}, -1}}}));
  std::vector<std::string> texts;
  for (const Mesh& h : m.hypotheses) texts.push_back(h.to_string());
  EXPECT_THAT(texts, testing::UnorderedElementsAre("dp_replicate=2, dp_shard=2", "dp_shard=4"));
  EXPECT_EQ(m.find("dp_shard")->confidence, Confidence::kLikely);
}

TEST(MeshInference, ReportsBoxesThatFormNoGrid) {
  Catalog catalog;
  for (int r = 0; r < 3; ++r) catalog.files.push_back({"__" + std::to_string(r) + "_0.distcp", 0, r});
  Tensor t;
  t.name = "odd";
  t.shape = {4, 4};
  t.fragments = FragmentList(2);
  const Box boxes[] = {{{0, 0}, {1, 4}}, {{1, 0}, {3, 1}}, {{1, 1}, {3, 3}}};
  for (std::uint32_t i = 0; i < 3; ++i) {
    Fragment f;
    f.box = boxes[i];
    f.strides = row_major_strides(f.box.shape);
    f.extent.file = i;
    t.fragments.add(f);
  }
  ASSERT_TRUE(catalog.add(std::move(t)).has_value());
  const InferredMesh m = infer_mesh(catalog);
  EXPECT_EQ(m.placements[0], "irregular (3 boxes)");
  EXPECT_THAT(m.notes, testing::Contains(HasSubstr("'odd'")));
}

TEST(MeshInference, ReportsRanksWithoutAFile) {
  Catalog catalog;
  catalog.files = {{"0", 0, 0}, {"3", 0, 3}};
  const InferredMesh m = infer_mesh(catalog);
  EXPECT_EQ(m.ranks, 4);
  EXPECT_THAT(m.notes, testing::Contains("The highest file number is 3, but 2 ranks below it have no file."));
}

}  // namespace
}  // namespace reshard::mesh_inference_test
