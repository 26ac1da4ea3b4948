// Tests names that differ in their prefix.
#include "lib/audit/renaming.h"

#include <gmock/gmock.h>

namespace reshard::renaming_test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

Catalog catalog_of(const std::vector<std::pair<std::string, Dims>>& tensors) {
  Catalog out;
  for (const auto& [name, shape] : tensors) {
    Tensor tensor;
    tensor.name = name;
    tensor.shape = shape;
    EXPECT_TRUE(out.add(std::move(tensor)));
  }
  return out;
}

// Returns the renamings as "from -> to: tensors".
std::vector<std::string> renamings(const Catalog& a, const Catalog& b) {
  std::vector<std::size_t> only_a, only_b;
  for (std::size_t i = 0; i < a.tensors().size(); ++i)
    if (!b.find(a.tensors()[i].name)) only_a.push_back(i);
  for (std::size_t i = 0; i < b.tensors().size(); ++i)
    if (!a.find(b.tensors()[i].name)) only_b.push_back(i);
  std::vector<std::string> out;
  for (const Renaming& r : find_renamings(a, only_a, b, only_b)) {
    out.push_back(r.a + " -> " + r.b + ": " + std::to_string(r.pairs.size()));
    for (const auto& [i, j] : r.pairs)
      EXPECT_EQ(a.tensors()[i].name.substr(r.a.size()), b.tensors()[j].name.substr(r.b.size()));
  }
  return out;
}

TEST(Renamings, AreOfWhatNamesBeginWith) {
  const Catalog memory = catalog_of({{"model.language_model.layers.0.mlp.weight", {4, 4}},
                                     {"model.language_model.layers.1.mlp.weight", {4, 4}},
                                     {"model.language_model.norm.weight", {4}},
                                     {"model.vision_tower.layers.0.mlp.weight", {4, 4}},
                                     {"model.vision_tower.norm.weight", {4}},
                                     {"logit_scale", {}}});
  const Catalog files = catalog_of({{"language_model.model.layers.0.mlp.weight", {4, 4}},
                                    {"language_model.model.layers.1.mlp.weight", {4, 4}},
                                    {"language_model.model.norm.weight", {4}},
                                    {"vision_tower.layers.0.mlp.weight", {4, 4}},
                                    {"vision_tower.norm.weight", {4}},
                                    {"logit_scale", {}}});
  EXPECT_THAT(renamings(memory, files),
              ElementsAre("model.language_model. -> language_model.model.: 3", "model. -> : 2"));
  EXPECT_THAT(renamings(files, files), IsEmpty());
}

TEST(Renamings, AreNoneOfOtherShapesOtherLayersOrOtherModules) {
  const Catalog a = catalog_of({{"a.layers.0.mlp.weight", {4, 4}}});
  EXPECT_THAT(renamings(a, catalog_of({{"b.layers.0.mlp.weight", {4, 4}}})), ElementsAre("a. -> b.: 1"));
  EXPECT_THAT(renamings(a, catalog_of({{"b.layers.0.mlp.weight", {4, 5}}})), IsEmpty());
  EXPECT_THAT(renamings(a, catalog_of({{"a.layers.1.mlp.weight", {4, 4}}})), IsEmpty());
  EXPECT_THAT(renamings(a, catalog_of({{"a.layers.0.gate.weight", {4, 4}}})), IsEmpty());
}

}  // namespace
}  // namespace reshard::renaming_test
