// Tests models whose names in transformers' memory differ from those in files, as trainers save them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "lib/base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/expect_run.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::families_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string moe() { return test_data("moe/qwen3_5_moe"); }

// tests/data/moe has the fused experts of two layers, saved by two FSDP ranks. The digests are those of
// save_pretrained's files.
TEST(FamiliesOnDisk, FusedExpertsBecomeTheFilesOfSavePretrainedAndBack) {
  const TempDir dir;
  const CommandResult there = reshard_cli({"convert", moe(), dir / "hf", "--to", "hf", "-q"});
  ASSERT_EQ(there.exit_code, 0) << there.err;
  const TensorValues files = load_checkpoint(dir / "hf");
  EXPECT_EQ(digests_of(files), read_digests(moe() + ".hf.json"));
  const CommandResult verified = reshard_cli({"verify", moe(), "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;

  const CommandResult back = reshard_cli(
      {"convert", dir / "hf", dir / "back", "--to", "dcp", "--names", "transformers", "--mesh", "dp_shard=3", "-q"});
  ASSERT_EQ(back.exit_code, 0) << back.err;
  TensorValues memory;
  for (auto& [name, value] : load_checkpoint(moe())) memory.emplace(name.substr(name.find('.') + 1), value);
  EXPECT_EQ(load_checkpoint(dir / "back"), memory);
}

// tests/data/nanogpt has saves of nanoGPT's train.py, with biases and, compiled, without. The digests are those of the
// matrices with which model.py's from_pretrained would have begun.
TEST(FamiliesOnDisk, NanoGptIsToldFromGpt2ByItsShapes) {
  for (const std::string name : {"biased", "unbiased"}) {
    const TempDir dir;
    const std::string saved = test_data("nanogpt/" + name + ".pt");
    const CommandResult r = reshard_cli({"convert", saved, dir / "hf", "--to", "hf"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("nanoGPT names -> Hugging Face names"));
    EXPECT_EQ(digests_of(load_checkpoint(dir / "hf")), read_digests(test_data("nanogpt/" + name + ".hf.json")));
    EXPECT_THAT(read_file(dir / "hf/config.json"), HasSubstr(R"("activation_function": "gelu")"));
    for (const std::string& made : {std::string(dir / "hf"), saved}) {
      const CommandResult verified = reshard_cli({"verify", made, "--fail-on", "warning"});
      EXPECT_EQ(verified.exit_code, 0) << verified.out;
    }
    const CommandResult equal = reshard_cli({"verify", saved, "--against", dir / "hf"});
    EXPECT_EQ(equal.exit_code, 0) << equal.out;

    const CommandResult back =
        reshard_cli({"convert", dir / "hf", dir / "back", "--to", "bin", "--family", "nanogpt", "--names", "nanogpt"});
    ASSERT_EQ(back.exit_code, 0) << back.err;
    TensorValues model;
    for (auto& [key, value] : load_checkpoint(saved))
      if (const std::size_t at = key.find("transformer."); at != std::string::npos && !key.starts_with("optimizer"))
        model.emplace(key.substr(at), value);
    TensorValues written = load_checkpoint(dir / "back");
    EXPECT_EQ(written["lm_head.weight"], written["transformer.wte.weight"]);
    written.erase("lm_head.weight");
    EXPECT_EQ(written, model);
  }
}

// tests/data/olmo_core has OLMo-core 3.0's save of a model with a window in its first layer, on two ranks of FSDP. The
// digests are those of its convert_state_to_hf.
TEST(FamiliesOnDisk, OlmoCoreSaysInItsOwnConfigWhichModelItIs) {
  const TempDir dir;
  const std::string saved = test_data("olmo_core/step1");
  const CommandResult r = reshard_cli({"convert", saved, dir / "hf", "--to", "hf"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("OLMo-core names -> Hugging Face names"));
  EXPECT_EQ(digests_of(load_checkpoint(dir / "hf")), read_digests(test_data("olmo_core/olmo3.hf.json")));
  const auto config = parse_json(read_file(dir / "hf/config.json"), "config.json");
  ASSERT_TRUE(config);
  EXPECT_EQ(to_text(*config),
            R"({"architectures":["Olmo3ForCausalLM"],"attention_bias":false,"bos_token_id":null,"eos_token_id":88,)"
            R"("hidden_act":"silu","hidden_size":16,"intermediate_size":48,)"
            R"("layer_types":["sliding_attention","full_attention"],"max_position_embeddings":64,"model_type":"olmo3",)"
            R"("num_attention_heads":4,"num_hidden_layers":2,"num_key_value_heads":2,"pad_token_id":87,)"
            R"("rms_norm_eps":1e-06,"rope_theta":500000,"sliding_window":8,"tie_word_embeddings":false,)"
            R"("torch_dtype":"float32","vocab_size":90})");
  for (const std::string& made : {std::string(dir / "hf"), saved, saved + "/model_and_optim"}) {
    const CommandResult verified = reshard_cli({"verify", made, "--fail-on", "warning"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out;
  }
  const CommandResult back = reshard_cli(
      {"convert", dir / "hf", dir / "back", "--to", "dcp", "--names", "olmo-core", "--mesh", "dp_shard=3", "-q"});
  ASSERT_EQ(back.exit_code, 0) << back.err;
  TensorValues model;
  for (auto& [name, value] : load_checkpoint(saved)) model.emplace(name.substr(name.find('.') + 1), value);
  EXPECT_EQ(load_checkpoint(dir / "back"), model);
}

// with_rope_scaling() gives layers with full attention blocks of their own.
TEST(FamiliesOnDisk, OlmoCoreScalesTheRotaryEmbeddingsOfSomeLayers) {
  const std::string saved = test_data("olmo_core/step1"), text = read_file(saved + "/config.json");
  const std::string before = R"("block": )", after = R"(, "lm_head")", in_rope = R"("partial_rotary_factor": 1.0)";
  const std::size_t begin = text.find(before) + before.size(), end = text.find(after);
  const std::string block = text.substr(begin, end - begin);
  const auto scaled = [&](const std::string& scaling) {
    std::string out = block;
    return out.insert(out.find(in_rope) + in_rope.size(), R"(, "scaling": {)" + scaling + R"(RoPEScalingConfig"})");
  };
  const std::string yarn = R"("factor": 4.0, "old_context_len": 64, "_CLASS_": "olmo_core.nn.rope.YaRN)";
  const auto converted = [&](const std::string& overrides, const std::string& out) {
    const TempDir dir;
    std::filesystem::copy(saved + "/model_and_optim", dir / "ck");
    dir.write("ck/config.json", std::string(text).insert(end, R"(, "block_overrides": {)" + overrides + "}"));
    return reshard_cli({"convert", dir / "ck", out, "--to", "hf"});
  };
  const TempDir dir;
  const CommandResult r = converted(R"("1": )" + scaled(yarn), dir / "out");
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(to_text(*parse_json(read_file(dir / "out/config.json"), "config.json")),
              HasSubstr(R"("rope_scaling":{"attention_factor":1.138629436111989,"beta_fast":32,"beta_slow":1,)"
                        R"("factor":4.0,"original_max_position_embeddings":64,"rope_type":"yarn"},)"));
  const auto refused = [&](const std::string& overrides) {
    const CommandResult no = converted(overrides, dir / "none");
    EXPECT_EQ(no.exit_code, 4) << overrides;
    return no.err;
  };
  EXPECT_THAT(refused(R"("0": )" + scaled(yarn)), HasSubstr("block of its own in layer 0"));
  EXPECT_THAT(refused(R"("2": )" + scaled(yarn)), HasSubstr("block of its own in layer 2"));
  EXPECT_THAT(refused(R"("1": {})"), HasSubstr("block of its own in layer 1"));
  EXPECT_THAT(refused(R"("1": )" + scaled(R"("_CLASS_": "olmo_core.nn.rope.ABF)")),
              HasSubstr("scaling of rotary embeddings olmo_core.nn.rope.ABFRoPEScalingConfig"));
}

// Names do not show where norms are, so without OLMo-core's config, or with another one, they match no family.
TEST(FamiliesOnDisk, OlmoCoreNamesAloneAreOfNoFamily) {
  const TempDir dir;
  const std::string saved = test_data("olmo_core/step1");
  std::filesystem::copy(saved + "/model_and_optim", dir / "ck");
  const CommandResult unknown = reshard_cli({"convert", dir / "ck", dir / "hf", "--to", "hf"});
  EXPECT_EQ(unknown.exit_code, 4);
  EXPECT_THAT(unknown.err, HasSubstr("its tensors have OLMo-core names, which several families share"));
  EXPECT_FALSE(*path_exists(dir / "hf"));

  std::string text = read_file(saved + "/config.json");
  const std::string reordered = "reordered_norm";
  text.replace(text.find(reordered), reordered.size(), "default");
  dir.write("ck/config.json", text);
  const CommandResult refused = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "hf"});
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_THAT(refused.err,
              AllOf(HasSubstr(dir / "ck/config.json"), HasSubstr("block.name 'default'"), HasSubstr("--config")));
  EXPECT_FALSE(*path_exists(dir / "out"));
}

// The names are a family's, but no model of it has these shapes.
TEST(FamiliesOnDisk, ShapesThatContradictEachOtherAreRefusedWithoutAConfigToo) {
  const TempDir dir;
  const auto value = [](const Dims& shape) {
    return TensorValue{DType::kFloat32, shape, std::string(static_cast<std::size_t>(4 * volume(shape)), '\x3f')};
  };
  write_dcp({{"model.embed_tokens.weight", value({40, 16})},
             {"model.layers.0.mlp.up_proj.weight", value({24, 16})},
             {"model.layers.0.mlp.down_proj.weight", value({24, 16})},
             {"model.norm.weight", value({16})}},
            dir / "ck", *Mesh::parse("dp_shard=2"));
  const CommandResult refused = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "hf"});
  EXPECT_EQ(refused.exit_code, 3);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("has the tensor names of family llama, but not its shapes: tensor "
                                           "'model.layers.0.mlp.down_proj.weight' [24, 16]: expected hidden_size 16"),
                                 HasSubstr("--family none")));
  EXPECT_FALSE(*path_exists(dir / "out"));
  const CommandResult audit = reshard_cli({"verify", dir / "ck"});
  EXPECT_EQ(audit.exit_code, 1);
  EXPECT_THAT(audit.out, HasSubstr("'model.layers.0.mlp.down_proj.weight' [24, 16]: expected hidden_size 16"));
  EXPECT_EQ(reshard_cli({"convert", dir / "ck", dir / "out", "--to", "hf", "--allow", "config"}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"convert", dir / "ck", dir / "none", "--to", "hf", "--family", "none"}).exit_code, 0);
}

// A Llama classifier, and a Llama without a head: config.json gives the class.
TEST(FamiliesOnDisk, AModelHasTheHeadOfItsClass) {
  TensorValues values = load_checkpoint(sample("tp8") + "/hf.safetensors");
  values.erase("lm_head.weight");
  const std::string config = read_file(sample("tp8") + "/config.json"), causal = "LlamaForCausalLM";
  const auto converted = [&](const std::string& architecture, const std::string& dir) {
    std::string text = config;
    text.replace(text.find(causal), causal.size(), architecture);
    write_dcp(values, dir + "/ck", *Mesh::parse("dp_shard=2"));
    write_file(dir + "/ck/config.json", text);
    return reshard_cli({"convert", dir + "/ck", dir + "/out", "--to", "hf"});
  };
  const auto expect_written = [&](const std::string& architecture) {
    const TempDir dir;
    const CommandResult r = converted(architecture, dir.path());
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr(architecture + ", 38 of 38 tensors of "));
    EXPECT_EQ(load_checkpoint(dir / "out"), values);
    const CommandResult verified = reshard_cli({"verify", dir / "out"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out;
  };
  const auto expect_refused = [&](const std::string& architecture, int code) {
    const TempDir dir;
    EXPECT_EQ(converted(architecture, dir.path()).exit_code, code);
    EXPECT_FALSE(*path_exists(dir / "out"));
  };
  expect_written("LlamaModel");
  expect_refused(causal, 3);
  values["score.weight"] = {DType::kBFloat16, {2, 64}, std::string(256, '\x3f')};
  expect_written("LlamaForSequenceClassification");
  expect_refused(causal, 4);
}

// SigLIP's projection of the text is a head whose rows are not tokens.
TEST(FamiliesOnDisk, AHeadOfAnotherKindIsNoVocabulary) {
  const TempDir dir;
  const auto value = [](const Dims& shape) {
    return TensorValue{DType::kFloat32, shape, std::string(static_cast<std::size_t>(4 * volume(shape)), '\x3f')};
  };
  TensorValues values{{"logit_scale", value({1})},
                      {"text_model.embeddings.token_embedding.weight", value({203, 32})},
                      {"text_model.head.weight", value({32, 32})},
                      {"vision_model.head.mlp.fc1.weight", value({40, 32})}};
  for (const std::string layer : {"0", "1"})
    for (const std::string tower : {"text_model", "vision_model"})
      values[tower + ".encoder.layers." + layer + ".mlp.fc1.weight"] = value({40, 32});
  write_dcp(values, dir / "ck", {});
  write_file(dir / "ck/config.json", R"({"architectures": ["SiglipModel"], "model_type": "siglip3",
      "text_config": {"model_type": "siglip_text_model", "vocab_size": 203, "hidden_size": 32, "num_hidden_layers": 2},
      "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 2}})");
  const CommandResult verified =
      reshard_cli({"verify", dir / "ck", "--config", dir / "ck/config.json", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  EXPECT_THAT(verified.out, HasSubstr("vision_config.hidden_size, text_config.vocab_size"));
}

// Experts differ from those of the config; the errors name each before anything is written.
class WrongExperts : public testing::Test {
 protected:
  WrongExperts() {
    for (auto& [name, value] : load_checkpoint(moe())) memory_.emplace(name.substr(name.find('.') + 1), value);
    const CommandResult made = reshard_cli({"convert", moe(), dir_ / "hf", "--to", "hf", "-q"});
    EXPECT_EQ(made.exit_code, 0) << made.err;
    files_ = load_checkpoint(dir_ / "hf");
    config_ = read_file(moe() + "/config.json");
  }

  // Expects that conversions of these tensors, under both kinds of names, are refused.
  void expect_refused(const TensorValues& tensors, const testing::Matcher<std::string>& message) {
    const TempDir dir;
    write_dcp(tensors, dir / "ck", {});
    write_file(dir / "ck/config.json", config_);
    for (const char* names : {"hf", "transformers"}) {
      const CommandResult r = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "hf", "--names", names});
      EXPECT_EQ(r.exit_code, 3) << names << ": " << r.out << r.err;
      EXPECT_THAT(r.err, message) << names;
      EXPECT_FALSE(*path_exists(dir / "out")) << names;
    }
  }

  const TempDir dir_;
  TensorValues memory_, files_;  // as in transformers' memory, and as in its files
  std::string config_;
};

TEST_F(WrongExperts, OneThatIsMissing) {
  ASSERT_EQ(files_.erase("model.layers.1.mlp.experts.2.up_proj.weight"), 1u);
  expect_refused(files_, HasSubstr("is missing, the first is 'model.layers.1.mlp.experts.2.up_proj.weight'"));
}

TEST_F(WrongExperts, OneOfAnotherShape) {
  TensorValue& value = files_.at("model.layers.0.mlp.experts.3.down_proj.weight");
  value.shape = {32, 48};
  expect_refused(files_, HasSubstr("'model.layers.0.mlp.experts.3.down_proj.weight': "));
}

TEST_F(WrongExperts, MoreOrFewerThanTheConfigSays) {
  const std::string was = config_, word = "\"num_experts\": 4";
  ASSERT_NE(was.find(word), std::string::npos);
  config_.replace(was.find(word), word.size(), "\"num_experts\": 5");
  for (const TensorValues* tensors : {&memory_, &files_}) expect_refused(*tensors, HasSubstr("config.json"));
  config_ = was;
  config_.replace(was.find(word), word.size(), "\"num_experts\": 3");
  for (const TensorValues* tensors : {&memory_, &files_}) expect_refused(*tensors, HasSubstr("config.json"));
}

TEST_F(WrongExperts, UnderTwoNames) {
  const std::string name = "model.layers.1.mlp.experts.0.gate_proj.weight";
  memory_.emplace(name, files_.at(name));
  expect_refused(memory_, AllOf(HasSubstr("is stored twice, under two names"), HasSubstr(name)));
}

// A tied head that only the view has is named in no message and no manifest.
TEST(TiedHeads, AreNotNamedWhereTheyAreNotStored) {
  const TempDir dir;
  dir.write("config.json", R"({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 40,
    "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 4,
    "vocab_size": 149, "tie_word_embeddings": true, "torch_dtype": "bfloat16"})");
  const std::string config = dir / "config.json", padded = dir / "padded";
  expect_success(reshard_cli({"synth", padded, "--config", config, "--to", "dcp", "--names", "megatron", "--shape",
                              "*embed_tokens.weight=152x40", "-q"}));
  const CommandResult refused = reshard_cli({"convert", padded, dir / "out", "--to", "hf", "--config", config});
  expect_refusal(refused, 3, HasSubstr("tensor 'model.embed_tokens.weight': "));
  const CommandResult cut =
      reshard_cli({"convert", padded, dir / "out", "--to", "hf", "--config", config, "--repair", "vocab"});
  expect_success(cut);
  EXPECT_THAT(cut.out, HasSubstr("model.embed_tokens.weight."));
  for (const std::string& text : {refused.err, cut.out + cut.err, read_file(dir / "out/reshard_manifest.json")})
    EXPECT_EQ(text.find("lm_head"), std::string::npos) << text;
}

}  // namespace
}  // namespace reshard::families_test
