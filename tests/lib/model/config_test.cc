#include "lib/model/config.h"

#include <gtest/gtest.h>

#include "tests/support/checkpoints.h"
#include "tests/support/soak.h"

namespace reshard::config_test {
namespace {

Result<ModelConfig> parse(std::string_view text) {
  const auto json = parse_json(text, "config.json");
  EXPECT_TRUE(json);
  return ModelConfig::parse(*json, "config.json");
}

std::string error_of(std::string_view text) {
  const auto config = parse(text);
  return config ? "no error" : config.error().message();
}

constexpr std::string_view kBase =
    R"("vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4)";
std::string with(std::string_view model_type, std::string_view more = "") {
  return R"({"model_type": ")" + std::string(model_type) + "\", " + std::string(kBase) + std::string(more) + "}";
}

TEST(Config, DerivesWhatIsLeftOut) {
  const auto config = parse(with("llama"));
  ASSERT_TRUE(config);
  EXPECT_EQ(config->num_key_value_heads(), 4);
  EXPECT_EQ(config->head_dim(), 16);
  EXPECT_FALSE(config->tie_word_embeddings());
  EXPECT_EQ(config->find("attention_bias"), std::nullopt);
}

TEST(Config, EachFamilyHasItsOwnDefaults) {
  EXPECT_EQ(parse(with("qwen3", R"(, "num_key_value_heads": 2)"))->head_dim(), 128);
  EXPECT_TRUE(parse(with("gemma2"))->tie_word_embeddings());
  EXPECT_EQ(parse(with("gemma2"))->head_dim(), 256);
  EXPECT_EQ(parse(with("mixtral", R"(, "num_key_value_heads": 2)"))->number("num_experts"), 8);
  EXPECT_EQ(parse(with("mixtral", R"(, "num_key_value_heads": 2, "num_local_experts": 5)"))->number("num_experts"), 5);
}

TEST(Config, NullIsNotLeftOut) {
  const std::string heads = R"(, "num_key_value_heads": null)";
  EXPECT_EQ(parse(with("gemma2", heads))->num_key_value_heads(), 4);  // the number of query heads
  EXPECT_EQ(parse(with("mistral", heads))->num_key_value_heads(), 4);
  const std::string kv = R"(, "num_key_value_heads": 4)";
  EXPECT_EQ(parse(with("deepseek_v3", kv))->find("q_lora_rank"), 1536);
  EXPECT_EQ(parse(with("deepseek_v3", kv + R"(, "q_lora_rank": null)"))->find("q_lora_rank"), std::nullopt);
}

TEST(Config, Gpt2sOwnWordsAreUnderstood) {
  const std::string base = R"({"model_type": "gpt2", "vocab_size": 10, "n_embd": 8, "n_head": 2, "n_layer": 3)";
  const auto config = parse(base + R"(, "n_inner": null, "n_positions": 16})");
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->hidden_size(), 8);
  EXPECT_EQ(config->num_hidden_layers(), 3);
  EXPECT_EQ(config->number("intermediate_size"), 32);
  EXPECT_EQ(config->number("max_position_embeddings"), 16);
  EXPECT_TRUE(config->tie_word_embeddings());
  EXPECT_EQ(parse(base + R"(, "n_inner": 20})")->number("intermediate_size"), 20);
}

TEST(Config, ATextConfigDescribesTheLanguageModel) {
  const auto config = read_config(std::string(RESHARD_TEST_DATA) + "/configs/gemma-3-4b-it.json");
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->hidden_size(), 2560);
  EXPECT_EQ(config->num_hidden_layers(), 34);
  EXPECT_EQ(config->vocab_size(), 262208);
  EXPECT_EQ(config->num_attention_heads(), 8);
  EXPECT_EQ(config->num_key_value_heads(), 4);
  EXPECT_EQ(config->head_dim(), 256);
  EXPECT_EQ(config->model_type, "gemma3");
  EXPECT_EQ(config->architecture, "Gemma3ForConditionalGeneration");
}

TEST(Config, KnowsWhichLayersHaveExperts) {
  const std::string more = R"(, "num_key_value_heads": 4, "num_experts": 8, "decoder_sparse_step": 2, )"
                           R"("mlp_only_layers": [3])";
  const auto config = parse(with("qwen3_moe", more));
  ASSERT_TRUE(config);
  std::vector<bool> sparse;
  for (Index layer = 0; layer < 6; ++layer) sparse.push_back(config->is_sparse_layer(layer));
  EXPECT_EQ(sparse, (std::vector<bool>{false, true, false, false, false, true}));
}

// A search in the whole list for each layer and parameter would take hours.
TEST(Config, ListsOfAnyLengthAreLookedThroughAtOnce) {
  const Index many = 500'000 / every_nth(10);
  std::string layers = "0", modules = "\"a\"";
  for (Index i = 1; i < many; ++i) {
    layers += "," + std::to_string(2 * (many - i));
    modules += ",\"b." + std::to_string(many - i) + "\"";
  }
  const auto config =
      parse(with("qwen3_moe", R"(, "num_key_value_heads": 4, "num_experts": 8, "mlp_only_layers": [)" + layers +
                                  R"(], "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128],
                                "modules_to_not_convert": [)" +
                                  modules + "]}"));
  ASSERT_TRUE(config) << config.error().message();
  Index sparse = 0, plain = 0;
  for (Index i = 0; i < many; ++i) {
    sparse += config->is_sparse_layer(i) ? 1 : 0;
    plain += config->is_left_unquantized("b." + std::to_string(2 * i) + ".w.weight") ? 1 : 0;
  }
  EXPECT_EQ(sparse, many / 2);
  EXPECT_EQ(plain, many / 2 - 1);
}

TEST(Config, ReadsBlockQuantization) {
  const auto config = parse(with("llama", R"(, "quantization_config": {"quant_method": "fp8",
      "weight_block_size": [128, 64], "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]})"));
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->float8, (Float8Scales{"_scale_inv", 128, 64}));
  EXPECT_EQ(config->float8->shape({200, 64}), (Dims{2, 1}));
  EXPECT_TRUE(config->is_left_unquantized("lm_head.weight"));
  EXPECT_TRUE(config->is_left_unquantized("model.layers.1.mlp.up_proj.weight"));
  EXPECT_FALSE(config->is_left_unquantized("model.layers.11.mlp.up_proj.weight"));
  EXPECT_FALSE(config->is_left_unquantized("model.layers.1.mlp2.weight"));
}

TEST(Config, ReadsHowFloat8IsScaled) {
  const auto read = [](const std::string& quantization) {
    const auto config = parse(with("llama", R"(, "quantization_config": )" + quantization));
    EXPECT_TRUE(config) << quantization;
    return config ? config->float8 : std::nullopt;
  };
  const auto compressed = [&](const std::string& weights, const std::string& more = {}) {
    return read(R"({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": )" + weights + "}" +
                more + "}}");
  };
  const std::string channel = R"({"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": true})";
  EXPECT_EQ(compressed(channel), (Float8Scales{"_scale", 1, 0, true, true}));
  EXPECT_EQ(compressed(R"({"type": "float", "num_bits": 8, "strategy": "tensor"})"),
            (Float8Scales{"_scale", 0, 0, true, true}));
  EXPECT_EQ(compressed(R"({"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 64]})"),
            (Float8Scales{"_scale", 128, 64, true, true}));
  EXPECT_EQ(compressed(channel, R"(, "group_1": {"weights": )" + channel + "}"),
            (Float8Scales{"_scale", 1, 0, true, true}));
  EXPECT_EQ(read(R"({"quant_method": "fbgemm_fp8"})"), (Float8Scales{"_scale", 1, 0, true}));
  EXPECT_EQ(read(R"({"quant_method": "fp8", "weight_block_size": null})"), (Float8Scales{"_scale_inv", 0, 0, true}));

  // Scales that are applied differently.
  for (const char* weights :
       {R"({"type": "int", "num_bits": 8, "strategy": "channel"})",
        R"({"type": "float", "num_bits": 4, "strategy": "channel"})",
        R"({"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32})",
        R"({"type": "float", "num_bits": 8, "strategy": "block"})",
        R"({"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": false})", "null", "5"})
    EXPECT_EQ(compressed(weights), std::nullopt) << weights;
  EXPECT_EQ(compressed(channel, R"(, "group_1": {"weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}})"),
            std::nullopt);
  EXPECT_EQ(read(R"({"quant_method": "compressed-tensors"})"), std::nullopt);
  EXPECT_EQ(read(R"({"quant_method": "gptq"})"), std::nullopt);
}

// mlx-lm names no method, and writes its settings under two keys; earlier releases wrote one.
TEST(Config, KnowsMlx) {
  for (const char* key : {"quantization", "quantization_config"})
    EXPECT_EQ(parse(with("llama", R"(, ")" + std::string(key) + R"(": {"group_size": 32, "bits": 4})"))->quantization,
              "mlx");
}

TEST(Config, SaysWhatIsWrong) {
  EXPECT_EQ(error_of(R"({"model_type": "llama", "hidden_size": 64})"),
            "num_attention_heads: expected a positive number, got nothing");
  EXPECT_EQ(error_of(R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0})"),
            "num_attention_heads: expected a positive number, got 0");
  EXPECT_EQ(error_of(with("llama", R"(, "num_key_value_heads": 3)")),
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3");
  EXPECT_EQ(error_of(with("llama", R"(, "head_dim": 9000000000000000000)")),
            "head_dim: expected a positive number, got 9000000000000000000");
  EXPECT_EQ(error_of(R"({"model_type": "llama", "hidden_size": "64", "num_attention_heads": 4})"),
            "hidden_size: expected a positive number, got \"64\"");
  EXPECT_EQ(error_of(R"({"model_type": "llama", "hidden_size": 9223372036854775808, "num_attention_heads": 4})"),
            "hidden_size: expected a positive number, got 9223372036854775808");
  EXPECT_EQ(error_of(R"({"model_type": "openelm", "num_key_value_heads": [3, 3]})"), "no error");
  EXPECT_NE(error_of("{}"), "no error");
  EXPECT_NE(error_of("[]"), "no error");
}

}  // namespace
}  // namespace reshard::config_test
