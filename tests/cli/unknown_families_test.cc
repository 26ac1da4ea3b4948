// Models without a known family: verify and convert report the same about their config.json.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::unknown_families_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

std::string text_of(const CommandResult& r) {
  std::string out = r.out + r.err;
  for (std::size_t at; (at = out.find("\n          ")) != std::string::npos;) out.replace(at, 11, " ");
  return out;
}

// A model of no family: its tensors and its config.json.
struct Stranger {
  std::string config;
  std::vector<std::pair<std::string, Dims>> tensors;

  Stranger& layers(const std::string& prefix, Index count, std::vector<std::pair<std::string, Dims>> of_each) {
    for (Index i = 0; i < count; ++i)
      for (const auto& [name, shape] : of_each) tensors.emplace_back(prefix + std::to_string(i) + "." + name, shape);
    return *this;
  }
  void write(const TempDir& dir, const std::string& wrapper = "") const {
    TensorValues values;
    for (const auto& [name, shape] : tensors)
      values[wrapper + name] = {DType::kFloat32, shape, std::string(static_cast<std::size_t>(4 * volume(shape)), 'v')};
    write_dcp(values, dir / "ck", Mesh({{"dp_shard", 2}}));
  }
};

Stranger encoder() {
  Stranger s{R"({"model_type": "stranger", "architectures": ["StrangerModel"], "hidden_size": 16, "vocab_size": 60,
                 "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40, "type_vocab_size": 2,
                 "max_position_embeddings": 24, "torch_dtype": "float32"})",
             {{"embeddings.word_embeddings.weight", {60, 16}},
              {"embeddings.position_embeddings.weight", {24, 16}},
              {"embeddings.token_type_embeddings.weight", {2, 16}},
              {"embeddings.LayerNorm.weight", {16}},
              {"pooler.dense.weight", {16, 16}}}};
  return s.layers("encoder.layer.", 3,
                  {{"attention.self.query.weight", {16, 16}},
                   {"intermediate.dense.weight", {40, 16}},
                   {"output.dense.weight", {16, 40}},
                   {"output.LayerNorm.weight", {16}}});
}

Stranger two_stacks() {
  Stranger s{R"({"model_type": "stranger", "architectures": ["StrangerForConditionalGeneration"], "d_model": 16,
                 "vocab_size": 60, "encoder_layers": 2, "decoder_layers": 4, "num_hidden_layers": 2,
                 "encoder_ffn_dim": 40, "decoder_ffn_dim": 56, "max_position_embeddings": 22})",
             {{"model.shared.weight", {60, 16}},
              {"model.encoder.embed_positions.weight", {24, 16}},
              {"model.decoder.embed_positions.weight", {24, 16}}}};
  s.layers("model.encoder.layers.", 2, {{"fc1.weight", {40, 16}}, {"fc2.weight", {16, 40}}});
  return s.layers("model.decoder.layers.", 4, {{"fc1.weight", {56, 16}}, {"fc2.weight", {16, 56}}});
}

Stranger text_and_images() {
  Stranger s{R"({"model_type": "stranger", "architectures": ["StrangerModel"], "projection_dim": 12,
                 "text_config": {"model_type": "stranger_text", "hidden_size": 16, "vocab_size": 60,
                                 "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40},
                 "vision_config": {"model_type": "stranger_vision", "hidden_size": 24, "num_hidden_layers": 2,
                                   "num_attention_heads": 4, "intermediate_size": 56, "patch_size": 4}})",
             {{"text_model.embeddings.token_embedding.weight", {60, 16}},
              {"text_projection.weight", {12, 16}},
              {"visual_projection.weight", {12, 24}},
              {"vision_model.embeddings.patch_embedding.weight", {24, 3, 4, 4}}}};
  s.layers("text_model.encoder.layers.", 3, {{"mlp.fc1.weight", {40, 16}}, {"layer_norm1.weight", {16}}});
  return s.layers("vision_model.encoder.layers.", 2, {{"mlp.fc1.weight", {56, 24}}, {"layer_norm1.weight", {24}}});
}

Stranger experts() {
  Stranger s{R"({"model_type": "stranger", "architectures": ["StrangerForCausalLM"], "hidden_size": 32,
                 "vocab_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "head_dim": 10, "num_local_experts": 3, "intermediate_size": 56, "tie_word_embeddings": false})",
             {{"model.embed_tokens.weight", {60, 32}}, {"model.norm.weight", {32}}, {"lm_head.weight", {60, 32}}}};
  s.layers("model.layers.", 2, {{"self_attn.q_proj.weight", {40, 32}}, {"self_attn.k_proj.weight", {20, 32}}});
  for (const char* layer : {"0", "1"})
    s.layers("model.layers." + std::string(layer) + ".moe.experts.", 3, {{"up_proj.weight", {56, 32}}});
  return s;
}

// The effect of one changed number in the config of a healthy model.
struct Change {
  Stranger model;
  std::string from, to;
  std::string id, told;
};

std::vector<Change> changes() {
  return {
      {encoder(), "\"vocab_size\": 60", "\"vocab_size\": 67", "vocabulary-rows", "vocab_size = 67"},
      {encoder(), "\"vocab_size\": 60", "\"vocab_size\": 120", "vocabulary-shard", "60 = 120 / 2: one tensor-parallel"},
      {encoder(), "\"vocab_size\": 60", "\"vocab_size\": 50", "vocabulary-padded", "vocab_size = 50"},
      {encoder(), "_layers\": 3", "_layers\": 12", "missing-layers", "layers 3 to 11 of 0 to 11"},
      {encoder(), "_layers\": 3", "_layers\": 2", "extra-layers", "num_hidden_layers = 2"},
      {encoder(), "hidden_size\": 16", "hidden_size\": 20", "config-other", "hidden_size = 20"},
      {encoder(), "intermediate_size\": 40", "intermediate_size\": 80", "shape-part", "40 is 1/2 of 80"},
      {encoder(), "intermediate_size\": 40", "intermediate_size\": 50", "shape-other", "intermediate_size = 50"},
      {encoder(), "embeddings\": 24", "embeddings\": 32", "shape-other", "max_position_embeddings = 32"},
      {encoder(), "type_vocab_size\": 2", "type_vocab_size\": 5", "shape-other", "type_vocab_size = 5"},
      {two_stacks(), "decoder_layers\": 4", "decoder_layers\": 2", "extra-layers", "decoder_layers = 2"},
      {two_stacks(), "encoder_layers\": 2", "encoder_layers\": 4", "missing-layers", "encoder_layers = 4"},
      {two_stacks(), "decoder_ffn_dim\": 56", "decoder_ffn_dim\": 58", "shape-other", "decoder_ffn_dim = 58"},
      {two_stacks(), "\"vocab_size\": 60", "\"vocab_size\": 62", "vocabulary-rows", "vocab_size = 62"},
      {text_and_images(), "\"vocab_size\": 60", "\"vocab_size\": 62", "vocabulary-rows", "text_config.vocab_size = 62"},
      {text_and_images(), "_layers\": 2", "_layers\": 5", "missing-layers", "vision_config.num_hidden_layers = 5"},
      {text_and_images(), "size\": 56", "size\": 58", "shape-other", "vision_config.intermediate_size = 58"},
      {experts(), "experts\": 3", "experts\": 8", "missing-experts", "num_local_experts = 8"},
      {experts(), "experts\": 3", "experts\": 2", "extra-tensors", "num_local_experts = 2"},
      {experts(), "value_heads\": 2", "value_heads\": 4", "shape-part", "num_key_value_heads 4 x head_dim 10 = 40"},
      {experts(), "intermediate_size\": 56", "intermediate_size\": 60", "shape-other", "intermediate_size = 60"},
  };
}

std::vector<std::string> ids_of(const CommandResult& r) {
  std::vector<std::string> ids;
  const auto json = parse_json(r.out, "verify");
  if (!json) return {r.out + r.err};
  const auto findings = json->find("findings")->as_array();
  for (const Json& f : *findings) ids.emplace_back(*f.get_string("id"));
  return ids;
}

TEST(UnknownFamilies, HealthyModelsHaveNoFinding) {
  for (const Stranger& s : sampled({encoder(), two_stacks(), text_and_images(), experts()}, 2))
    for (const char* wrapper : {"", "model."}) {
      const TempDir dir;
      s.write(dir, wrapper);
      const std::string config = dir.write("ck/config.json", s.config);
      for (const std::vector<std::string>& more :
           {std::vector<std::string>(), std::vector<std::string>{"--config", config}}) {
        const CommandResult r = reshard_cli({"verify", dir / "ck"}, more);
        EXPECT_EQ(r.exit_code, 0) << text_of(r);
        EXPECT_THAT(text_of(r), AllOf(HasSubstr("config.json: checked "), HasSubstr("vocab_size"), HasSubstr("_layers"),
                                      HasSubstr("no family describes model_type")));
      }
    }
}

TEST(UnknownFamilies, AChangedNumberIsAnErrorThatNamesIt) {
  for (const Change& c : sampled(changes(), 3)) {
    const TempDir dir;
    c.model.write(dir);
    std::string config = c.model.config;
    ASSERT_NE(config.find(c.from), std::string::npos) << c.from;
    config.replace(config.find(c.from), c.from.size(), c.to);
    const std::string path = dir.write("ck/config.json", config);
    const CommandResult plain = reshard_cli({"verify", dir / "ck"});
    EXPECT_EQ(plain.exit_code, 1) << text_of(plain);
    EXPECT_THAT(text_of(plain), HasSubstr(c.told));
    EXPECT_EQ(ids_of(reshard_cli({"verify", dir / "ck", "--config", path, "--json"})), std::vector<std::string>{c.id})
        << c.to;
  }
}

// Each finding's first sentence is also a warning of convert, and so is the row of the config.
TEST(UnknownFamilies, ConvertSaysWhatVerifySays) {
  for (const Change& c : {changes().front(), changes()[3], changes()[14]}) {
    const TempDir dir;
    c.model.write(dir);
    std::string config = c.model.config;
    config.replace(config.find(c.from), c.from.size(), c.to);
    dir.write("ck/config.json", config);
    const CommandResult verified = reshard_cli({"verify", dir / "ck", "--json"});
    const CommandResult converted = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "hf", "--family", "none"});
    EXPECT_EQ(converted.exit_code, 0) << text_of(converted);
    const auto json = parse_json(verified.out, "verify");
    ASSERT_TRUE(json) << verified.out;
    const auto findings = json->find("findings")->as_array();
    EXPECT_THAT(text_of(converted), HasSubstr(std::string(*(*findings)[0].get_string("what"))));
    EXPECT_THAT(text_of(converted), HasSubstr(std::string(*json->find("facts")->get_string("config"))));
  }
}

// A stack that lacks a layer in the middle. The config's number of layers is the last layer's number plus one.
// DecisionTransformerModel has GPT-2's names under "encoder.", and its own next to them.
TEST(UnknownFamilies, NoPartIsTakenForTheModelOfTheConfig) {
  Stranger model{R"({"model_type": "decision_transformer", "architectures": ["DecisionTransformerModel"], "n_layer": 2,
                     "hidden_size": 16, "n_head": 2, "n_inner": 24, "n_positions": 20, "vocab_size": 1, "state_dim": 5,
                     "act_dim": 3, "max_ep_len": 12})",
                 {{"encoder.wte.weight", {1, 16}},
                  {"encoder.wpe.weight", {20, 16}},
                  {"encoder.ln_f.weight", {16}},
                  {"encoder.ln_f.bias", {16}},
                  {"embed_timestep.weight", {12, 16}},
                  {"embed_return.weight", {16, 1}},
                  {"embed_state.weight", {16, 5}}}};
  model.layers("encoder.h.", 2,
               {{"ln_1.weight", {16}},
                {"ln_1.bias", {16}},
                {"attn.c_attn.weight", {16, 48}},
                {"attn.c_attn.bias", {48}},
                {"attn.c_proj.weight", {16, 16}},
                {"attn.c_proj.bias", {16}},
                {"ln_2.weight", {16}},
                {"ln_2.bias", {16}},
                {"mlp.c_fc.weight", {16, 24}},
                {"mlp.c_fc.bias", {24}},
                {"mlp.c_proj.weight", {24, 16}},
                {"mlp.c_proj.bias", {16}}});
  const TempDir dir;
  model.write(dir, "app.model.");
  write_file(dir / "config.json", model.config);
  const std::vector<std::string> words = {"convert", dir / "ck", dir / "out",        "--to",
                                          "hf",      "--config", dir / "config.json"};
  const CommandResult refused = reshard_cli(words);
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("'app.model.embed_return.weight'"),
                                 HasSubstr("add --strip-prefix app.model. if they are part of the model")));
  std::vector<std::string> whole = words;
  whole.insert(whole.end(), {"--strip-prefix", "app.model."});
  const CommandResult r = reshard_cli(whole);
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(load_checkpoint(dir / "out").size(), model.tensors.size());
}

// Names that are also a family's without its "model." are written as the config's class has them: under "model.",
// from_pretrained would look for A.X K1's "mlp.post_mlp_layernorm" elsewhere, and for BERT-like models' everything.
TEST(UnknownFamilies, NoPrefixOfAFamilyIsAddedToTheNames) {
  Stranger s{R"({"model_type": "nomic_bert", "architectures": ["NomicBertModel"], "hidden_size": 16, "vocab_size": 60,
                 "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "type_vocab_size": 2})",
             {{"embeddings.word_embeddings.weight", {60, 16}},
              {"embeddings.token_type_embeddings.weight", {2, 16}},
              {"embeddings.LayerNorm.weight", {16}},
              {"embeddings.LayerNorm.bias", {16}}}};
  std::vector<std::pair<std::string, Dims>> of_each = {
      {"mlp.gate_proj.weight", {24, 16}},      {"mlp.up_proj.weight", {24, 16}},
      {"mlp.down_proj.weight", {16, 24}},      {"post_attention_layernorm.weight", {16}},
      {"post_attention_layernorm.bias", {16}}, {"post_mlp_layernorm.weight", {16}},
      {"post_mlp_layernorm.bias", {16}}};
  for (const std::string name : {"q_proj", "k_proj", "v_proj", "o_proj"})
    of_each.emplace_back("self_attn." + name + ".weight", Dims{16, 16});
  s.layers("layers.", 2, of_each);
  for (const char* wrapper : {"", "app.model."}) {
    const TempDir dir;
    s.write(dir, wrapper);
    dir.write("ck/config.json", s.config);
    const CommandResult r = reshard_cli({"convert", dir / "ck", dir / "out", "--to", "hf"});
    ASSERT_EQ(r.exit_code, 0) << wrapper << r.err;
    const TensorValues written = load_checkpoint(dir / "out");
    EXPECT_EQ(written.size(), s.tensors.size());
    for (const auto& [name, shape] : s.tensors) EXPECT_TRUE(written.contains(name)) << name;
    EXPECT_EQ(reshard_cli({"verify", dir / "out"}).exit_code, 0);
    EXPECT_EQ(reshard_cli({"diff", dir / "ck", dir / "out"}).exit_code, 0);
  }
}

// The network of a vision tower's stage may be narrower than its width by a ratio.
TEST(UnknownFamilies, AWidthThatIsARatioOfTheModelsIsNoOther) {
  Stranger s = encoder();
  for (auto& [name, shape] : s.tensors)
    for (const int d : {0, 1})
      if (shape.rank() == 2 && shape[d] == 40) shape[d] = 12;
  const TempDir dir;
  s.write(dir);
  dir.write("ck/config.json", s.config);
  EXPECT_EQ(ids_of(reshard_cli({"verify", dir / "ck", "--json"})), std::vector<std::string>{"shape-other"});
  std::string config = s.config;
  dir.write("ck/config.json", config.insert(1, R"("assign_mlp_ratio": [4, 0.75], )"));
  EXPECT_THAT(ids_of(reshard_cli({"verify", dir / "ck", "--json"})), IsEmpty());
}

TEST(UnknownFamilies, ALayerInTheMiddleIsMissed) {
  const TempDir dir;
  Stranger s = encoder();
  std::erase_if(s.tensors, [](const auto& t) { return t.first.starts_with("encoder.layer.1."); });
  s.write(dir);
  dir.write("ck/config.json", s.config);
  const CommandResult r = reshard_cli({"verify", dir / "ck"});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(text_of(r), HasSubstr("layer 1 of 0 to 2 of 'encoder.layer' is missing"));
}

TEST(UnknownFamilies, TheRowOfTheConfigIsAlwaysThere) {
  const TempDir dir;
  encoder().write(dir);
  const std::string model = dir / "ck";
  EXPECT_THAT(text_of(reshard_cli({"verify", model})),
              HasSubstr("config    not checked: no config.json found; give one with --config"));
  for (const auto& [text, told] :
       {std::pair(R"({"vocab_size": 60})", "it has no model_type"), std::pair("{", "it cannot be read"),
        std::pair(R"({"model_type": "unheard"})", "no family describes model_type 'unheard'")}) {
    dir.write("ck/config.json", text);
    EXPECT_THAT(text_of(reshard_cli({"verify", model})), HasSubstr("config.json: not checked: " + std::string(told)));
  }
  dir.write("ck/config.json", R"({"model_type": "llama", "hidden_size": 16, "vocab_size": 60, "num_hidden_layers": 3,
                                  "num_attention_heads": 4, "intermediate_size": 40})");
  EXPECT_THAT(text_of(reshard_cli({"verify", model, "--family", "none"})),
              HasSubstr("config.json: not checked: --family none"));
  EXPECT_THAT(text_of(reshard_cli({"verify", model})),
              HasSubstr("config.json: not checked: the tensor names do not match family llama"));
}

}  // namespace
}  // namespace reshard::unknown_families_test
