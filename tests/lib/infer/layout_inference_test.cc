#include "lib/infer/layout_inference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "formats/open.h"
#include "lib/base/text.h"
#include "lib/layout/stages.h"
#include "tests/support/checkpoints.h"
#include "tests/support/layouts.h"

namespace reshard::layout_inference_test {
namespace {

using testing::Contains;
using testing::HasSubstr;

std::vector<LayoutDescriptor> layouts_of(const Catalog& catalog) {
  auto layouts = infer_layouts(catalog, infer_mesh(catalog), "test");
  EXPECT_TRUE(layouts.has_value()) << layouts.error().message();
  std::vector<LayoutDescriptor> read;
  for (const LayoutDescriptor& layout : *layouts) {
    auto back = LayoutDescriptor::parse(to_text(layout.to_json(), 2), "l.json");
    EXPECT_TRUE(back.has_value()) << back.error().message();
    EXPECT_EQ(*back, layout);
    read.push_back(*std::move(back));
  }
  return read;
}

using Boxes = std::set<std::pair<Dims, Dims>>;

Boxes stored_boxes(const FragmentList& fragments) {
  Boxes out;
  for (std::size_t i = 0; i < fragments.size(); ++i)
    if (const Box box = fragments.box(i); !box.empty()) out.emplace(box.origin, box.shape);
  return out;
}

// Expects that a descriptor gives every tensor exactly the stored boxes, and every writer those that it wrote.
void expect_boxes_of(const Catalog& catalog, const LayoutDescriptor& layout) {
  Index layers = 0;
  for (const Tensor& t : catalog.tensors()) layers = std::max(layers, layer_number(t.name) + 1);
  for (const Tensor& t : catalog.tensors()) {
    const auto placement = layout.place(t.name, t.shape, layers);
    ASSERT_TRUE(placement.has_value()) << placement.error().message();
    Boxes placed;
    std::vector<Boxes> of_rank;
    for (Index r = 0; r < layout.mesh->ranks(); ++r) {
      of_rank.emplace_back();
      for (const LocalBox& b : owned_boxes(*layout.mesh, *placement, t.shape, r))
        if (!b.box.empty()) of_rank.back().emplace(b.box.origin, b.box.shape);
      placed.insert(of_rank.back().begin(), of_rank.back().end());
    }
    EXPECT_EQ(placed, stored_boxes(t.fragments)) << t.name << " on " << layout.mesh->to_string();
    for (const FragmentList* list : {&t.fragments, &t.replicas})
      for (std::size_t i = 0; i < list->size(); ++i) {
        const Box box = list->box(i);
        const Index rank = catalog.files[list->extent(i).file].writer;
        if (rank < 0 || box.empty()) continue;
        ASSERT_LT(rank, layout.mesh->ranks());
        EXPECT_TRUE(of_rank[static_cast<std::size_t>(rank)].contains({box.origin, box.shape}))
            << t.name << ": rank " << rank << " wrote " << to_string(box.origin) << " on " << layout.mesh->to_string();
      }
  }
}

class SampleLayouts : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(LayoutInference, SampleLayouts,
                         testing::Values("tp8", "fsdp8", "fsdp16", "hsdp2x4", "fsdp4_tp2", "fsdp2_tp2_optim", "pp2_tp4",
                                         "single"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(SampleLayouts, ReadBackGiveEveryRankTheBoxesItWrote) {
  const auto open = open_checkpoint(sample(GetParam()) + "/checkpoint", {.files_too = false});
  ASSERT_TRUE(open.has_value()) << open.error().message();
  const Catalog& catalog = open->reader->catalog();
  const auto layouts = layouts_of(catalog);
  ASSERT_EQ(layouts.size(), 1u) << "nothing else explains a sample";
  expect_boxes_of(catalog, layouts[0]);
  EXPECT_EQ(layouts[0].mesh->ranks(), infer_mesh(catalog).ranks);
  EXPECT_EQ(layouts[0].stored_as, std::string(GetParam()) == "single" ? StoredAs::kWhole : StoredAs::kShards);
}

TEST_P(SampleLayouts, HaveEvidenceForEachLine) {
  const auto open = open_checkpoint(sample(GetParam()) + "/checkpoint", {.files_too = false});
  const auto layouts = layouts_of(open->reader->catalog());
  std::vector<std::string> about;
  for (const LayoutEvidence& e : layouts[0].evidence) {
    about.push_back(e.about);
    EXPECT_FALSE(e.because.empty());
  }
  for (const MeshAxis& axis : layouts[0].mesh->axes())
    EXPECT_THAT(about, Contains(axis.name + "=" + std::to_string(axis.size)));
  for (std::size_t i = 0; i < layouts[0].tensors.size(); ++i)
    EXPECT_THAT(about, Contains("tensors[" + std::to_string(i) + "]"));
  EXPECT_THAT(about, Contains("vocabulary"));
}

TEST(LayoutInference, ThePipelineIsListedByLayers) {
  const auto open = open_checkpoint(sample("pp2_tp4") + "/checkpoint", {.files_too = false});
  const LayoutDescriptor layout = layouts_of(open->reader->catalog())[0];
  ASSERT_TRUE(layout.pipeline.has_value());
  EXPECT_EQ(layout.pipeline->stages,
            (std::vector<std::vector<std::string>>{{"tok_embeddings.weight", "layers.{0..1}.*"},
                                                   {"norm.weight", "output.weight", "layers.{2..3}.*"}}));
}

// ---- checkpoints made here: as ranks of a mesh would write them

Catalog catalog_of(const Mesh& mesh, const std::vector<std::pair<std::string, Dims>>& tensors,
                   const LayoutDescriptor& layout, Index layers) {
  Catalog catalog;
  for (Index r = 0; r < mesh.ranks(); ++r) catalog.files.push_back({"__" + std::to_string(r) + "_0.distcp", 0, r});
  for (const auto& [name, shape] : tensors) {
    Tensor t;
    t.name = name;
    t.shape = shape;
    t.fragments = FragmentList(shape.rank());
    const auto placement = layout.place(name, shape, layers);
    EXPECT_TRUE(placement.has_value()) << placement.error().message();
    for (Index r = 0; r < mesh.ranks(); ++r) {
      if (!is_first_replica(mesh, *placement, r)) continue;
      for (const LocalBox& b : owned_boxes(mesh, *placement, shape, r))
        if (!b.box.empty()) t.fragments.add(b.box, {static_cast<std::uint32_t>(r), 0, 0});
    }
    EXPECT_TRUE(catalog.add(std::move(t)).has_value());
  }
  return catalog;
}

std::vector<std::pair<std::string, Dims>> llama(Index layers, Index vocabulary, bool optimizer) {
  std::vector<std::pair<std::string, Dims>> out = {{"tok_embeddings.weight", {vocabulary, 48}}};
  for (Index l = 0; l < layers; ++l) {
    const std::string prefix = "layers." + std::to_string(l) + ".";
    for (const char* w : {"wq", "wk", "wv", "wo"}) out.push_back({prefix + "attention." + w + ".weight", {48, 48}});
    out.push_back({prefix + "feed_forward.w1.weight", {130, 48}});
    out.push_back({prefix + "feed_forward.w2.weight", {48, 130}});
    out.push_back({prefix + "feed_forward.w3.weight", {130, 48}});
    out.push_back({prefix + "attention_norm.weight", {48}});
  }
  out.push_back({"norm.weight", {48}});
  out.push_back({"output.weight", {vocabulary, 48}});
  if (!optimizer) return out;
  for (std::size_t i = 0, n = out.size(); i < n; ++i) {
    out.push_back({"optimizer.state." + out[i].first + ".exp_avg", out[i].second});
    out.push_back({"optimizer.state." + out[i].first + ".step", {}});
  }
  return out;
}

TEST(LayoutInference, EveryHypothesisGivesTheBoxesOfTorchtitanMeshes) {
  const LayoutDescriptor rules = *LayoutDescriptor::parse(find_builtin_layout("torchtitan-llama")->text, "built-in");
  Index several = 0;
  for (const char* text :
       {"tp=2", "dp_shard=8", "dp_shard=3,tp=4", "dp_replicate=2,dp_shard=4", "pp=3,tp=2", "pp=2,dp_shard=2,tp=2",
        "pp=4,dp_replicate=2,dp_shard=2", "dp_shard=2,cp=2,tp=2", "dp_replicate=4", "dp_shard=16,tp=2"}) {
    const Mesh mesh = *Mesh::parse(text);
    const Catalog catalog = catalog_of(mesh, llama(6, 257, mesh.size("tp") > 2), *rules.with_mesh(mesh), 6);
    const auto layouts = layouts_of(catalog);
    ASSERT_FALSE(layouts.empty()) << text;
    for (const LayoutDescriptor& layout : layouts) expect_boxes_of(catalog, layout);
    several += layouts.size() > 1;
  }
  EXPECT_LT(several, 5);
}

TEST(LayoutInference, AllHypothesesThatFitAreToldAndEachIsConsistent) {
  // Two rows on four ranks: FSDP over all four, two of them with nothing, or FSDP over two, with two replicas.
  Catalog catalog;
  for (int r = 0; r < 4; ++r) catalog.files.push_back({"__" + std::to_string(r) + "_0.distcp", 0, r});
  Tensor t;
  t.name = "a.weight";
  t.shape = {2, 8};
  t.fragments = FragmentList(2);
  for (std::uint32_t r = 0; r < 2; ++r) t.fragments.add({{static_cast<Index>(r), 0}, {1, 8}}, {r, 0, 0});
  ASSERT_TRUE(catalog.add(std::move(t)).has_value());
  const auto layouts = layouts_of(catalog);
  ASSERT_EQ(layouts.size(), 2u);
  EXPECT_NE(layouts[0].mesh, layouts[1].mesh);
  for (const LayoutDescriptor& layout : layouts) expect_boxes_of(catalog, layout);
}

TEST(LayoutInference, NamesThatLookLikePatternsAreTakenLiterally) {
  Catalog catalog;
  catalog.files.push_back({"__0_0.distcp", 0, 0});
  catalog.files.push_back({"__1_0.distcp", 0, 1});
  for (const char* name : {"w[0]", "*", "w{1..3}", "layers.007.w", "layers.7.w?", "layers.8.w?", "."}) {
    Tensor t;
    t.name = name;
    const bool by_columns = std::string_view(name).starts_with("w");
    t.shape = {4, 4};
    t.fragments = FragmentList(2);
    for (std::uint32_t r = 0; r < 2; ++r) {
      const Index at = 2 * static_cast<Index>(r);
      t.fragments.add(by_columns ? Box{{0, at}, {4, 2}} : Box{{at, 0}, {2, 4}}, {r, 0, 0});
    }
    ASSERT_TRUE(catalog.add(std::move(t)).has_value());
  }
  for (const LayoutDescriptor& layout : layouts_of(catalog)) expect_boxes_of(catalog, layout);
}

TEST(LayoutInference, VocabularyRowsAreHeldAgainstTheUsualMultiples) {
  const LayoutDescriptor rules = *LayoutDescriptor::parse(find_builtin_layout("torchtitan-llama")->text, "built-in");
  const Mesh mesh = *Mesh::parse("tp=8");
  const auto evidence = [&](Index rows) {
    const LayoutDescriptor layout = layouts_of(catalog_of(mesh, llama(2, rows, false), *rules.with_mesh(mesh), 2))[0];
    EXPECT_EQ(layout.vocabulary->padded_size, rows);
    EXPECT_EQ(layout.evidence.back().about, "vocabulary");
    return layout.evidence.back();
  };
  EXPECT_EQ(
      evidence(128512).because,
      "128,512 = 64 x tp 8 x 251: padded to this multiple or by chance; only config.json or the tokenizer can tell");
  EXPECT_EQ(evidence(128512).confidence, "unknown");
  EXPECT_EQ(evidence(128256).because, "128,256 is not a multiple of 64 or 128 times tp 8, so padding is unlikely");
  EXPECT_EQ(
      evidence(2048).because,
      "2,048 = 64 x tp 8 x 4 = 128 x tp 8 x 2: padded to this multiple or by chance; only config.json or the tokenizer "
      "can tell");
}

TEST(LayoutInference, WholeTensorsWithoutWritersAreOneRank) {
  Catalog catalog;
  catalog.files.push_back({"model.safetensors", 0});
  Tensor t;
  t.name = "lm_head.weight";
  t.shape = {64, 8};
  t.fragments = FragmentList(2);
  t.fragments.add(whole({64, 8}), {0, 0, 0});
  ASSERT_TRUE(catalog.add(std::move(t)).has_value());
  const auto layouts = layouts_of(catalog);
  ASSERT_EQ(layouts.size(), 1u);
  EXPECT_EQ(layouts[0].mesh, Mesh());
  EXPECT_EQ(layouts[0].stored_as, StoredAs::kWhole);
  EXPECT_THAT(layouts[0].notes, Contains(HasSubstr("nothing tells how many ranks")));
}

TEST(LayoutInference, TensorsThatLieOtherwiseAreNamed) {
  const auto open = open_checkpoint(sample("fsdp8") + "/checkpoint", {.files_too = false});
  Catalog& catalog = open->reader->catalog();
  Tensor odd;
  odd.name = "odd.weight";
  odd.shape = {8, 8};
  odd.fragments = FragmentList(2);
  odd.fragments.add({{0, 0}, {3, 8}}, {0, 0, 0});
  odd.fragments.add({{3, 0}, {5, 8}}, {1, 0, 0});
  ASSERT_TRUE(catalog.add(std::move(odd)).has_value());
  const auto layouts = layouts_of(catalog);
  EXPECT_THAT(layouts[0].notes, Contains("No rule covers 1 tensor that is sharded differently: odd.weight."));
  EXPECT_FALSE(layouts[0].place("odd.weight", {8, 8}, 4).has_value());
}

TEST(LayoutInference, NamesThatAreNoTextAreUnsupported) {
  Catalog catalog;
  catalog.files.push_back({"__0_0.distcp", 0, 0});
  Tensor t;
  t.name = "w\xff";
  t.fragments = FragmentList(0);
  t.fragments.add(whole({}), {0, 0, 0});
  ASSERT_TRUE(catalog.add(std::move(t)).has_value());
  const auto layouts = infer_layouts(catalog, infer_mesh(catalog), "test");
  ASSERT_FALSE(layouts.has_value());
  EXPECT_EQ(layouts.error().code(), ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace reshard::layout_inference_test
