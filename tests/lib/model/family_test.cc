#include "lib/model/family.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "lib/base/file.h"
#include "lib/model/family_file.h"
#include "lib/model/parameters.h"
#include "lib/model/view.h"

namespace reshard::family_test {
namespace {

ModelConfig published(const std::string& name) {
  auto config = read_config(std::string(RESHARD_TEST_DATA) + "/configs/" + name + ".json");
  EXPECT_TRUE(config) << config.error().message();
  return *config;
}

std::vector<Parameter> table(const ModelConfig& config) {
  auto list = parameters(*family_of_model_type(config.model_type), config);
  EXPECT_TRUE(list) << list.error().message();
  return list ? *list : std::vector<Parameter>();
}

std::map<std::string, Parameter> by_name(std::vector<Parameter> list) {
  std::map<std::string, Parameter> out;
  for (Parameter& p : list) out.emplace(p.name, std::move(p));
  return out;
}

Catalog catalog_of(const std::vector<Parameter>& list, const std::string& prefix = "") {
  Catalog catalog;
  for (const Parameter& p : list) {
    Tensor tensor;
    tensor.name = prefix + p.name;
    tensor.shape = p.shape;
    EXPECT_TRUE(catalog.add(std::move(tensor)));
  }
  return catalog;
}

ModelConfig parsed_config(std::string_view text) {
  auto config = ModelConfig::parse(*parse_json(text, "config.json"), "config.json");
  EXPECT_TRUE(config) << config.error().message();
  return *config;
}

// Compares with transformers' counts on torch's meta device, including DeepSeek's router bias, which is a buffer there.
TEST(Family, CountsThePublishedModels) {
  const std::pair<std::string, Index> kCounts[] = {
      {"llama-2-7b", 6'738'415'616},
      {"llama-3.1-8b", 8'030'261'248},
      {"llama-3.1-70b", 70'553'706'496},
      {"llama-3.1-405b", 405'853'388'800},
      {"mistral-7b-v0.1", 7'241'732'096},
      {"mixtral-8x7b-v0.1", 46'702'792'704},
      {"qwen2-7b", 7'615'616'512},
      {"qwen2.5-0.5b", 494'032'768},
      {"qwen3-8b", 8'190'735'360},
      {"qwen3-30b-a3b", 30'532'122'624},
      {"deepseek-v3", 671'026'419'200},
      {"gemma-2-9b", 9'241'705'984},
      {"gemma-3-1b", 999'885'952},
      {"gemma-3-4b-it", 3'880'263'168},
      {"gpt2", 124'439'808},
      {"gpt-oss-20b", 20'914'757'184},
      {"phi-4", 14'659'507'200},
      {"starcoder2-7b", 7'173'923'840},
      {"glm-4.5-air", 106'852'251'264},
      {"qwen3-next-80b-a3b", 79'674'391'296},
  };
  for (const auto& [name, count] : kCounts) EXPECT_EQ(count_elements(table(published(name))), count) << name;
}

TEST(Family, EveryParameterParsesBackToItsRule) {
  for (const std::string name : {"llama-3.1-8b", "mistral-7b-v0.1", "mixtral-8x7b-v0.1", "qwen2.5-0.5b", "qwen3-8b",
                                 "qwen3-30b-a3b", "deepseek-v3", "gemma-2-9b", "gemma-3-1b", "gpt2"}) {
    const ModelConfig config = published(name);
    const Family& family = *family_of_model_type(config.model_type);
    std::set<std::string> seen;
    for (const Parameter& p : table(config)) {
      EXPECT_TRUE(seen.insert(p.name).second) << p.name;
      const auto parsed = parse_name(family, p.name);
      ASSERT_TRUE(parsed) << p.name;
      EXPECT_EQ(parsed->rule, p.rule) << p.name;
      EXPECT_EQ(parsed->layer, p.layer) << p.name;
      EXPECT_EQ(parsed->expert, p.expert) << p.name;
      EXPECT_EQ(parsed->is_of_quantized(), p.is_scale) << p.name;
      EXPECT_EQ(canonical_name(*parsed), p.name);
    }
  }
}

// A rule that names a dimension its shape lacks, or ties to an unknown parameter, would otherwise only fail for users.
TEST(Family, TablesAreConsistent) {
  for (const Family* family : Families()) {
    for (const NameRule& rule : family->rules) {
      const Index rank = std::count(rule.shape.begin(), rule.shape.end(), ',') + 1;
      EXPECT_TRUE(rule.shape.empty() || rule.tp_dim < rank) << rule.hf;
      EXPECT_TRUE(rule.quantized != Quantized::kFloat8 || rank == 2) << rule.hf;
      EXPECT_TRUE(rule.tied_to.empty() || parse_name(*family, rule.tied_to)) << rule.hf;
      const bool has_hole = rule.hf.find("{}") != std::string::npos;
      EXPECT_EQ(has_hole, rule.place == NameRule::Place::kLayer) << rule.hf;
    }
    for (const ConventionTable& table : family->conventions) {
      std::set<std::string> names;
      for (const StoredRule& stored : table.rules) {
        EXPECT_TRUE(names.insert(stored.stored).second) << stored.stored;
        for (const std::string& part : stored.parts)
          EXPECT_TRUE(parse_name(*family, format_pattern(part, 0, 0))) << part;
      }
    }
  }
}

// A family that does not mention how a name begins is not even parsed when that name is looked up.
TEST(Family, MentionsHowItsNamesBegin) {
  const auto is_visited = [](const Family* family, const std::string& name) {
    NamePatterns names;
    add_name(names, name);
    bool found = false;
    each_family({}, first_words(names), [&](const Family& f) { return !(found = found || &f == family); });
    return found;
  };
  for (const Family* family : Families()) {
    std::set<std::string> names;
    for (const NameRule& rule : family->rules) names.insert(rule.hf);
    for (const ConventionTable& table : family->conventions)
      for (const StoredRule& rule : table.rules) names.insert(rule.stored);
    for (const auto& [file, memory] : family->in_memory)
      for (const std::string& start : {file, memory}) names.insert(start.ends_with('.') ? start + "weight" : start);
    for (const std::string& name : names)
      EXPECT_TRUE(is_visited(family, format_pattern(name, 0, 0))) << family->name << ": " << name;
  }
  int visited = 0;
  const std::vector<std::string> unknown = {"of_no_family."};
  each_family({}, unknown, [&](const Family&) { return ++visited > 0; });
  EXPECT_EQ(visited, 0);
}

TEST(Family, IsDetectedByWhatItAloneHas) {
  const std::pair<std::string, std::string> kDetected[] = {
      {"llama-3.1-8b", "llama"}, {"mistral-7b-v0.1", "llama"},   {"mixtral-8x7b-v0.1", "mixtral"},
      {"qwen3-8b", "qwen3"},     {"qwen3-30b-a3b", "qwen3_moe"}, {"deepseek-v3", "deepseek_v3"},
      {"gemma-2-9b", "gemma2"},  {"gemma-3-1b", "gemma3"},       {"gpt2", "gpt2"},
      {"qwen2.5-0.5b", "llama"},
  };
  for (const auto& [name, family] : kDetected) {
    const ModelConfig config = published(name);
    const Catalog catalog = catalog_of(table(config));
    const auto detected = detect_family(catalog);
    ASSERT_TRUE(detected) << name;
    EXPECT_EQ(detected->family->name, family) << name;
    EXPECT_EQ(detected->convention, Convention::kHf);
    EXPECT_EQ(detect_family(catalog, &config)->family->model_types.front(),
              family_of_model_type(config.model_type)->model_types.front());
  }
}

TEST(Family, IsDetectedAmongAHundredThousandTensors) {
  const Catalog catalog = catalog_of(table(published("deepseek-v3")));
  EXPECT_GT(catalog.tensors().size(), 90'000U);
  EXPECT_EQ(detect_family(catalog)->family, find_family("deepseek_v3"));
}

TEST(Family, NothingIsDetectedWhereNoNameIsKnown) {
  Catalog catalog;
  Tensor tensor;
  tensor.name = "encoder.block.0.layer.0.SelfAttention.q.weight";
  ASSERT_TRUE(catalog.add(std::move(tensor)));
  EXPECT_FALSE(detect_family(catalog));
}

TEST(Family, APrefixIsLookedPast) {
  const auto gpt2 = parse_name(*find_family("gpt2"), "transformer.h.3.attn.c_attn.weight");
  ASSERT_TRUE(gpt2);
  EXPECT_EQ(canonical_name(*gpt2), "h.3.attn.c_attn.weight");
  EXPECT_FALSE(parse_name(*find_family("gemma2"), "language_model.model.norm.weight"));
  EXPECT_EQ(detect_family(catalog_of(table(published("gpt2")), "transformer."))->family, find_family("gpt2"));
}

TEST(Family, APrefixThatAllNamesHaveMayBeMissing) {
  const auto falcon = parse_name(*find_family("falcon"), "h.3.self_attention.dense.weight");
  ASSERT_TRUE(falcon);
  EXPECT_EQ(canonical_name(*falcon), "transformer.h.3.self_attention.dense.weight");
  EXPECT_EQ(falcon->convention, Convention::kHf);
  const std::vector<std::string> both = {"word_embeddings.weight", "h.0.input_layernorm.weight",
                                         "h.0.self_attention.dense.weight", "ln_f.weight"};
  NamePatterns names;
  for (const std::string& name : both) add_name(names, name);
  EXPECT_EQ(best_known(names).family, find_family("falcon"));
  add_name(names, "word_embeddings_layernorm.weight");
  EXPECT_EQ(best_known(names).family, find_family("bloom"));
}

TEST(Family, WhatIsAroundATextModelIsAroundAnyFamilys) {
  const Family* const llava = find_family("llava");
  EXPECT_EQ(family_of_model_type("llava"), llava);
  EXPECT_EQ(family_of_model_type("llava", "llama"), llava);
  const Family* const over = family_of_model_type("llava", "qwen3_moe");
  ASSERT_TRUE(over);
  EXPECT_EQ(over->name, "llava+qwen3_moe");
  EXPECT_EQ(find_family("llava+qwen3_moe"), over) << "as a manifest names it";
  EXPECT_TRUE(over->knows_model_type("llava"));
  const std::string expert = "language_model.model.layers.1.mlp.experts.2.down_proj.weight";
  EXPECT_EQ(canonical_name(*parse_name(*over, expert)), expert);
  const auto fused = parse_name(*over, "model.language_model.layers.1.mlp.experts.down_proj");
  ASSERT_TRUE(fused);
  EXPECT_EQ(fused->convention, Convention::kTransformers);
  EXPECT_TRUE(over->carries("model.vision_tower.patch_conv.weight"));
  EXPECT_FALSE(family_of_model_type("llava", "no_such_text_model")) << "nothing is known of it";
  EXPECT_FALSE(family_of_model_type("llava", "gpt2")) << "whose names begin with nothing that LLaVA has a place for";
  EXPECT_EQ(family_of_model_type("qwen2_vl", "qwen2_vl_text"), find_family("qwen2_vl")) << "which is around no other";
  EXPECT_FALSE(find_family("qwen2_vl+llama"));
}

TEST(Family, WhatSeesForALanguageModelIsCarried) {
  const Family& gemma = *find_family("gemma3_vl");
  const std::string files = "language_model.model.layers.0.self_attn.q_norm.weight";
  const std::string memory = "model.language_model.layers.0.self_attn.q_norm.weight";
  EXPECT_EQ(canonical_name(*parse_name(gemma, files)), files);
  EXPECT_EQ(parse_name(gemma, memory)->convention, Convention::kTransformers);
  EXPECT_EQ(canonical_key(gemma, "optimizer.state." + memory + ".exp_avg"), "optimizer.state." + files + ".exp_avg");
  EXPECT_EQ(rename_key(gemma, files, Convention::kTransformers), memory);
  for (const char* name : {"vision_tower.post_layernorm.weight", "model.vision_tower.post_layernorm.weight"}) {
    EXPECT_TRUE(gemma.carries(name));
    EXPECT_FALSE(parse_name(gemma, name));
    EXPECT_EQ(canonical_key(gemma, name), "vision_tower.post_layernorm.weight");
    EXPECT_EQ(rename_key(gemma, name, Convention::kTransformers), "model.vision_tower.post_layernorm.weight");
  }
  EXPECT_FALSE(gemma.carries("audio_tower.post_layernorm.weight"));
  const NamePatterns names = {{memory, {memory, 1}}, {"vision_tower.x", {"vision_tower.x", 2}}, {"y", {"y", 4}}};
  EXPECT_EQ(best_known(names).family, &gemma);
  EXPECT_EQ(best_known(names).names, 3);
  EXPECT_FALSE(best_known(names).is_all);
}

TEST(Family, OnlyNumbersThatFitAreLayers) {
  EXPECT_EQ(parse_name(*find_family("qwen3_moe"), "model.layers.7.mlp.experts.12.up_proj.weight")->expert, 12);
  EXPECT_FALSE(parse_name(*find_family("qwen3_moe"), "model.layers.99999999999999999999.mlp.up_proj.weight"));
  EXPECT_FALSE(parse_name(*find_family("qwen3_moe"), "model.layers.-1.mlp.up_proj.weight"));
  EXPECT_FALSE(parse_name(*find_family("qwen3_moe"), "model.layers..mlp.up_proj.weight"));
}

TEST(DeepSeek, QuantizedMatricesHaveScales) {
  const auto list = by_name(table(published("deepseek-v3")));
  const std::string layer = "model.layers.5.";
  EXPECT_EQ(list.at(layer + "self_attn.kv_a_proj_with_mqa.weight").dtype, "float8_e4m3fn");
  const Parameter& scale = list.at(layer + "self_attn.kv_a_proj_with_mqa.weight_scale_inv");
  EXPECT_EQ(scale.shape, (Dims{5, 56}));  // the last block of rows of [576, 7168] is incomplete
  EXPECT_EQ(scale.dtype, "float32");
  EXPECT_EQ(list.at(layer + "mlp.gate.weight").dtype, "float32");  // like transformers
  EXPECT_EQ(list.at(layer + "mlp.gate.e_score_correction_bias").dtype, "float32");
  EXPECT_FALSE(list.contains(layer + "mlp.gate.weight_scale_inv"));
  EXPECT_FALSE(list.contains("lm_head.weight_scale_inv"));
  // If the producer chose what to quantize, any matrix may have scales; in this config the head has none.
  EXPECT_TRUE(parse_name(*find_family("deepseek_v3"), "lm_head.weight_scale_inv")->is_of_quantized());
  Catalog more = catalog_of(table(published("deepseek-v3")));
  Tensor scales;
  scales.name = "lm_head.weight_scale_inv";
  scales.shape = {1010, 56};
  ASSERT_TRUE(more.add(std::move(scales)));
  const auto checked = check_against_config(more, *find_family("deepseek_v3"), published("deepseek-v3"), true);
  ASSERT_FALSE(checked);
  EXPECT_NE(checked.error().message().find("does not describe: 'lm_head.weight_scale_inv'"), std::string::npos)
      << checked.error().message();
  EXPECT_FALSE(parse_name(*find_family("deepseek_v3"), layer + "self_attn.o_proj.weight_scale_inv_scale_inv"));
  EXPECT_EQ(canonical_key(*find_family("deepseek_v3"), scale.name), scale.name);
}

TEST(DeepSeek, PredictionLayersAreKnownAndNeedNotBeThere) {
  const ModelConfig config = published("deepseek-v3");
  const auto extra = optional_parameters(*find_family("deepseek_v3"), config);
  ASSERT_TRUE(extra);
  const auto list = by_name(*extra);
  EXPECT_EQ(list.at("model.layers.61.eh_proj.weight").shape, (Dims{7168, 14336}));
  EXPECT_EQ(list.at("model.layers.61.shared_head.head.weight").shape, (Dims{129280, 7168}));
  EXPECT_TRUE(list.contains("model.layers.61.mlp.experts.255.down_proj.weight_scale_inv"));
  EXPECT_FALSE(list.contains("model.embed_tokens.weight"));
  for (const auto& [name, p] : list) EXPECT_EQ(p.layer, 61) << name;
  EXPECT_FALSE(by_name(table(config)).contains("model.layers.60.eh_proj.weight"));
  // The published model has 46,000 matrices, as many scales, and a prediction layer.
  Catalog whole = catalog_of(table(config));
  EXPECT_TRUE(check_against_config(whole, *find_family("deepseek_v3"), config, true));
  for (const Parameter& p : *extra) {
    Tensor tensor;
    tensor.name = p.name;
    tensor.shape = p.shape;
    ASSERT_TRUE(whole.add(std::move(tensor)));
  }
  EXPECT_TRUE(check_against_config(whole, *find_family("deepseek_v3"), config, true));
  Tensor beyond;
  beyond.name = "model.layers.62.enorm.weight";
  beyond.shape = {7168};
  ASSERT_TRUE(whole.add(std::move(beyond)));
  EXPECT_FALSE(check_against_config(whole, *find_family("deepseek_v3"), config, true));
}

TEST(DeepSeek, WithoutQueryRankTheQueriesAreOneMatrix) {
  const ModelConfig config = parsed_config(R"({"model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32,
      "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 4, "q_lora_rank": null, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
      "v_head_dim": 5, "n_routed_experts": 3, "n_shared_experts": 2, "first_k_dense_replace": 1,
      "attention_bias": true})");
  const auto list = by_name(table(config));
  EXPECT_EQ(list.at("model.layers.0.self_attn.q_proj.weight").shape, (Dims{40, 32}));
  EXPECT_FALSE(list.contains("model.layers.0.self_attn.q_a_proj.weight"));
  EXPECT_FALSE(list.contains("model.layers.0.self_attn.q_a_proj.bias"));
  EXPECT_EQ(list.at("model.layers.0.self_attn.kv_a_proj_with_mqa.bias").shape, (Dims{12}));
  EXPECT_EQ(list.at("model.layers.0.self_attn.kv_b_proj.weight").shape, (Dims{44, 8}));
  EXPECT_EQ(list.at("model.layers.1.mlp.shared_experts.down_proj.weight").shape, (Dims{32, 32}));
  EXPECT_TRUE(list.contains("model.layers.0.mlp.up_proj.weight"));
  EXPECT_FALSE(list.contains("model.layers.1.mlp.up_proj.weight"));
}

TEST(Gpt2, ColumnsAreTheLastDimension) {
  const auto list = by_name(table(published("gpt2")));
  const Parameter& fused = list.at("h.0.attn.c_attn.weight");
  EXPECT_EQ(fused.shape, (Dims{768, 2304}));
  EXPECT_EQ(fused.rule->tp_dim, 1);
  EXPECT_EQ(fused.rule->sections, 3);
  EXPECT_EQ(list.at("h.0.mlp.c_proj.weight").rule->tp_dim, 0);
  EXPECT_TRUE(list.at("lm_head.weight").is_tied);
  EXPECT_TRUE(parse_name(*find_family("gpt2"), "h.0.attn.bias")->rule->is_dropped());
}

TEST(Family, UnknownQuantizationIsRefusedByName) {
  ModelConfig config = published("qwen3-8b");
  config.quantization = "gptq";
  const auto list = parameters(*find_family("qwen3"), config);
  ASSERT_FALSE(list);
  EXPECT_NE(list.error().message().find("unknown quantization 'gptq'"), std::string::npos) << list.error().message();
}

TEST(Family, MoreTensorsThanAnyModelHasAreRefused) {
  ModelConfig config = published("qwen3-30b-a3b");
  config.set("num_experts", Index{1} << 39);
  EXPECT_FALSE(parameters(*find_family("qwen3_moe"), config));
  config.set("num_experts", 8);
  for (const Index layers : {Index{444'000}, Index{1} << 39}) {
    config.set("num_hidden_layers", layers);
    const auto list = parameters(*find_family("qwen3_moe"), config);
    ASSERT_FALSE(list);
    EXPECT_NE(list.error().message().find("describes more than 500,000 tensors"), std::string::npos);
  }
}

// Torchtitan's rows are in rotary pairs for Llama, and in Hugging Face's order for Qwen and DeepSeek.
TEST(Family, RowsAreInPairsWhereTheTablesSaySo) {
  using enum Convention;
  for (const char* name : {"llama", "mistral"}) {
    EXPECT_FALSE(same_row_order(*find_family(name), kHf, kTorchtitan));
    EXPECT_FALSE(same_row_order(*find_family(name), kTorchtitan2026, kMegatron));
    EXPECT_TRUE(same_row_order(*find_family(name), kTorchtitan, kTorchtitan2026));
    EXPECT_TRUE(same_row_order(*find_family(name), kHf, kMegatron));
  }
  for (const char* name : {"qwen3", "qwen3_moe", "deepseek_v3"})
    EXPECT_TRUE(same_row_order(*find_family(name), kHf, kTorchtitan2026)) << name;
}

TEST(Family, MoreElementsThanCanBeCountedAreRefused) {
  ModelConfig config = published("llama-3.1-8b");
  config.set("vocab_size", Index{1} << 40);
  config.set("hidden_size", Index{1} << 22);  // each of the two vocabularies fits 64 bits, both together do not
  const auto list = parameters(*find_family("llama"), config);
  ASSERT_FALSE(list);
  EXPECT_NE(list.error().message().find("describes more than 36,028,797,018,963,968 elements"), std::string::npos)
      << list.error().message();
}

// Without experts in the config, no layer is searched for them.
TEST(Family, NoExpertsAreListedAtOnce) {
  ModelConfig config = published("llama-3.1-8b");
  config.set("num_hidden_layers", Index{1} << 40);
  Family family;
  family.rules = {{.hf = "b.{}.e.{}.weight", .shape = "hidden_size", .layers = Layers::kSparse}};
  const auto list = parameters(family, config);
  ASSERT_TRUE(list) << list.error().message();
  EXPECT_TRUE(list->empty());
}

TEST(Family, MistralSharesLlamasTorchtitanNames) {
  EXPECT_TRUE(find_family("mistral")->has_convention(Convention::kTorchtitan));
  EXPECT_FALSE(find_family("gemma3")->has_convention(Convention::kTorchtitan));
  EXPECT_EQ(rename_key(*find_family("mistral"), "model.layers.3.self_attn.q_proj.weight", Convention::kTorchtitan),
            "layers.3.attention.wq.weight");
}

}  // namespace
}  // namespace reshard::family_test
