#include "formats/fsdp/optimizer_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reshard::fsdp::optimizer_states_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<std::vector<std::string>> names_of(const FlatUnits& found) {
  std::vector<std::vector<std::string>> out;
  for (const FlatUnit& unit : found.units) {
    out.emplace_back();
    for (const NamedShape* p : unit.parameters) out.back().push_back(p->name);
  }
  return out;
}

const std::vector<NamedShape> kModel = {{"embed", {5, 2}},   {"layers.0.a", {3}}, {"layers.0.b", {2}},
                                        {"layers.1.a", {3}}, {"layers.1.b", {2}}, {"head", {1}}};

TEST(FlatUnits, AreTheRestAndTheLayers) {
  const FlatUnits found = flat_units(kModel, {{0, {4, 4, 4}}, {1, {2, 2, 2}}, {2, {2, 2, 2}}});
  EXPECT_THAT(names_of(found), ElementsAre(ElementsAre("embed", "head"), ElementsAre("layers.0.a", "layers.0.b"),
                                           ElementsAre("layers.1.a", "layers.1.b")));
  EXPECT_EQ(found.units[0].elements, 11);
  const std::vector<NamedShape> layers(kModel.begin() + 1, kModel.end() - 1);
  EXPECT_EQ(flat_units(layers, {{0, {5}}, {1, {5}}}).units.size(), 2U);
}

TEST(FlatUnits, AreParametersWhereThereAreAsManyIds) {
  const std::vector<NamedShape> two = {{"layers.0.a", {3, 2}}, {"layers.0.b", {4}}};
  EXPECT_EQ(flat_units(two, {{0, {6, 0}}, {1, {1, 3}}}).units.size(), 2U);
  EXPECT_THAT(flat_units(two, {{0, {4, 0}}, {1, {1, 3}}}).units, IsEmpty());
}

TEST(FlatUnits, AreNotGuessed) {
  EXPECT_THAT(flat_units(kModel, {{0, {6, 6}}, {1, {3, 3}}}).evidence,
              HasSubstr("2 flat states for 6 parameters in 3 modules"));
  EXPECT_THAT(flat_units(kModel, {{0, {6, 6}}, {1, {3, 3}}, {7, {4, 4}}}).evidence,
              HasSubstr("of id 7 do not have the"));
  EXPECT_THAT(flat_units(kModel, {{0, {6, 6}}, {1, {3, 3}}, {7, {}}}).evidence, HasSubstr("of id 7 do not have the"));
  EXPECT_THAT(flat_units({}, {}).units, IsEmpty());
}

TEST(WithoutBuffers, OneWayAloneCounts) {
  const std::vector<NamedShape> tensors = {{"a", {2, 2}}, {"a.mean", {2}}, {"b", {2, 2}}, {"count", {}}};
  const auto names = [&](const std::vector<std::optional<Dims>>& shapes) {
    std::vector<ParameterId> ids;
    for (const auto& shape : shapes) ids.push_back({static_cast<Index>(ids.size()), shape});
    std::vector<std::string> out;
    const auto found = without_buffers(tensors, ids);
    if (!found) return std::vector<std::string>{"none"};
    for (const NamedShape& p : *found) out.push_back(p.name);
    return out;
  };
  EXPECT_THAT(names({Dims{2, 2}, Dims{2, 2}}), ElementsAre("a", "b"));
  EXPECT_THAT(names({Dims{2, 2}, Dims{2}, Dims{2, 2}}), ElementsAre("a", "a.mean", "b"));
  EXPECT_THAT(names({Dims{2, 2}}), ElementsAre("none"));  // either of the two fits
  EXPECT_THAT(names({Dims{2, 2}, std::nullopt}), ElementsAre("none"));
  EXPECT_THAT(names({Dims{3}}), ElementsAre("none"));
}

}  // namespace
}  // namespace reshard::fsdp::optimizer_states_test
