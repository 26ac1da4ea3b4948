#include "formats/tensor_files/parameter_ids.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reshard::parameter_ids_test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<ParameterId> ids_of(const std::vector<Dims>& shapes) {
  std::vector<ParameterId> out;
  for (const Dims& shape : shapes) out.push_back({static_cast<Index>(out.size()), shape});
  return out;
}

TEST(ParameterIds, FollowTheModelAcrossStagesThatInterleave) {
  const std::vector<NamedShape> stored = {{"embed.weight", {9, 2}}, {"layers.0.w", {2, 2}}, {"layers.2.w", {2, 2}},
                                          {"layers.1.w", {2, 2}},   {"layers.3.w", {2, 2}}, {"norm.weight", {2}}};
  const auto names = name_parameters(stored, NameOrder::kByStage, ids_of({{9, 2}, {2, 2}, {2, 2}, {2, 2}, {2, 2}, {2}}),
                                     {{0, 1, 2, 3, 4, 5}});
  EXPECT_THAT(names.names,
              ElementsAre("embed.weight", "layers.0.w", "layers.1.w", "layers.2.w", "layers.3.w", "norm.weight"));
}

// A model of two towers numbers its layers twice.
TEST(ParameterIds, KeepTheOrderOfAModelThatIsWhole) {
  const std::vector<NamedShape> stored = {
      {"visual.blocks.0.w", {2, 2}}, {"visual.blocks.1.w", {2, 2}}, {"layers.0.w", {3, 3}}, {"layers.1.w", {3, 3}}};
  const auto ids = ids_of({{2, 2}, {2, 2}, {3, 3}, {3, 3}});
  EXPECT_THAT(name_parameters(stored, NameOrder::kAsDefined, ids, {}).names,
              ElementsAre("visual.blocks.0.w", "visual.blocks.1.w", "layers.0.w", "layers.1.w"));
  EXPECT_THAT(name_parameters(stored, NameOrder::kByStage, ids, {}).names, IsEmpty());
}

TEST(ParameterIds, FindTheGroupsOfWeightDecay) {
  const std::vector<NamedShape> stored = {{"a.weight", {4, 2}}, {"a.bias", {4}}, {"b.weight", {3, 4}}, {"b.bias", {3}}};
  const auto names = name_parameters(stored, NameOrder::kByStage, ids_of({{4, 2}, {3, 4}, {4}, {3}}), {{0, 1}, {2, 3}});
  EXPECT_THAT(names.names, ElementsAre("a.weight", "b.weight", "a.bias", "b.bias"));
  EXPECT_EQ(names.evidence,
            "4 ids in matrices first, then vectors, each in the order in which the model defines them; the shapes of 4 "
            "agree");
  const auto reversed =
      name_parameters(stored, NameOrder::kByStage, ids_of({{4}, {3}, {4, 2}, {3, 4}}), {{0, 1}, {2, 3}});
  EXPECT_THAT(reversed.names, ElementsAre("a.bias", "b.bias", "a.weight", "b.weight"));
}

TEST(ParameterIds, AreNotGuessed) {
  const std::vector<NamedShape> stored = {{"a", {4, 2}}, {"b", {4}}};
  EXPECT_EQ(name_parameters(stored, NameOrder::kByStage, ids_of({{4, 2}}), {}).evidence, "1 id for 2 parameters");
  EXPECT_EQ(name_parameters(stored, NameOrder::kByStage, ids_of({{4}, {4, 2}}), {}).evidence,
            "the shapes of the ids fit no known order of the parameters");
  EXPECT_EQ(name_parameters(stored, NameOrder::kSorted, ids_of({{4, 2}, {4}}), {}).evidence,
            "the index is sorted by name, and the order of this model's parameters is unknown");
  const std::vector<ParameterId> stateless = {{0, std::nullopt}, {1, std::nullopt}};
  EXPECT_THAT(name_parameters(stored, NameOrder::kByStage, stateless, {}).names, IsEmpty());
  // Two groups, with states for the first parameter of each kind only: two orders fit.
  const std::vector<NamedShape> four = {{"a", {2, 2}}, {"b", {2}}, {"c", {2, 2}}, {"d", {2}}};
  const std::vector<ParameterId> first = {{0, Dims{2, 2}}, {1, std::nullopt}, {2, std::nullopt}, {3, Dims{2}}};
  EXPECT_EQ(name_parameters(four, NameOrder::kByStage, first, {{0, 1}, {2, 3}}).evidence,
            "the shapes fit 2 orders of the parameters");
}

}  // namespace
}  // namespace reshard::parameter_ids_test
