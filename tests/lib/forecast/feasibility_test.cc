// Tests the feasibility of meshes: numbers computed by hand for published models, and ranks' memory against the boxes
// that they own.
#include "lib/forecast/feasibility.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "lib/layout/stages.h"
#include "lib/model/parameters.h"
#include "tests/support/layouts.h"

namespace reshard::feasibility_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

ModelConfig config_of(const std::string& name) { return *read_config(RESHARD_TEST_DATA "/configs/" + name + ".json"); }

const Family& builtin_family(const ModelConfig& config) { return *family_of_model_type(config.model_type); }

Feasibility check(const std::string& model, const std::string& mesh, std::optional<Index> world = {},
                  std::optional<Index> sequence = {}) {
  const ModelConfig config = config_of(model);
  const FeasibilityRequest request{*parse_degrees(mesh), world, sequence, {}};
  return *check_feasibility(builtin_family(config), config, request);
}

std::vector<std::string> ids(const Feasibility& f) {
  std::vector<std::string> out;
  for (const Finding& finding : f.findings) out.push_back(finding.id);
  return out;
}

const CheckRun& check_named(const Feasibility& f, const std::string& id) {
  return *std::find_if(f.checks.begin(), f.checks.end(), [&](const CheckRun& c) { return c.id == id; });
}

// ---- degrees

TEST(Degrees, DpIsShardedAndEpIsNoFactor) {
  const Degrees d = *parse_degrees("tp=2,ep=8,dp=4,pp=3");
  EXPECT_EQ(d.mesh.ranks(), 24);
  EXPECT_EQ(d.mesh.size("dp_shard"), 4);
  EXPECT_EQ(d.ep, 8);
  EXPECT_EQ(to_string(d), "pp=3, dp_shard=4, tp=2, ep=8");
  EXPECT_EQ(to_string(*parse_degrees("ep=1,tp=1")), "one rank");
  EXPECT_EQ(parse_degrees("ep=16")->mesh.ranks(), 1);
}

TEST(Degrees, WhatIsNoMeshIsWrongUsage) {
  for (const char* text : {"", "tp", "tp=0", "dp", "dp=", "dp=2,dp_shard=2", "ep=2,ep=2", "ep=-1", "xp=2", "tp=2,",
                           "pp=1000000,tp=1000000"}) {
    const auto d = parse_degrees(text);
    ASSERT_FALSE(d) << text;
    EXPECT_EQ(d.error().code(), ErrorCode::kUsage) << text;
  }
}

// ---- findings

TEST(Feasibility, Llama405bFitsTheMeshItWasTrainedOn) {
  const Feasibility f = check("llama-3.1-405b", "pp=16,cp=16,dp=8,tp=8", 16384, 131072);
  EXPECT_THAT(f.findings, IsEmpty());
  EXPECT_EQ(f.elements, 405'853'388'800);
  for (const CheckRun& c : f.checks) EXPECT_TRUE(c.skipped.empty() || c.id == "experts") << c.id;
}

TEST(Feasibility, SixteenRanksDoNotShareEightKeyValueHeads) {
  const Feasibility f = check("llama-3.1-8b", "tp=16", 16);
  ASSERT_THAT(ids(f), ElementsAre("heads-exceeded"));
  const Finding& finding = f.findings[0];
  EXPECT_EQ(finding.what, "tp=16 exceeds num_key_value_heads = 8");
  EXPECT_EQ(finding.tensors.size(), 64u);  // k and v of 32 layers
  EXPECT_THAT(finding.why, ElementsAre("1,024 rows / 16 = 64 per rank: 1/2 of a head of width 128"));
  EXPECT_THAT(finding.advice, HasSubstr("up to this one that fits: 8."));
  EXPECT_THAT(finding.advice, HasSubstr("each head on 2 ranks"));
  EXPECT_THAT(finding.advice, HasSubstr("k_proj.weight grows from 4,194,304 to 8,388,608 elements, [2048, 4096]"));
}

TEST(Feasibility, NoCopiesAreProposedWhereQueryHeadsDoNotDivideEither) {
  const Feasibility f = check("qwen2.5-0.5b", "tp=4");  // 14 heads, 2 key-value heads
  EXPECT_THAT(ids(f), ElementsAre("heads-uneven", "heads-exceeded"));
  for (const Finding& finding : f.findings) {
    EXPECT_THAT(finding.advice, testing::Not(HasSubstr("each head on")));
    EXPECT_THAT(finding.advice, HasSubstr("fits: 2."));
  }
}

TEST(Feasibility, FusedSectionsAreCutOneByOne) {
  const Feasibility f = check("gpt2", "tp=8");  // 12 heads of 64
  ASSERT_THAT(ids(f), ElementsAre("heads-uneven", "vocabulary-uneven"));
  EXPECT_THAT(f.findings[0].why,
              testing::Contains("768 columns of each of 3 sections / 8 = 96 per rank: 1 1/2 heads of "
                                "width 64"));
  EXPECT_THAT(f.findings[0].advice, HasSubstr("fits: 6."));
}

TEST(Feasibility, AnUnevenVocabularyIsAWarningWithEveryFrameworksPadding) {
  const Feasibility f = check("gpt2", "tp=2");
  ASSERT_THAT(ids(f), ElementsAre("vocabulary-uneven"));
  EXPECT_EQ(f.findings[0].severity, Severity::kWarning);
  EXPECT_THAT(f.findings[0].why[0], HasSubstr("25,129 rows for the first ranks and 25,128 for the last"));
  ASSERT_EQ(f.paddings.size(), 2u);
  EXPECT_EQ(f.paddings[0].rows, 50'432);  // 197 x 128 x 2
  EXPECT_EQ(f.paddings[1].rows, 50'304);  // 393 x 64 x 2
}

TEST(Feasibility, TheFeedForwardPartHasToDivide) {
  const Feasibility f = check("llama-2-7b", "tp=64");  // 32 heads, intermediate 11,008 = 64 x 172
  EXPECT_THAT(ids(f), ElementsAre("heads-exceeded", "heads-exceeded"));
  const Feasibility g = check("mixtral-8x7b-v0.1", "tp=3");  // 14,336 = 3 x 4,778 + 2
  EXPECT_THAT(ids(g), ElementsAre("heads-uneven", "heads-uneven", "tp-uneven", "vocabulary-uneven"));
  EXPECT_EQ(g.findings[2].what, "tp=3 does not divide intermediate_size 14,336");
  EXPECT_EQ(g.findings[2].tensors.size(), 3u * 8 * 32);
  EXPECT_THAT(g.findings[2].why[0], HasSubstr("leaves 2: ranks would hold 4,779 and 4,778"));
}

TEST(Feasibility, DegreesThatGiveHalfTheWorldNameTheOneThatFits) {
  const Feasibility f = check("llama-3.1-405b", "tp=8,cp=16,pp=16,dp=4", 16384);
  ASSERT_THAT(ids(f), ElementsAre("world-size"));
  const Finding& finding = f.findings[0];
  EXPECT_EQ(finding.what, "the degrees multiply to 8,192 ranks, but --world is 16,384");
  EXPECT_EQ(finding.why[0], "pp 16 x dp_shard 4 x cp 16 x tp 8 = 8,192: 1/2 of 16,384");
  EXPECT_THAT(finding.why[1], HasSubstr("tp=16 exceeds num_key_value_heads = 8"));
  EXPECT_EQ(finding.advice,
            "With the other degrees unchanged, this fits: dp_shard=8 instead of 4, or cp=32 instead of 16, or pp=32 "
            "instead of 16.");
}

TEST(Feasibility, AWorldThatNoDegreeFitsGetsItsNeighbours) {
  const Feasibility f = check("llama-3.1-8b", "tp=8,pp=2", 1000);
  ASSERT_THAT(ids(f), ElementsAre("world-size"));
  EXPECT_THAT(f.findings[0].advice, HasSubstr("992 with dp_shard=62, and 1,008 with dp_shard=63"));
  EXPECT_THAT(check("llama-3.1-8b", "tp=8", 3).findings[0].advice, HasSubstr("ranks with the other degrees: 8 with"));
}

TEST(Feasibility, StagesNeedLayers) {
  EXPECT_THAT(check("gpt2", "pp=12").findings, IsEmpty());
  EXPECT_THAT(check("gpt2", "pp=14").findings[0].id, "stages-exceeded");
  EXPECT_FALSE(check("gpt2", "pp=14").stages.empty());  // with torchtitan's rule each end has a stage
  EXPECT_TRUE(check("gpt2", "pp=15").stages.empty());
  const Feasibility f = check("gpt2", "pp=5");  // 12 layers, 14 parts: 3 3 3 3 2
  ASSERT_THAT(ids(f), ElementsAre("stages-uneven"));
  EXPECT_EQ(f.findings[0].severity, Severity::kNote);
  EXPECT_THAT(f.findings[0].why[0], HasSubstr("stage 0: 2, stages 1..3: 3, stage 4: 1"));
}

TEST(Feasibility, EpDividesTheExpertsAndTheRanksItSharesOut) {
  EXPECT_THAT(check("mixtral-8x7b-v0.1", "dp=8,ep=8").findings, IsEmpty());
  EXPECT_THAT(check("mixtral-8x7b-v0.1", "dp=4,tp=2,ep=8").findings, IsEmpty());
  EXPECT_THAT(ids(check("mixtral-8x7b-v0.1", "dp=6,ep=6")), ElementsAre("experts-uneven"));
  EXPECT_THAT(ids(check("mixtral-8x7b-v0.1", "dp=6,ep=4")), ElementsAre("experts-degree"));
  EXPECT_THAT(ids(check("llama-3.1-8b", "dp=2,ep=2")), ElementsAre("experts-none"));
}

TEST(Feasibility, ExpertsAreNotCutByTensorParallelismWhereEpTakesItsRanks) {
  const ModelConfig config = config_of("qwen3-30b-a3b");  // 128 experts of 768, 4 key-value heads
  EXPECT_EQ(config.number("moe_intermediate_size"), 768);
  const auto sharding = expert_sharding(*parse_degrees("dp=2,tp=4,ep=8"));
  ASSERT_TRUE(sharding);
  EXPECT_FALSE(sharding->is_cut_by_tp);
  EXPECT_EQ(sharding->shards, 1);
  EXPECT_EQ(expert_sharding(*parse_degrees("dp=8,cp=2,tp=4,ep=8"))->shards, 2);
  EXPECT_FALSE(expert_sharding(*parse_degrees("dp=3,ep=2")));
}

TEST(Feasibility, ShardsWithoutRowsAreANote) {
  const Feasibility f = check("mixtral-8x7b-v0.1", "dp=64");  // the router has 8 rows
  ASSERT_THAT(ids(f), ElementsAre("shards-empty"));
  EXPECT_EQ(f.findings[0].severity, Severity::kNote);
  EXPECT_EQ(f.findings[0].tensors.size(), 32u);
  EXPECT_THAT(f.findings[0].why, ElementsAre("8 rows for 64 shards: 56 ranks hold nothing of it"));
}

TEST(Feasibility, SequencesDivideByTwiceCp) {
  EXPECT_THAT(check("llama-3.1-8b", "cp=4", {}, 8192).findings, IsEmpty());
  const Feasibility f = check("llama-3.1-8b", "cp=4", {}, 8196);
  ASSERT_THAT(ids(f), ElementsAre("sequence-uneven"));
  EXPECT_THAT(f.findings[0].advice, HasSubstr("8,192 and 8,200"));
  EXPECT_THAT(ids(check("llama-3.1-8b", "cp=4,tp=8", {}, 8200)), ElementsAre("sequence-tp"));
  EXPECT_FALSE(check_named(check("llama-3.1-8b", "cp=4"), "sequence").skipped.empty());
}

// ---- memory

TEST(RankMemory, OneRankHoldsTheWholeModel) {
  for (const char* model : {"llama-3.1-8b", "qwen2.5-0.5b", "gpt2", "mixtral-8x7b-v0.1", "gemma-2-9b"}) {
    const Feasibility f = check(model, "tp=1");
    ASSERT_EQ(f.stages.size(), 1u);
    const RankMemory& m = f.stages[0].largest;
    const Index width = byte_size(weight_dtype(f.parameters[0], {}));
    EXPECT_EQ(m.parameters, f.elements) << model;
    EXPECT_EQ(m.weights, width * f.elements) << model;
    EXPECT_EQ(m.gradients, 4 * f.elements) << model;
    EXPECT_EQ(m.optimizer, (width == 4 ? 8 : 12) * f.elements) << model;
  }
}

TEST(RankMemory, Llama405bByHand) {
  // For a layer: q and o 16384^2 / 8 each, k and v 1024 x 16384 / 8 each, three matrices of 53248 x 16384 / 8, two
  // norms.
  constexpr Index kLayer = (2 * 16384 * 16384 + 2 * 1024 * 16384 + 3 * Index{53248} * 16384) / 8 + 2 * 16384;
  const Feasibility f = check("llama-3.1-405b", "pp=16,tp=8,dp_replicate=128", 16384);
  ASSERT_EQ(f.stages.size(), 16u);
  EXPECT_EQ(f.stages[1].largest.parameters, 8 * kLayer);
  EXPECT_EQ(f.stages[0].largest.parameters, 7 * kLayer + 128256 / 8 * 16384);
  EXPECT_EQ(f.stages[15].largest.parameters, 7 * kLayer + 128256 / 8 * 16384 + 16384);
  EXPECT_EQ(f.stages[1].largest.rank, 128 * 8);
  EXPECT_EQ(f.stages[15].first_layer, 119);
  EXPECT_EQ(f.stages[15].layers, 7);
}

TEST(RankMemory, ATiedHeadNeedsACopyOnAStageOfItsOwn) {
  const Index one = check("qwen2.5-0.5b", "pp=1").elements;
  const Feasibility two = check("qwen2.5-0.5b", "pp=2");
  EXPECT_EQ(two.stages[0].largest.parameters + two.stages[1].largest.parameters, one + 151'936 * 896);
}

TEST(RankMemory, ScalesAreBytesAndNoParameters) {
  const ModelConfig config = config_of("deepseek-v3");
  const Feasibility f = check("deepseek-v3", "tp=1");
  EXPECT_EQ(f.stages[0].largest.parameters, f.elements);
  Index bytes = 0;
  for (const Parameter& p : f.parameters) bytes += volume(p.shape) * byte_size(*dtype_from_torch(p.dtype));
  EXPECT_EQ(f.stages[0].largest.weights, bytes);
  // In bfloat16 there are no scales. The routers of 58 layers with 256 experts, and their biases, stay float32.
  FeasibilityRequest request;
  request.memory.weights = DType::kBFloat16;
  const Feasibility g = *check_feasibility(builtin_family(config), config, request);
  EXPECT_EQ(g.stages[0].largest.weights, 2 * f.elements + 2 * 58 * 256 * (7168 + 1));
}

// Returns a model with every kind of cut that is small enough to be counted rank by rank.
ModelConfig small_model(Rng& rng, bool is_gpt2) {
  Json json = Json::object();
  const Index heads = 1 + below(rng, 6);
  if (is_gpt2) {
    json.set("model_type", "gpt2").set("n_embd", heads * (1 + below(rng, 9))).set("n_head", heads);
    json.set("n_layer", 1 + below(rng, 7)).set("n_positions", 1 + below(rng, 20));
  } else {
    json.set("model_type", "llama")
        .set("hidden_size", heads * 2 * (1 + below(rng, 9)))
        .set("num_attention_heads", heads);
    json.set("num_hidden_layers", 1 + below(rng, 7)).set("intermediate_size", 1 + below(rng, 50));
    json.set("tie_word_embeddings", below(rng, 2) == 0);
  }
  json.set("vocab_size", 1 + below(rng, 60));
  return *ModelConfig::parse(json, "config.json");
}

Placement placement_of(const Parameter& p, Index layers, Index stages) {
  Placement placement;
  if (p.rule->tp_dim >= 0) placement.splits.push_back({{"tp"}, p.rule->tp_dim, p.rule->sections});
  placement.splits.push_back({{"dp_shard", "cp"}, 0});
  placement.stage = p.rule->place == NameRule::Place::kFirst ? 0
                    : p.rule->place == NameRule::Place::kLast
                        ? stages - 1
                        : stage_of_layer(StageRule::kTorchtitan, p.layer, layers, stages);
  return placement;
}

TEST(RankMemory, IsTheSumOfTheBoxesThatRanksOwn) {
  Rng rng(20240806);
  for (int round = 0; round < 60; ++round) {
    const ModelConfig config = small_model(rng, round % 2 == 0);
    const Index layers = config.num_hidden_layers();
    const Mesh mesh = random_mesh(rng);
    const Index stages = mesh.size("pp");
    if (stages > layers + 2) continue;
    const auto table = *parameters(builtin_family(config), config);
    const auto memory = stage_memory(table, layers, {mesh, 1}, {});
    std::vector<Index> most(static_cast<std::size_t>(stages)), least(most.size(), INT64_MAX);
    for (Index rank = 0; rank < mesh.ranks(); ++rank) {
      Index held = 0;
      for (const Parameter& p : table) {
        if (p.is_tied && stages == 1) continue;
        for (const LocalBox& b : owned_boxes(mesh, placement_of(p, layers, stages), p.shape, rank))
          held += volume(b.box);
      }
      const auto stage = static_cast<std::size_t>(mesh.coordinate(rank, "pp"));
      most[stage] = std::max(most[stage], held);
      least[stage] = std::min(least[stage], held);
    }
    for (std::size_t s = 0; s < memory.size(); ++s) {
      EXPECT_EQ(memory[s].largest.parameters, most[s]) << mesh.to_string() << " stage " << s;
      EXPECT_EQ(memory[s].smallest.parameters, least[s]) << mesh.to_string() << " stage " << s;
    }
  }
}

TEST(RankMemory, ExpertsAreDealtOutCompletely) {
  // All experts divide evenly here, so the ranks together hold the experts once and the rest on every rank.
  for (const char* mesh : {"dp=8", "dp=8,ep=4", "dp=4,tp=2,ep=8", "dp=4,cp=2,ep=8"}) {
    const Feasibility f = check("mixtral-8x7b-v0.1", mesh);
    Index experts = 0, norms = 0;
    for (const Parameter& p : f.parameters) {
      if (p.expert >= 0) experts += volume(p.shape);
      if (p.rule->tp_dim < 0) norms += volume(p.shape);
    }
    EXPECT_EQ(experts, Index{3} * 8 * 32 * 4096 * 14336);
    const Degrees degrees = *parse_degrees(mesh);
    // Norms and routers are on every rank of tp.
    const Index held = f.elements + norms * (degrees.mesh.size("tp") - 1);
    EXPECT_EQ(f.stages[0].largest.parameters * degrees.mesh.ranks(), held) << mesh;
    EXPECT_EQ(f.stages[0].smallest.parameters * degrees.mesh.ranks(), held) << mesh;
  }
}

TEST(RankMemory, AModelThatCannotBeCountedIsRefused) {
  Json json = Json::object();
  json.set("model_type", "llama").set("vocab_size", Index{1} << 30).set("hidden_size", Index{1} << 30);
  json.set("num_hidden_layers", 1).set("num_attention_heads", 1).set("intermediate_size", 1);
  const ModelConfig config = *ModelConfig::parse(json, "config.json");
  const auto f = check_feasibility(builtin_family(config), config, {});
  ASSERT_FALSE(f);
  EXPECT_EQ(f.error().message(), "config.json: describes more than 36,028,797,018,963,968 elements");
}

}  // namespace
}  // namespace reshard::feasibility_test
