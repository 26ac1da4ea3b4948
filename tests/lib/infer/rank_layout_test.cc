#include "lib/infer/rank_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lib/base/json.h"

namespace reshard::rank_layout_test {
namespace {

using testing::HasSubstr;

constexpr const char* kConfig = R"({"model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50})";

// The files of a small Llama on pp x tp ranks. All parts differ, except those of tensors that are not cut.
struct Model {
  std::vector<RankTensor> tensors;
  Index pp, tp;
  bool parts_equal = false;
  std::optional<std::string> differs;  // an uncut tensor whose bytes differ between the ranks

  Model(Index stages, Index degree) : pp(stages), tp(degree) {
    add("model.embed_tokens.weight", {56 / tp, 8}, 0);
    for (Index layer = 0; layer < 2; ++layer) {
      const std::string p = "model.layers." + std::to_string(layer) + ".";
      const Index stage = layer * pp / 2;
      add(p + "self_attn.q_proj.weight", {8 / tp, 8}, stage);
      add(p + "self_attn.k_proj.weight", {4 / tp, 8}, stage);
      add(p + "self_attn.v_proj.weight", {4 / tp, 8}, stage);
      add(p + "self_attn.o_proj.weight", {8, 8 / tp}, stage);
      add(p + "mlp.gate_proj.weight", {12 / tp, 8}, stage);
      add(p + "mlp.up_proj.weight", {12 / tp, 8}, stage);
      add(p + "mlp.down_proj.weight", {8, 12 / tp}, stage);
      add(p + "input_layernorm.weight", {8}, stage);
      add(p + "post_attention_layernorm.weight", {8}, stage);
    }
    add("model.norm.weight", {8}, pp - 1);
    add("lm_head.weight", {56 / tp, 8}, pp - 1);
  }
  void add(const std::string& name, const Dims& shape, Index stage) {
    RankTensor t{name, std::vector<std::optional<Dims>>(static_cast<std::size_t>(pp * tp))};
    for (Index r = 0; r < tp; ++r) t.shapes[static_cast<std::size_t>(stage * tp + r)] = shape;
    tensors.push_back(t);
  }
  Result<LayoutDescriptor> infer(bool with_config) const {
    std::optional<ModelConfig> config;
    if (with_config) config = *ModelConfig::parse(*parse_json(kConfig, "c"), "config.json");
    return infer_rank_layout("D", tensors, pp * tp, config ? &*config : nullptr, {},
                             [&](std::size_t t, Index, Index) -> Result<bool> {
                               const std::string& name = tensors[t].name;
                               if (name == differs) return false;
                               return parts_equal || name.find("norm") != std::string::npos;
                             });
  }
  std::string refusal(bool with_config) const {
    const auto layout = infer(with_config);
    return layout ? "accepted as " + layout->mesh->to_string() : layout.error().message();
  }
};

TEST(RankLayout, TheConfigsShapesTellTensorParallelRanks) {
  const auto layout = Model(1, 2).infer(true);
  ASSERT_TRUE(layout) << layout.error().message();
  EXPECT_EQ(layout->mesh->to_string(), "tp=2");
  EXPECT_EQ(layout->place("model.layers.1.self_attn.o_proj.weight", {8, 8}, 2)->splits,
            (std::vector<Split>{{{"tp"}, 1}}));
  EXPECT_EQ(layout->place("lm_head.weight", {56, 8}, 2)->splits, (std::vector<Split>{{{"tp"}, 0}}));
  EXPECT_TRUE(layout->place("model.norm.weight", {8}, 2)->splits.empty());
  ASSERT_EQ(layout->evidence.size(), 1u);
  EXPECT_EQ(layout->evidence[0].confidence, "certain");
}

TEST(RankLayout, WithoutAConfigTheContentsMust) {
  Model model(1, 2);
  const auto layout = model.infer(false);
  ASSERT_TRUE(layout) << layout.error().message();
  EXPECT_EQ(layout->mesh->to_string(), "tp=2");
  EXPECT_EQ(layout->evidence[0].confidence, "likely");
  model.parts_equal = true;
  EXPECT_EQ(model.refusal(false),
            "D: all ranks hold the same bytes: dp_replicate=2 fits, and so does tp=2 with equal parts. A "
            "config.json next to the files would tell; describe how they join with --source-layout");
}

TEST(RankLayout, StagesAreRanksThatHoldTheSameTensors) {
  const auto layout = Model(2, 2).infer(true);
  ASSERT_TRUE(layout) << layout.error().message();
  EXPECT_EQ(layout->mesh->to_string(), "pp=2, tp=2");
  EXPECT_EQ(layout->place("model.layers.1.input_layernorm.weight", {8}, 2)->stage, 1);
  EXPECT_EQ(layout->place("model.embed_tokens.weight", {56, 8}, 2)->stage, 0);
  EXPECT_EQ(Model(2, 1).refusal(true), "accepted as pp=2");
}

TEST(RankLayout, CopiesHaveTheConfigsShapes) {
  Model model(1, 1);
  for (RankTensor& t : model.tensors) t.shapes.push_back(t.shapes[0]);
  model.tp = 2;
  model.parts_equal = true;
  EXPECT_EQ(model.refusal(true), "accepted as dp_replicate=2");
}

TEST(RankLayout, WholeTensorsMustBeEqual) {
  Model model(1, 2);
  model.differs = "model.norm.weight";
  for (const bool with_config : {false, true})
    EXPECT_EQ(model.refusal(with_config),
              "D: tensor 'model.norm.weight', which every rank should hold whole, differs between rank 0 and rank 1; "
              "describe how they join with --source-layout");
}

TEST(RankLayout, ShapesThatFitNothingAreRefused) {
  Model model(1, 2);
  model.tensors[1].shapes[1] = Dims{3, 8};
  EXPECT_THAT(model.refusal(true), HasSubstr("D: neither tp=2 fits (tensor 'model.layers.0.self_attn.q_proj.weight' "
                                             "would be [7, 8], config.json says [8, 8]), nor dp_replicate=2"));
  model.tensors[1].shapes[1].reset();
  EXPECT_THAT(model.refusal(true), HasSubstr("is in the file of rank 0 and not in the file of rank 1"));
  model.tensors[1] = {"a.weight", {Dims{2}, Dims{2}}};
  EXPECT_THAT(model.refusal(true), HasSubstr("tensor 'a.weight': family llama does not know how it is cut"));
}

}  // namespace
}  // namespace reshard::rank_layout_test
