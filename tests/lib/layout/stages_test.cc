#include "lib/layout/stages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace reshard::stages_test {
namespace {

// Returns how many layers each stage gets, and expects that stages follow one another.
std::vector<Index> dealt(StageRule rule, Index layers, Index stages) {
  EXPECT_TRUE(check_stages(rule, layers, stages).has_value()) << layers << " over " << stages;
  std::vector<Index> out(static_cast<std::size_t>(stages));
  Index before = 0;
  for (Index l = 0; l < layers; ++l) {
    const Index stage = stage_of_layer(rule, l, layers, stages);
    EXPECT_GE(stage, before);
    EXPECT_LT(stage, stages);
    before = stage;
    ++out[static_cast<std::size_t>(stage)];
  }
  return out;
}

using Counts = std::vector<Index>;

TEST(Stages, TorchtitanCountsEmbeddingAndHeadAsLayers) {
  EXPECT_EQ(dealt(StageRule::kTorchtitan, 4, 2), (Counts{2, 2}));
  EXPECT_EQ(dealt(StageRule::kTorchtitan, 32, 4), (Counts{8, 9, 8, 7}));
  EXPECT_EQ(dealt(StageRule::kTorchtitan, 1, 3), (Counts{0, 1, 0}));
}

TEST(Stages, ColossalaiGivesWhatIsLeftToTheMiddle) {
  EXPECT_EQ(dealt(StageRule::kColossalai, 10, 4), (Counts{2, 3, 3, 2}));
  EXPECT_EQ(dealt(StageRule::kColossalai, 11, 4), (Counts{2, 3, 3, 3}));
  EXPECT_EQ(dealt(StageRule::kColossalai, 9, 4), (Counts{2, 2, 3, 2}));
  EXPECT_EQ(dealt(StageRule::kColossalai, 80, 8), Counts(8, 10));
}

TEST(Stages, EveryRuleDealsEveryLayerOnce) {
  for (const StageRule rule : {StageRule::kTorchtitan, StageRule::kColossalai, StageRule::kEven})
    for (Index layers = 0; layers < 40; ++layers)
      for (Index stages = 1; stages <= layers + 2; ++stages)
        if (check_stages(rule, layers, stages)) {
          const Counts counts = dealt(rule, layers, stages);
          const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
          // The embedding and the head count as layers, so the first and last stage have fewer.
          EXPECT_LE(*most - *least, rule == StageRule::kTorchtitan ? 2 : rule == StageRule::kColossalai ? 1 : 0);
        }
}

TEST(Stages, MoreStagesThanPartsAreRefused) {
  EXPECT_EQ(check_stages(StageRule::kTorchtitan, 4, 7).error().message(),
            "pp=7 exceeds the parts of the model: 4 layers, the embedding and the head");
  EXPECT_EQ(check_stages(StageRule::kColossalai, 4, 5).error().message(),
            "pp=5 exceeds the parts of the model: 4 layers");
  EXPECT_EQ(check_stages(StageRule::kEven, 30, 4).error().message(),
            "pp=4 does not divide 30 layers, but rule 'even' requires equal stages");
}

TEST(Stages, TheLayerIsTheFirstNumberOfAName) {
  EXPECT_EQ(layer_number("layers.7.attention.wq.weight"), 7);
  EXPECT_EQ(layer_number("optimizer.state.layers.12.w.exp_avg"), 12);
  EXPECT_EQ(layer_number("layers.3.experts.60.w1"), 3);
  EXPECT_EQ(layer_number("tok_embeddings.weight"), -1);
  EXPECT_EQ(layer_number("layers.w1.weight"), -1);
  EXPECT_EQ(layer_number("layers.-4.x"), -1);
  EXPECT_EQ(layer_number("layers.99999999999999999999.x"), -1);
  EXPECT_EQ(layer_number("layers.1000000.x"), -1);
}

}  // namespace
}  // namespace reshard::stages_test
