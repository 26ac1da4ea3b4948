// Tests how DeepSpeed's reader joins parameters: runs in the vectors of data-parallel ranks, parts of tensor-parallel
// ranks, and the names of a pipeline's layers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "formats/deepspeed/flat_groups.h"
#include "formats/deepspeed/pipeline_names.h"
#include "formats/deepspeed/tensor_parallel.h"

namespace reshard::deepspeed::parts_test {
namespace {

using testing::HasSubstr;

// The runs of a parameter: rank, begin, end, and position in the rank's vector.
using Runs = std::vector<std::array<Index, 4>>;
Runs runs_of(const FlatParameter& parameter) {
  Runs out;
  for (const Run& run : parameter.runs) out.push_back({static_cast<Index>(run.rank), run.begin, run.end, run.at});
  return out;
}

StoredTensor vector_of(Index length) {
  StoredTensor out;
  out.box = whole(Dims{length});
  out.strides = {1};
  out.dtype = DType::kFloat32;
  return out;
}

// Returns ranks whose only group has vectors of these lengths.
std::vector<RankStates> ranks_of(const std::vector<Index>& lengths, bool cuts_parameters) {
  std::vector<RankStates> out;
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    RankStates rank{"rank" + std::to_string(r), {}};
    rank.states.cuts_parameters = cuts_parameters;
    rank.states.partition_counts = {static_cast<Index>(lengths.size())};
    rank.states.groups.resize(1);
    rank.states.groups[0].master = vector_of(lengths[r]);
    out.push_back(std::move(rank));
  }
  return out;
}

const std::vector<Group> kGroup = {{{"a", {3}}, {"b", {2, 2}}}};

TEST(FlatGroups, OneVectorIsCutAcrossParameters) {
  const auto found = find_parameters(ranks_of({4, 4}, false), kGroup);  // a a a b | b b b 0
  ASSERT_TRUE(found) << found.error().message();
  ASSERT_EQ(found->size(), 2u);
  EXPECT_EQ(runs_of((*found)[0]), (Runs{{0, 0, 3, 0}}));
  EXPECT_EQ(runs_of((*found)[1]), (Runs{{0, 0, 1, 3}, {1, 1, 4, 0}}));
}

TEST(FlatGroups, EachParameterIsCutOnItsOwn) {
  const auto found = find_parameters(ranks_of({4, 4}, true), kGroup);  // a a b b | a 0 b b
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_EQ(runs_of((*found)[0]), (Runs{{0, 0, 2, 0}, {1, 2, 3, 0}}));
  EXPECT_EQ(runs_of((*found)[1]), (Runs{{0, 0, 2, 2}, {1, 2, 4, 2}}));
}

TEST(FlatGroups, VectorsOfAnotherLengthAreOfAnotherRun) {
  for (const bool cuts_parameters : {false, true}) {
    const auto found = find_parameters(ranks_of({8, 8}, cuts_parameters), kGroup);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().code(), ErrorCode::kCorrupt);
    EXPECT_THAT(found.error().message(), HasSubstr("rank0: group 0: expected"));
  }
  auto ranks = ranks_of({4, 4}, true);
  ranks[1].states.partition_counts = {3};
  EXPECT_THAT(find_parameters(ranks, kGroup).error().message(), HasSubstr("partition_count of group 0: expected 2"));
}

TEST(FlatGroups, SlicesNameTheParametersWhereNothingElseDoes) {
  auto ranks = ranks_of({4, 4}, false);
  ranks[0].states.slices = {{{"a", 0, 3}, {"b", 3, 1}}};
  ranks[1].states.slices = {{{"b", 0, 3}}};
  const std::map<std::string, Dims> shapes = {{"a", {3}}, {"b", {2, 2}}};
  const auto found = find_parameters(ranks, shapes);
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_EQ(runs_of((*found)[1]), (Runs{{0, 0, 1, 3}, {1, 1, 4, 0}}));
  ranks[1].states.slices = {{{"b", 0, 2}}};
  EXPECT_THAT(find_parameters(ranks, shapes).error().message(), HasSubstr("'b': expected all of [2, 2]"));
  ranks[1].states.slices = {{{"c", 0, 3}}};
  EXPECT_THAT(find_parameters(ranks, shapes).error().message(), HasSubstr("'c' is not in the model states"));
}

TEST(FlatGroups, StackedExpertsAreParametersOfTheirOwn) {
  const std::vector<Group> experts = {{{"w1", {2, 3}}}};
  // Ranks 0 and 2 have experts 0 and 1, ranks 1 and 3 have experts 2 and 3; each has three numbers.
  for (const bool cuts_parameters : {false, true}) {
    auto ranks = ranks_of({3, 3, 3, 3}, cuts_parameters);
    for (RankStates& rank : ranks) rank.states.partition_counts = {2};
    const auto found = find_parameters(ranks, experts, {{"w1", 4}});
    ASSERT_TRUE(found) << found.error().message();
    ASSERT_EQ(found->size(), 4u);
    EXPECT_EQ((*found)[3].parameter.name, "w1.3");
    EXPECT_EQ((*found)[3].parameter.shape, (Dims{3}));
    EXPECT_EQ(runs_of((*found)[1]), (Runs{{2, 0, 3, 0}}));
    EXPECT_EQ(runs_of((*found)[2]), (Runs{{1, 0, 3, 0}}));
    EXPECT_THAT(find_parameters(ranks, experts, {{"w1", 6}}).error().message(),
                HasSubstr("'w1': expected 6 experts on 2 ranks, got 2 on each"));
    EXPECT_THAT(find_parameters(ranks, experts).error().message(), HasSubstr("partition_count of group 0"));
  }
  // An expert that two ranks share: five numbers and a rank's padding, cut in threes.
  auto ranks = ranks_of({3, 3}, false);
  const auto found = find_parameters(ranks, std::vector<Group>{{{"w1", {1, 5}}}}, {{"w1", 1}});
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_EQ(runs_of((*found)[0]), (Runs{{0, 0, 3, 0}, {1, 3, 5, 0}}));
}

TEST(FlatGroups, ExpertsAreNumberedInTheWholeModel) {
  const auto number = expert_number("l.0.deepspeed_experts.12.w");
  ASSERT_TRUE(number);
  EXPECT_EQ(number->number, 12);
  EXPECT_FALSE(expert_number("l.0.deepspeed_experts.w"));
  EXPECT_FALSE(expert_number("l.0.experts.1.w"));
  // Two ranks have one expert each, both numbered 0, and whole vectors.
  auto ranks = ranks_of({4, 4}, false);
  for (RankStates& rank : ranks) rank.states.partition_counts = {1};
  const auto found = find_parameters(ranks, std::vector<Group>{{{"deepspeed_experts.0.w", {4}}}});
  EXPECT_FALSE(found) << "a name that nothing is before is of no list of experts";
  const auto of_layer = find_parameters(ranks, std::vector<Group>{{{"l.deepspeed_experts.0.w", {4}}}});
  ASSERT_TRUE(of_layer) << of_layer.error().message();
  ASSERT_EQ(of_layer->size(), 2u);
  EXPECT_EQ((*of_layer)[0].parameter.name, "l.deepspeed_experts.0.w");
  EXPECT_EQ((*of_layer)[1].parameter.name, "l.deepspeed_experts.1.w");
  EXPECT_EQ(runs_of((*of_layer)[1]), (Runs{{1, 0, 4, 0}}));
}

TEST(TensorParallelParts, JoinAlongTheDimensionOfTheCut) {
  TensorParallelInfo info;
  info.rows = {"o"};
  info.replicated = {"norm"};
  EXPECT_EQ(info.cut_of("q").dim, 0);
  EXPECT_EQ(info.cut_of("o").dim, 1);
  EXPECT_EQ(info.cut_of("norm").dim, -1);
  const auto rows = join_parts(info.cut_of("o"), {{4, 3}, {4, 2}});
  ASSERT_TRUE(rows) << rows.error().message();
  EXPECT_EQ(rows->shape, (Dims{4, 5}));
  EXPECT_EQ(rows->of_rank[1], (std::vector<LocalBox>{{{{0, 3}, {4, 2}}, {0, 0}}}));
  const auto copies = join_parts(info.cut_of("norm"), {{4}, {4}});
  ASSERT_TRUE(copies);
  EXPECT_TRUE(copies->is_replicated);
  EXPECT_EQ(copies->shape, Dims{4});
}

TEST(TensorParallelParts, SectionsAreCutEachForItself) {
  PartCut cut;
  cut.dim = 0;
  cut.widths = {{2, 1}, {1, 1}};  // q of 3 rows, k of 2
  const auto joined = join_parts(cut, {{3, 2}, {2, 2}});
  ASSERT_TRUE(joined) << joined.error().message();
  EXPECT_EQ(joined->shape, (Dims{5, 2}));
  EXPECT_EQ(joined->of_rank[0], (std::vector<LocalBox>{{{{0, 0}, {2, 2}}, {0, 0}}, {{{3, 0}, {1, 2}}, {2, 0}}}));
  EXPECT_EQ(joined->of_rank[1], (std::vector<LocalBox>{{{{2, 0}, {1, 2}}, {0, 0}}, {{{4, 0}, {1, 2}}, {1, 0}}}));
  for (const std::vector<Dims>& wrong : {std::vector<Dims>{{4, 2}, {2, 2}}, {{3, 2}, {2, 3}}, {{3, 2}, {2}}}) {
    const auto refused = join_parts(cut, wrong);
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().message(), HasSubstr("not parts of one parameter"));
  }
}

TEST(TensorParallelParts, CopiesBecomeReplicas) {
  Tensor part;
  part.name = "norm";
  part.dtype = DType::kFloat32;
  part.shape = {4};
  part.fragments = FragmentList(1);
  part.fragments.add(whole(part.shape), {0, 0, 16});
  const auto parts = join_parts({}, {{4}, {4}});
  ASSERT_TRUE(parts);
  std::optional<Tensor> with, without;
  for (Index rank = 0; rank < 2; ++rank) {
    add_part(with, part, *parts, rank, true);
    add_part(without, part, *parts, rank, false);
  }
  EXPECT_EQ(with->fragments.size(), 1u);
  EXPECT_EQ(with->replicas.size(), 1u);
  EXPECT_EQ(without->replicas.size(), 0u);
}

TEST(PipelineNames, AreThoseOfTheFamilyWhoseLayersTheyEnd) {
  std::map<std::string, Dims> parameters = {{"0.word_embeddings.weight", {64, 8}}};
  for (const std::string layer : {"1.", "2."})
    for (const char* const name :
         {"input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
          "self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
          "mlp.down_proj.weight"})
      parameters[layer + name] = std::string_view(name).ends_with("norm.weight") ? Dims{8} : Dims{8, 8};
  parameters["3.weight"] = {8};
  const PipelineNames found = name_pipeline(parameters);
  ASSERT_NE(found.family, nullptr);
  EXPECT_EQ(found.names.at("0.word_embeddings.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(found.names.at("2.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight");
  EXPECT_EQ(found.names.at("3.weight"), "model.norm.weight");
  EXPECT_THAT(found.evidence, HasSubstr("layers 1 to 2"));
  parameters["2.mlp.other.weight"] = {8, 8};
  EXPECT_EQ(name_pipeline(parameters).family, nullptr);
  EXPECT_EQ(name_pipeline({{"embed.weight", {8}}}).family, nullptr) << "no layers of a pipeline";
}

}  // namespace
}  // namespace reshard::deepspeed::parts_test
