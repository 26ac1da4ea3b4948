// Tests identifying a model by its config, by its names, or by the given family.
#include "lib/model/model.h"

#include <gmock/gmock.h>

namespace reshard::model_test {
namespace {

using testing::HasSubstr;

Catalog catalog_of(const std::vector<std::string>& names) {
  Catalog catalog;
  catalog.root = "ckpt";
  for (const std::string& name : names) {
    Tensor tensor;
    tensor.name = name;
    EXPECT_TRUE(catalog.add(std::move(tensor)));
  }
  return catalog;
}

ModelConfig config_of(const std::string& model_type) {
  const std::string text = R"({"model_type": ")" + model_type +
                           R"(", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "tie_word_embeddings": true})";
  auto config = ModelConfig::parse(*parse_json(text, "c.json"), "c.json");
  EXPECT_TRUE(config) << config.error().message();
  return *std::move(config);
}

const Catalog kHuggingFace = catalog_of({"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"});
const Catalog kTorchtitan = catalog_of({"tok_embeddings.weight", "layers.0.attention.wq.weight"});
const Catalog kOther = catalog_of({"encoder.weight"});

Model recognised(const Catalog& catalog, const ModelChoice& choice = {}, std::optional<ModelConfig> config = {}) {
  auto model = recognise(catalog, choice, std::move(config));
  EXPECT_TRUE(model) << model.error().message();
  return *std::move(model);
}

const Family* family_named(std::string_view model_type) { return family_of_model_type(model_type); }

TEST(Recognise, NamesAloneTellFamilyAndConvention) {
  EXPECT_EQ(recognised(kHuggingFace).family, family_named("llama"));
  EXPECT_EQ(recognised(kHuggingFace).convention, Convention::kHf);
  EXPECT_EQ(recognised(kTorchtitan).convention, Convention::kTorchtitan);
  EXPECT_EQ(recognised(kOther).family, nullptr);
}

TEST(Recognise, AConfigWinsOverWhatNamesSuggest) {
  const Model mistral = recognised(kHuggingFace, {}, config_of("mistral"));
  ASSERT_TRUE(mistral.family);
  EXPECT_EQ(mistral.family->name, "mistral");
  const Model unknown = recognised(kHuggingFace, {}, config_of("notamodel"));
  EXPECT_EQ(unknown.family, nullptr);
  ASSERT_TRUE(unknown.config);
  EXPECT_EQ(unknown.config->model_type, "notamodel");
  EXPECT_EQ(recognised(kOther, {}, config_of("llama")).family, nullptr);
}

TEST(Recognise, AChosenFamilyHasToFit) {
  const Family* llama = family_named("llama");
  EXPECT_EQ(recognised(kTorchtitan, {false, llama}).convention, Convention::kTorchtitan);
  EXPECT_EQ(recognised(kTorchtitan, {false, nullptr}).family, nullptr);
  const auto other_names = recognise(kOther, {false, llama}, std::nullopt);
  ASSERT_FALSE(other_names);
  EXPECT_EQ(other_names.error().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(other_names.error().message(), HasSubstr("ckpt: no tensor is named as in family llama"));
  const auto other_config = recognise(kHuggingFace, {false, llama}, config_of("mixtral"));
  ASSERT_FALSE(other_config);
  EXPECT_EQ(other_config.error().code(), ErrorCode::kUsage);
  EXPECT_THAT(other_config.error().message(), HasSubstr("c.json: expected a model of family llama"));
}

// transformers' GenericForQuestionAnswering has "transformer.layers.0" instead of "model.layers.0".
TEST(Recognise, AClassThatNamesItsParametersOtherwiseIsOfNoFamily) {
  ModelConfig config = config_of("llama");
  EXPECT_EQ(describing_family(config), family_named("llama"));
  config.architecture = "LlamaForQuestionAnswering";
  EXPECT_EQ(describing_family(config), nullptr);
  config.model_type = "gpt2";  // all of its classes have "transformer."
  EXPECT_EQ(describing_family(config), family_named("gpt2"));
}

TEST(Recognise, AConfigAloneHasAFamilyToo) {
  EXPECT_EQ(*family_of(config_of("mixtral")), family_named("mixtral"));
  EXPECT_EQ(*family_of(config_of("notamodel"), {false, family_named("llama")}), family_named("llama"));
  EXPECT_THAT(family_of(config_of("notamodel")).error().message(), HasSubstr("c.json: model_type 'notamodel'"));
  EXPECT_THAT(family_of(config_of("llama"), {false, nullptr}).error().message(), HasSubstr("--family none"));
}

}  // namespace
}  // namespace reshard::model_test
