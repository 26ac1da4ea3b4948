// Tests which tensors of a checkpoint form one packed weight.
#include "lib/model/quantization.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/must.h"
#include "tests/support/packed_modules.h"

namespace reshard::quantization_test {
namespace {

constexpr const char* kModule = "model.layers.0.self_attn.q_proj.";

void add(Catalog& catalog, const std::string& name, DType dtype, const Dims& shape) {
  Tensor t;
  t.name = name;
  t.dtype = dtype;
  t.shape = shape;
  t.fragments = FragmentList(shape.rank());
  ASSERT_TRUE(catalog.add(std::move(t)));
}

Catalog catalog_of(const PackedModule& module, const std::string& prefix = kModule) {
  Catalog out;
  add(out, "model.embed_tokens.weight", DType::kBFloat16, {96, 64});
  for (const PackedModule::Part& part : module.parts) add(out, prefix + part.name, part.dtype, part.shape);
  add(out, prefix + "bias", DType::kBFloat16, {64});
  add(out, "model.layers.0.input_layernorm.weight", DType::kBFloat16, {64});
  add(out, "model.layers.0.mlp.up_proj.weight", DType::kBFloat16, {128, 64});
  return out;
}

ModelConfig config_with(const std::string& quantization) {
  const std::string text = R"({"model_type": "unheard_of", "quantization_config": )" + quantization + "}";
  return must(ModelConfig::parse(must(parse_json(text, "config.json")), "config.json"));
}

class EachPacking : public testing::TestWithParam<PackedModule> {};

TEST_P(EachPacking, IsFoundByNamesAndDtypes) {
  const Catalog catalog = catalog_of(GetParam());
  const ModelConfig config = config_with(GetParam().config);
  for (const ModelConfig* said : {static_cast<const ModelConfig*>(nullptr), &config}) {
    const PackedWeights packed = find_packed(catalog, said);
    ASSERT_EQ(packed.weights.size(), 1U) << (said ? "with" : "without") << " config.json";
    const PackedWeight& weight = packed.weights[0];
    EXPECT_EQ(weight.packing, GetParam().packing) << packing_title(weight.packing);
    EXPECT_THAT(weight.missing, testing::IsEmpty());
    for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
      const std::string& name = catalog.tensors()[i].name;
      const bool is_part = name.starts_with(kModule) && !name.ends_with(".bias");
      EXPECT_EQ(packed.is_of(i), is_part) << name;
      EXPECT_EQ(packed.of(i), is_part ? &weight : nullptr) << name;
    }
    if (weight.packing != Packing::kUnknown) {
      EXPECT_EQ(weight.name, std::string(kModule) + "weight");
    }
  }
}

// A wrapper changes names but not their meaning.
TEST_P(EachPacking, IsFoundUnderPlainKeys) {
  Catalog wrapped;
  const Catalog bare = catalog_of(GetParam());
  for (const Tensor& t : bare.tensors()) {
    Tensor with_key = t;
    with_key.name = "app." + t.name;
    with_key.plain_key = t.name;
    ASSERT_TRUE(wrapped.add(std::move(with_key)));
  }
  const PackedWeights packed = find_packed(wrapped, nullptr);
  ASSERT_EQ(packed.weights.size(), 1U);
  EXPECT_TRUE(packed.weights[0].name.starts_with("model.")) << packed.weights[0].name;
}

INSTANTIATE_TEST_SUITE_P(Quantization, EachPacking, testing::ValuesIn(packed_modules()),
                         [](const auto& of) { return of.param.title; });

TEST(Quantization, OrdinaryModelsHaveNone) {
  Catalog catalog;
  add(catalog, "embeddings.position_ids", DType::kInt64, {1, 512});
  add(catalog, "embeddings.word_embeddings.weight", DType::kFloat32, {96, 64});
  add(catalog, "transformer.h.0.attn.bias", DType::kUint8, {1, 1, 64, 64});
  add(catalog, "transformer.h.0.attn.masked_bias", DType::kFloat32, {});
  add(catalog, "transformer.h.0.attn.c_attn.weight", DType::kFloat32, {64, 192});
  add(catalog, "bn1.num_batches_tracked", DType::kInt64, {});
  add(catalog, "bn1.running_mean", DType::kFloat32, {64});
  add(catalog, "attn.logit_scale", DType::kFloat32, {4, 1, 1});
  add(catalog, "attn.relative_position_index", DType::kInt64, {49, 49});
  add(catalog, "logit_scale", DType::kFloat32, {});
  add(catalog, "mlp.gate.tid2eid", DType::kInt32, {96, 4});  // DeepSeek-V4's routing by tokens
  add(catalog, "mlp.gate.weight", DType::kFloat32, {4, 64});
  add(catalog, "tree.parents", DType::kInt32, {8, 2});
  add(catalog, "tree.values", DType::kFloat32, {8, 64});
  add(catalog, "plain.weight", DType::kFloat8E4M3, {64, 64});  // cast to float8, without scales
  EXPECT_TRUE(find_packed(catalog, nullptr).empty());
  const ModelConfig config = config_with(R"({"quant_method": "fp8"})");
  EXPECT_TRUE(find_packed(catalog, &config).empty());
}

}  // namespace
}  // namespace reshard::quantization_test
