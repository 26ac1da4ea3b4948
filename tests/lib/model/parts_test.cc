// Tests which names belong to the model and which to its optimizers, under the wrappers of frameworks and people.
#include "lib/model/parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace reshard::parts_test {
namespace {

// Return the names of two layers of a Llama, in Hugging Face's convention and in torchtitan's.
std::vector<std::string> hf_names() {
  std::vector<std::string> out = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"};
  for (const char* layer : {"model.layers.0.", "model.layers.1."})
    for (const char* name :
         {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.gate_proj.weight", "input_layernorm.weight"})
      out.push_back(std::string(layer) + name);
  return out;
}

std::vector<std::string> torchtitan_names() {
  std::vector<std::string> out = {"tok_embeddings.weight", "norm.weight", "output.weight"};
  for (const char* layer : {"layers.0.", "layers.1."})
    for (const char* name : {"attention.wq.weight", "feed_forward.w1.weight", "attention_norm.weight"})
      out.push_back(std::string(layer) + name);
  return out;
}

Catalog catalog_of(const std::vector<std::string>& names) {
  Catalog out;
  for (const std::string& name : names) {
    Tensor tensor;
    tensor.name = name;
    tensor.shape = {2, 2};
    EXPECT_TRUE(out.add(std::move(tensor)));
  }
  return out;
}

std::map<std::string, std::string> keys_of(const std::vector<std::string>& names, const KeyChanges& changes = {}) {
  Catalog catalog = catalog_of(names);
  const Status found = find_parts(catalog, changes);
  EXPECT_TRUE(found) << found.error().message();
  std::map<std::string, std::string> out;
  for (const Tensor& t : catalog.tensors()) out[t.name] = t.key();
  return out;
}

TEST(Parts, PlainNamesAreTheirOwnKeys) {
  std::vector<std::string> names = hf_names();
  for (const std::string& name : hf_names()) names.push_back("optimizer.state." + name + ".exp_avg");
  names.insert(names.end(), {"train_state.step", "lr_scheduler.last_epoch"});
  for (const auto& [name, key] : keys_of(names)) EXPECT_EQ(key, name);
}

TEST(Parts, WrappersOfModelAndOptimizerAreFoundTogether) {
  struct Case {
    const char* model;      // prefix of the model's names
    const char* optimizer;  // prefix of "state.<parameter>.exp_avg"
    const char* parameter;  // prefix of the optimizer's parameters
    const char* plain;      // prefix of the optimizer state's keys
  };
  for (const auto& plain_names : {hf_names(), torchtitan_names()})
    for (const Case& c :
         {Case{"model.", "optimizer.", "", "optimizer."}, Case{"app.model.", "app.optim.", "", "optimizer."},
          Case{"state.model.", "state.optimizer.", "", "optimizer."},
          Case{"module.", "optimizer.", "module.", "optimizer."},
          Case{"model.module.", "optim.", "module.", "optimizer."},
          Case{"model.net.", "optimizer_0.", "net.", "optimizer_0."},
          Case{"_forward_module.", "optimizer.", "_forward_module.", "optimizer."},
          Case{"model._orig_mod.", "optimizer.", "_orig_mod.", "optimizer."},
          Case{"model._fsdp_wrapped_module.", "optimizer_1.", "", "optimizer_1."},
          Case{"state_dict.", "optimizers.", "", "optimizer."},
          Case{"state.model.", "state.optimizers.DecoupledAdamW.", "model.", "optimizer."},
          Case{"whatever.the.user.chose.", "optimizer.", "", "optimizer."}}) {
      std::vector<std::string> names;
      std::map<std::string, std::string> expected;
      for (const std::string& name : plain_names) {
        expected[c.model + name] = name;
        expected[std::string(c.optimizer) + "state." + c.parameter + name + ".exp_avg"] =
            std::string(c.plain) + "state." + name + ".exp_avg";
      }
      for (const auto& [name, key] : expected) names.push_back(name);
      EXPECT_EQ(keys_of(names), expected) << c.model << " " << c.optimizer;
    }
}

// Muon trains the matrices, AdamW the rest.
TEST(Parts, NamedOptimizersAreNumbered) {
  std::vector<std::string> names;
  std::map<std::string, std::string> expected;
  for (const std::string& name : hf_names()) {
    const bool is_matrix = name.find("_proj") != std::string::npos;
    names.push_back("model." + name);
    expected["optimizers." + std::string(is_matrix ? "muon" : "adamw") + ".state." + name + ".exp_avg"] =
        std::string(is_matrix ? "optimizer_1" : "optimizer_0") + ".state." + name + ".exp_avg";
  }
  for (const auto& [name, key] : expected) names.push_back(name);
  Catalog catalog = catalog_of(names);
  ASSERT_TRUE(find_parts(catalog));
  std::map<std::string, std::string> keys;
  for (const Tensor& t : catalog.tensors())
    if (t.name.starts_with("optimizers.")) keys[t.name] = t.key();
  EXPECT_EQ(keys, expected);
  std::vector<std::string> parts;
  for (const Part& part : catalog.parts) parts.push_back(part.prefix + " " + part.name);
  EXPECT_THAT(parts, testing::UnorderedElementsAre("model. model", "optimizers.adamw. optimizer_0",
                                                   "optimizers.muon. optimizer_1"));
}

TEST(Parts, WrappersWithinNamesGo) {
  std::vector<std::string> names;
  for (const std::string& name : torchtitan_names())
    names.push_back(name.starts_with("layers.")
                        ? name.substr(0, 9) + "_checkpoint_wrapped_module._orig_mod." + name.substr(9)
                        : name);
  const auto keys = keys_of(names);
  EXPECT_EQ(keys.at("layers.0._checkpoint_wrapped_module._orig_mod.attention.wq.weight"),
            "layers.0.attention.wq.weight");
  EXPECT_EQ(keys.at("norm.weight"), "norm.weight");
}

// PEFT's modules: a layer with low-rank matrices next to it, or a trained copy of the whole layer.
TEST(Parts, ATrainedModuleIsAnAdaptersAndWhatItWasIsTheModels) {
  std::vector<std::string> names;
  for (const std::string& name : hf_names())
    if (name != "lm_head.weight" && name != "model.layers.0.self_attn.q_proj.weight")
      names.push_back("app.model.base_model.model." + name);
  const std::string around = "app.model.base_model.model.", head = around + "lm_head.",
                    query = around + "model.layers.0.self_attn.q_proj.",
                    state = "app.optim.state.base_model.model.lm_head.modules_to_save.default.weight.exp_avg";
  names.insert(names.end(),
               {query + "base_layer.weight", query + "lora_A.default.weight", query + "lora_B.default.weight",
                head + "original_module.weight", head + "modules_to_save.default.weight", state});
  const auto keys = keys_of(names);
  EXPECT_EQ(keys.at(head + "original_module.weight"), "lm_head.weight");
  EXPECT_EQ(keys.at(head + "modules_to_save.default.weight"), "peft_adapter.base_model.model.lm_head.weight");
  EXPECT_EQ(keys.at(query + "base_layer.weight"), "model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(keys.at(query + "lora_A.default.weight"),
            "peft_adapter.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
  EXPECT_EQ(keys.at(state), "optimizer.state.peft_adapter.base_model.model.lm_head.weight.exp_avg");
}

// PEFT's own file also contains the embedding if its layer is changed.
TEST(Parts, AnAdapterByItselfIsBesideNoWeights) {
  const std::string head = "base_model.model.lm_head.";
  for (const auto& [name, key] : keys_of({head + "base_layer.weight", head + "lora_A.weight", head + "lora_B.weight"}))
    EXPECT_EQ(key, name);
}

TEST(Parts, WhatLiesBesideAWrappedModelIsOtherState) {
  std::vector<std::string> names;
  for (const std::string& name : torchtitan_names()) names.push_back("model." + name);
  for (const std::string& name : torchtitan_names()) names.push_back("ema." + name);
  names.push_back("loss_history");
  for (const auto& [name, key] : keys_of(names))
    EXPECT_EQ(split_state_key(key).kind, name.starts_with("model.") ? StateKind::kModel : StateKind::kOther) << name;
}

// transformers' LlamaModel has the names of LlamaForCausalLM without "model." and without the head.
TEST(Parts, AModelWithoutItsHeadHasTheNamesOfTheWhole) {
  std::vector<std::string> whole;
  for (const std::string& name : hf_names())
    if (name != "lm_head.weight") whole.push_back(name);
  for (const std::string wrapper : {"", "app.", "model.", "app.model.", "module.", "encoder."})
    for (const std::string optimizer : {"", "module."}) {
      std::map<std::string, std::string> expected;
      std::vector<std::string> names;
      for (const std::string& key : whole) {
        const std::string base = key.substr(6);
        expected[wrapper + base] = key;
        expected["optim.state." + optimizer + base + ".exp_avg"] = "optimizer.state." + key + ".exp_avg";
      }
      for (const auto& [name, key] : expected) names.push_back(name);
      EXPECT_EQ(keys_of(names), expected) << wrapper << " " << optimizer;
    }
}

// Qwen2VLModel, and LlavaModel in memory, have the whole model's in-memory names without "model.".
TEST(Parts, AModelThatSeesIsOneWithoutItsHead) {
  for (const std::string wrapper : {"", "app.model.", "model."}) {
    std::map<std::string, std::string> expected = {
        {wrapper + "visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"}};
    std::vector<std::string> names;
    for (const std::string& name : hf_names())
      if (name.starts_with("model."))
        expected[wrapper + "language_model." + name.substr(6)] = "model.language_model." + name.substr(6);
    for (const auto& [name, key] : expected) names.push_back(name);
    EXPECT_EQ(keys_of(names), expected) << wrapper;
  }
}

// The names of Falcon and GPT-J may lack "transformer.", and those of GPT-2 may have it; it is not a wrapper.
TEST(Parts, FamiliesWhoseFirstPartMayBeMissingHaveNoWrapper) {
  const std::vector<std::string> names = {"word_embeddings.weight", "h.0.mlp.dense_h_to_4h.weight",
                                          "h.0.self_attention.dense.weight", "ln_f.weight"};
  for (const auto& [name, key] : keys_of(names)) EXPECT_EQ(key, name);
}

// Unknown names may be anything, such as a vision model around the layers.
TEST(Parts, OnlyWhatAFamilyKnowsAllOfIsAModelWithoutItsHead) {
  std::vector<std::string> names = {"visual.patch_embed.proj.weight"};
  for (const std::string& name : hf_names())
    if (name.starts_with("model.layers.")) names.push_back(name.substr(6));
  for (const auto& [name, key] : keys_of(names)) EXPECT_EQ(key, name);
}

// No family knows the names, but the optimizer has them without the wrapper.
TEST(Parts, AModelOfNoFamilyIsFoundByItsOptimizer) {
  std::vector<std::string> names;
  for (const char* name : {"blocks.0.a", "blocks.1.a", "stem.w"}) {
    names.push_back("app.model." + std::string(name));
    names.push_back("app.optim.state." + std::string(name) + ".exp_avg");
  }
  const auto keys = keys_of(names);
  EXPECT_EQ(keys.at("app.model.blocks.0.a"), "blocks.0.a");
  EXPECT_EQ(keys.at("app.optim.state.stem.w.exp_avg"), "optimizer.state.stem.w.exp_avg");
  // Without an optimizer nothing shows the wrapper, so names stay unchanged.
  const auto alone = keys_of({"trunk.blocks.0.a", "trunk.blocks.1.a"});
  EXPECT_EQ(alone.at("trunk.blocks.0.a"), "trunk.blocks.0.a");
}

// A few names of T5 are other families'.
TEST(Parts, FewNamesOfAFamilyAreNoModelOfIt) {
  const std::vector<std::string> plain = {
      "shared.weight",
      "lm_head.weight",
      "decoder.final_layer_norm.weight",
      "decoder.embed_tokens.weight",
      "encoder.block.0.layer.0.SelfAttention.q.weight",
      "encoder.block.0.layer.0.SelfAttention.k.weight",
      "encoder.block.0.layer.1.DenseReluDense.wi.weight",
      "decoder.block.0.layer.0.SelfAttention.q.weight",
      "decoder.block.0.layer.0.SelfAttention.k.weight",
      "decoder.block.0.layer.1.EncDecAttention.q.weight",
  };
  std::vector<std::string> names;
  for (const std::string& name : plain) names.push_back("model." + name);
  auto keys = keys_of(names);
  for (const std::string& name : plain) EXPECT_EQ(keys.at("model." + name), name);
  for (const std::string& name : plain) names.push_back("optimizer.state." + name + ".exp_avg");
  keys = keys_of(names);
  for (const std::string& name : plain) EXPECT_EQ(keys.at("model." + name), name);
}

// In ColPali's files, the vision-language model's names begin with "vlm.", next to a projection.
TEST(Parts, NothingIsBesideAModelInItsFiles) {
  std::vector<std::string> names = {"projection.weight"};
  for (const std::string& name : hf_names()) names.push_back("vlm." + name);
  const auto keys_in = [&](bool is_model) {
    Catalog catalog = catalog_of(names);
    EXPECT_TRUE(find_parts(catalog, {}, is_model));
    std::map<std::string, std::string> out;
    for (const Tensor& t : catalog.tensors()) out[t.name] = t.key();
    return out;
  };
  for (const auto& [name, key] : keys_in(true)) EXPECT_EQ(key, name);
  EXPECT_EQ(keys_in(false).at("vlm.lm_head.weight"), "lm_head.weight");
  names.erase(names.begin());
  EXPECT_EQ(keys_in(true).at("vlm.lm_head.weight"), "lm_head.weight") << "which begins all names";
}

// A GPT-2 captioner with an image network: the optimizer contains both.
TEST(Parts, WhatIsTrainedBesideAFamilysModelIsOneWithIt) {
  std::vector<std::string> plain = {"encoder.embeddings.w", "encoder.layers.0.a", "enc_to_dec_proj.weight"};
  for (const char* name :
       {"wte.weight", "wpe.weight", "ln_f.weight", "h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight"})
    plain.push_back("decoder.transformer." + std::string(name));
  std::vector<std::string> names;
  for (const std::string& name : plain) {
    names.push_back("model." + name);
    names.push_back("optim.state." + name + ".exp_avg");
  }
  const auto keys = keys_of(names);
  for (const std::string& name : plain) EXPECT_EQ(keys.at("model." + name), name);
}

// Customary wrapper names, if nothing else identifies the wrapper. "model." is also a prefix of transformers.
TEST(Parts, AModelOfNoFamilyIsFoundByTheWordsBeforeIt) {
  const std::vector<std::string> with_head = {"trunk.blocks.0.a", "trunk.blocks.1.a", "trunk.stem.w", "a_head.weight"};
  const std::vector<std::string> without_head = {"left.blocks.0.a", "left.blocks.1.a", "right.stem.w"};
  const std::vector<std::string> numbered_first = {"blocks.0.a", "blocks.1.a", "stem.w", "a_head.weight"};
  const auto prefix_of = [](const std::vector<std::string>& plain, const std::string& wrapper) {
    std::vector<std::string> names;
    for (const std::string& name : plain) names.push_back(wrapper + name);
    const std::string key = keys_of(names).at(names[0]);
    return names[0].substr(0, names[0].size() - key.size());
  };
  for (const std::string wrapper :
       {"", "app.model.", "state.model.", "module.", "net.", "state_dict.", "app.", "train.net."})
    for (const auto& plain : {with_head, without_head, numbered_first})
      EXPECT_EQ(prefix_of(plain, wrapper), wrapper) << plain[0];
  for (const std::string wrapper : {"model.", "state_dict.model.", "module.model."}) {
    const std::string outer = wrapper.substr(0, wrapper.size() - 6);
    EXPECT_EQ(prefix_of(with_head, wrapper), wrapper);
    EXPECT_EQ(prefix_of(without_head, wrapper), outer);
    EXPECT_EQ(prefix_of(numbered_first, wrapper), outer);
  }
  EXPECT_EQ(prefix_of(with_head, "model.model."), "model.model.");
}

TEST(Parts, OfAnOptimizerAloneTheNamesAreTheModels) {
  std::vector<std::string> names;
  for (const std::string& name : hf_names()) names.push_back("optimizer.state." + name + ".exp_avg");
  for (const auto& [name, key] : keys_of(names)) EXPECT_EQ(key, name);
}

TEST(Parts, TheUserMaySayWhatNoRuleKnows) {
  const std::vector<std::string> names = {"actor.blocks.0.w", "actor.blocks.1.w", "critic.blocks.0.w"};
  const auto keys = keys_of(names, {.model_prefix = "actor", .part = {}, .renames = {{"blocks", "layers"}}});
  EXPECT_EQ(keys.at("actor.blocks.0.w"), "layers.0.w");
  EXPECT_EQ(split_state_key(keys.at("critic.blocks.0.w")).kind, StateKind::kOther);
  Catalog catalog = catalog_of(names);
  const Status refused = find_parts(catalog, {.model_prefix = "judge.", .part = {}, .renames = {}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUsage);
}

TEST(Parts, OnlyWholePartsOfNamesAreRenamed) {
  const auto keys = keys_of({"h.0.w", "xh.0.w", "a.h"}, {.model_prefix = {}, .part = {}, .renames = {{"h", "layers"}}});
  EXPECT_EQ(keys.at("h.0.w"), "layers.0.w");
  EXPECT_EQ(keys.at("xh.0.w"), "xh.0.w");
  EXPECT_EQ(keys.at("a.h"), "a.layers");
}

TEST(Parts, NamesThatAreOnlyDotsAndWordsAreHarmless) {
  const std::vector<std::string> names = {".",          "..",        "optimizer", "optimizer.",        "optim.state.",
                                          "a..b",       "model.",    ".model",    "optimizer.state.x", "state.",
                                          "_orig_mod.", "scheduler", "{}",        "app.app.app.optim"};
  const auto keys = keys_of(names);
  EXPECT_EQ(keys.size(), names.size());
}

}  // namespace
}  // namespace reshard::parts_test
