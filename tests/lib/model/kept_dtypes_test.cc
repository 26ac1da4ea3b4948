// Tests which parameters stay in float32 in models of narrower dtypes.
#include "lib/model/kept_dtypes.h"

#include <gtest/gtest.h>

#include "lib/model/family_file.h"
#include "lib/model/parameters.h"

namespace reshard::kept_dtypes_test {
namespace {

constexpr auto kFloat32 = DType::kFloat32;
constexpr DType kNarrow[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3};

ModelConfig config_of(const std::string& text) {
  auto config = ModelConfig::parse(*parse_json(text, "c.json"), "c.json");
  EXPECT_TRUE(config) << config.error().message();
  return *std::move(config);
}

ModelConfig of_type(const std::string& model_type) { return config_of(R"({"model_type": ")" + model_type + R"("})"); }

TEST(KeptDtypes, AreFloat32InEveryNarrowDtype) {
  const ModelConfig config = of_type("glm4v_moe_text");
  for (const DType as : kNarrow) {
    EXPECT_EQ(kept_dtype(nullptr, &config, "layers.3.mlp.gate.weight", as), kFloat32);
    EXPECT_EQ(kept_dtype(nullptr, &config, "model.layers.3.mlp.gate.e_score_correction_bias", as), kFloat32);
    EXPECT_EQ(kept_dtype(nullptr, &config, "model.layers.3.mlp.gate_proj.weight", as), std::nullopt);
  }
  for (const DType as : {kFloat32, DType::kFloat64})
    EXPECT_EQ(kept_dtype(nullptr, &config, "layers.3.mlp.gate.weight", as), std::nullopt);
}

TEST(KeptDtypes, SomeAreKeptOnlyWhereTheRangeIsSmall) {
  const ModelConfig config = of_type("t5");
  const std::string wo = "encoder.block.0.layer.1.DenseReluDense.wo.weight";
  EXPECT_EQ(kept_dtype(nullptr, &config, wo, DType::kFloat16), kFloat32);
  EXPECT_EQ(kept_dtype(nullptr, &config, wo, DType::kBFloat16), std::nullopt);
}

TEST(KeptDtypes, AreThoseOfEveryPartOfAModel) {
  const ModelConfig config = config_of(
      R"({"model_type": "llava", "text_config": {"model_type": "hy_v3", "vocab_size": 8, "hidden_size": 4,
          "num_hidden_layers": 1, "num_attention_heads": 8}})");
  EXPECT_EQ(kept_dtype(nullptr, &config, "language_model.model.layers.1.mlp.gate.weight", DType::kBFloat16), kFloat32);
  const ModelConfig nested =
      config_of(R"({"model_type": "x", "decoder": {"model_type": "y", "text_config": {"model_type": "deepseek_v3"}}})");
  EXPECT_EQ(kept_dtype(nullptr, &nested, "decoder.layers.1.mlp.gate.weight", DType::kBFloat16), kFloat32);
}

TEST(KeptDtypes, AreAFamilysWhereThereIsNoConfig) {
  const Family* const family = find_family("deepseek_v3");
  for (const std::string name : {"model.layers.5.mlp.gate.weight", "layers.5.moe.router.gate.weight"})
    EXPECT_EQ(kept_dtype(family, nullptr, name, DType::kBFloat16), kFloat32) << name;
  EXPECT_EQ(kept_dtype(find_family("qwen3_moe"), nullptr, "model.layers.5.mlp.gate.weight", DType::kBFloat16),
            std::nullopt);
  const Family* const around = find_family("llava+glm4_moe");
  ASSERT_TRUE(around);
  EXPECT_EQ(kept_dtype(around, nullptr, "language_model.model.layers.5.mlp.gate.weight", DType::kBFloat16), kFloat32);
}

TEST(KeptDtypes, AreThoseOfAFamilysOwnConfig) {
  const Family* const family = find_family("afmoe");
  ModelConfig config;
  config.model_type = "afmoe";
  EXPECT_EQ(kept_dtype(family, &config, "model.layers.1.mlp.expert_bias", DType::kBFloat16), kFloat32);
  EXPECT_EQ(kept_dtype(family, &config, "model.layers.1.input_layernorm.weight", DType::kFloat16), kFloat32);
  EXPECT_EQ(kept_dtype(family, &config, "model.layers.1.input_layernorm.weight", DType::kBFloat16), std::nullopt);
}

TEST(KeptDtypes, AFamilyFileHasTheLastWord) {
  const auto family =
      parse_family(R"({"reshard_family": 1, "name": "mine", "model_types": ["deepseek_v3"], "parameters": [
      {"name": "gate.weight", "shape": "2, 2"}, {"name": "other.gate.weight", "shape": "2, 2", "dtype": "bfloat16"},
      {"name": "scale", "shape": "2", "dtype": "float32"}]})",
                   "mine.json");
  ASSERT_TRUE(family) << family.error().message();
  EXPECT_EQ(kept_dtype(&*family, nullptr, "gate.weight", DType::kFloat16), kFloat32);
  EXPECT_EQ(kept_dtype(&*family, nullptr, "other.gate.weight", DType::kFloat16), DType::kBFloat16);
  EXPECT_EQ(kept_dtype(&*family, nullptr, "scale", DType::kFloat16), kFloat32);
}

TEST(KeptDtypes, TheTableKnowsEveryModelTypeOfTheFamilies) {
  ModelConfig config;
  for (const Family* family : Families())
    for (const std::string& model_type : family->model_types) {
      config.model_type = model_type;
      EXPECT_TRUE(knows_kept_dtypes(config)) << model_type;
    }
  config.model_type = "notamodel";
  EXPECT_FALSE(knows_kept_dtypes(config));
  EXPECT_FALSE(kept_dtypes_version().empty());
}

}  // namespace
}  // namespace reshard::kept_dtypes_test
