// Compares MaxText's checkpoints (tests/data/maxtext/README.md) with the results of MaxText's own converters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::maxtext_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct Saved {
  std::string name;
  std::vector<std::string> options;
  bool has_router_bias = false;
};
const std::vector<std::string> kInPairs = {"--source-names", "maxtext-interleaved"};
const Saved kSaved[] = {{"llama_po", kInPairs},   // bfloat16, from transformers
                        {"llama_gpo", kInPairs},  // parameters only, under names of NNX
                        {"llama_scan", kInPairs}, {"gemma2_po", {"--dtype", "float32"}},
                        {"qwen3moe_scan", {}},    {"ds3_scan", {}, true}};

std::string place_of(const std::string& name) { return test_data("maxtext/" + name); }

void convert(const std::string& from, const std::string& to, std::vector<std::string> options,
             const std::vector<std::string>& more = {}) {
  std::vector<std::string> args = {"convert", from, to, "-q"};
  args.insert(args.end(), options.begin(), options.end());
  const CommandResult run = reshard_cli(args, more);
  ASSERT_EQ(run.exit_code, 0) << from << run.err;
}

TensorValues below(const TensorValues& all, const std::string& prefix) {
  TensorValues out;
  for (const auto& [name, value] : all)
    if (name.starts_with(prefix)) out.emplace(name, value);
  return out;
}

std::vector<float> floats(const TensorValue& value) {
  EXPECT_EQ(value.dtype, DType::kFloat32);
  std::vector<float> out(value.bytes.size() / sizeof(float));
  std::memcpy(out.data(), value.bytes.data(), value.bytes.size());
  return out;
}

class MaxText : public testing::Test {
 protected:
  const TempDir dir_;
};

// to_huggingface drops the bias of DeepSeek's router, which is not among the parameters.
TEST_F(MaxText, BecomesWhatItsOwnConverterMakes) {
  for (const Saved& saved : kSaved) {
    const std::string out = dir_ / saved.name;
    convert(place_of(saved.name), out, {"--to", "hf"}, saved.options);
    auto made = digests_of(load_checkpoint(out));
    const auto biases = std::erase_if(made, [](const auto& t) { return t.first.ends_with("e_score_correction_bias"); });
    EXPECT_EQ(made, read_digests(place_of(saved.name) + ".json")) << saved.name;
    EXPECT_EQ(biases, saved.has_router_bias ? 3U : 0U) << saved.name;
  }
}

TEST_F(MaxText, IsMadeAsItsOwnConverterMakesIt) {
  const std::pair<std::string, std::vector<std::string>> models[] = {
      {"llama_po", {"--names", "maxtext-interleaved"}},
      {"gemma2_po", {"--names", "maxtext", "--vocab-divisible-by", "128", "--vocab-padding", "zero"}}};
  for (const auto& [name, options] : models) {
    const std::string out = dir_ / name;
    convert(place_of(name) + ".hf", out, {"--to", "orbax"}, options);
    EXPECT_EQ(digests_of(load_checkpoint(out)), digests_of(below(load_checkpoint(place_of(name)), "params."))) << name;
  }
}

TEST_F(MaxText, ComesBackFromEveryConventionAsItWas) {
  for (const Saved& saved : sampled(kSaved, 3)) {
    const std::string hf = dir_ / (saved.name + ".hf");
    convert(place_of(saved.name), hf, {"--to", "hf"}, saved.options);
    if (saved.name == "gemma2_po") continue;  // adding 1 to the norms of a trained model loses bits
    for (const char* names : {"maxtext", "maxtext-unscanned", "maxtext-layers-first", "maxtext-interleaved",
                              "maxtext-interleaved-unscanned", "maxtext-interleaved-layers-first"}) {
      const std::string pairs = names;
      if (pairs.find("interleaved") != pairs.npos && !saved.name.starts_with("llama")) continue;
      const std::string there = dir_ / "there", back = dir_ / "back";
      convert(hf, there, {"--to", "dcp", "--names", names, "--mesh", "dp_shard=2,tp=2", "--force"});
      convert(there, back, {"--to", "hf", "--config", hf + "/config.json", "--source-names", names, "--force"});
      const TensorValues before = load_checkpoint(hf), after = load_checkpoint(back);
      ASSERT_EQ(before.size(), after.size()) << saved.name << names;
      for (const auto& [name, value] : before) {
        if (saved.name.starts_with("llama") && name.find("q_proj") != name.npos) continue;  // division rounds it
        EXPECT_EQ(after.at(name), value) << saved.name << ' ' << names << ' ' << name;
      }
    }
  }
}

// Llama 3.1 has rotary pairs in MaxText, Llama 3 and 3.3 do not. Names, shapes and config.json are the same.
TEST_F(MaxText, RowOrderIsNotGuessed) {
  const std::string source = place_of("llama_scan"), out = dir_ / "out";
  for (const std::vector<std::string>& to : {std::vector<std::string>{"--to", "hf"},
                                             {"--to", "dcp", "--names", "torchtitan"},
                                             {"--to", "dcp", "--names", "megatron"}}) {
    std::vector<std::string> args = {"convert", source, out};
    args.insert(args.end(), to.begin(), to.end());
    const CommandResult run = reshard_cli(args);
    EXPECT_EQ(run.exit_code, 2) << run.out << run.err;
    EXPECT_THAT(run.err, AllOf(HasSubstr("--source-names maxtext for MaxText's llama2, llama3 and llama3.3"),
                               HasSubstr("--source-names maxtext-interleaved for MaxText's llama3.1")));
  }
  // An output with names of the same kind keeps the rows.
  convert(source, out, {"--to", "dcp", "--names", "maxtext-unscanned"});
  const CommandResult other =
      reshard_cli({"convert", source, dir_ / "no", "--to", "hf", "--source-names", "torchtitan"});
  EXPECT_EQ(other.exit_code, 2) << other.err;
  EXPECT_THAT(other.err, HasSubstr("MaxText names (maxtext)"));
}

TEST_F(MaxText, AdamGoesOnInTorchtitan) {
  const std::string source = place_of("llama_scan"), titan = dir_ / "titan", hf = dir_ / "hf", back = dir_ / "back";
  convert(source, titan, {"--to", "dcp", "--names", "torchtitan"}, kInPairs);
  const TensorValues state = load_checkpoint(titan), saved = load_checkpoint(source);
  const std::string wo = "optimizer.state.layers.1.feed_forward.w2.weight";
  EXPECT_EQ(floats(state.at(wo + ".step")), std::vector<float>{2});
  // w2 [E, F] is taken from wo [F, L, E] without computation.
  const std::vector<float> made = floats(state.at(wo + ".exp_avg"));
  const std::vector<float> stored = floats(saved.at("opt_state.0.mu.params.decoder.layers.mlp.wo.kernel"));
  ASSERT_EQ(made.size() * 3, stored.size());
  for (std::size_t e = 0; e < 32; ++e)
    for (std::size_t f = 0; f < 64; ++f) EXPECT_EQ(made[e * 64 + f], stored[(f * 3 + 1) * 32 + e]);
  // The stored query is the weight divided by the root of 8, so its gradient is the weight's times that root.
  // torchtitan has rotary pairs too, and its elements are those of query [E, L, H, D] in the order [H, D, E].
  const auto root = static_cast<float>(1 / std::sqrt(8.0));
  const std::string wq = "optimizer.state.layers.2.attention.wq.weight";
  const std::vector<float> moment = floats(state.at(wq + ".exp_avg")), second = floats(state.at(wq + ".exp_avg_sq"));
  const std::vector<float> mu = floats(saved.at("opt_state.0.mu.params.decoder.layers.self_attention.query.kernel"));
  const std::vector<float> nu = floats(saved.at("opt_state.0.nu.params.decoder.layers.self_attention.query.kernel"));
  for (std::size_t hd = 0; hd < 32; ++hd)
    for (std::size_t e = 0; e < 32; ++e) {
      EXPECT_EQ(moment[hd * 32 + e], mu[(e * 3 + 2) * 32 + hd] * root);
      EXPECT_EQ(second[hd * 32 + e], nu[(e * 3 + 2) * 32 + hd] * (root * root));
    }
  convert(titan, back, {"--to", "orbax", "--names", "maxtext-interleaved", "--config", source + "/config.json"});
  const TensorValues written = load_checkpoint(back);
  for (const auto& [name, value] : saved) {
    if (name.starts_with("nnx_aux.") || name.find("query") != name.npos) continue;
    EXPECT_EQ(written.at(name), value) << name;
  }
  EXPECT_FALSE(written.contains("optimizer.state.decoder.decoder_norm.scale.step"));
  EXPECT_THAT(read_file(back + "/_METADATA"), HasSubstr(R"X("key_metadata":[{"key":"opt_state","key_type":2},)X"
                                                        R"X({"key":"0","key_type":1},{"key":"count","key_type":2}])X"));
}

// optax counts Adam's steps once, and so does each of MaxText's checkpoints, whatever its names.
TEST_F(MaxText, StepsAreCountedOnce) {
  const std::string source = place_of("llama_scan");
  const TensorValues saved = load_checkpoint(source);
  const std::vector<std::string> kept[] = {{"--mesh", "dp_shard=2"}, {"--family", "none"}, {"--names", "maxtext"}};
  for (const std::vector<std::string>& options : kept) {
    convert(source, dir_ / "kept", {"--to", "orbax", "--force"}, options);
    EXPECT_EQ(load_checkpoint(dir_ / "kept"), saved) << options.front();
  }
  convert(source, dir_ / "apart", {"--to", "orbax", "--names", "maxtext-unscanned"});
  const TensorValues apart = load_checkpoint(dir_ / "apart");
  for (const char* name : {"opt_state.0.count", "opt_state.2.count", "step"})
    EXPECT_EQ(apart.at(name), saved.at(name)) << name;
  const std::string titan = dir_ / "titan";
  convert(source, titan, {"--to", "dcp", "--names", "torchtitan"}, kInPairs);
  TensorValues state = load_checkpoint(titan);
  state.at("optimizer.state.norm.weight.step").bytes = std::string("\0\0\x40\x40", 4);
  write_dcp(state, dir_ / "uneven", Mesh({{"dp_shard", 1}}));
  const CommandResult run = reshard_cli({"convert", dir_ / "uneven", dir_ / "no", "--to", "orbax", "--config",
                                         source + "/config.json", "--names", "maxtext"});
  EXPECT_EQ(run.exit_code, 4) << run.err;
  EXPECT_THAT(run.err, HasSubstr("different numbers of steps: tensor 'optimizer.state.norm.weight.step' is 3 and"));
}

TEST_F(MaxText, IsVerifiedAgainstItsConfig) {
  for (const Saved& saved : kSaved) {
    const CommandResult run = reshard_cli({"verify", place_of(saved.name)});
    EXPECT_EQ(run.exit_code, 0) << saved.name << run.out << run.err;
  }
  const std::string config = dir_ / "config.json";
  std::string text = read_file(place_of("qwen3moe_scan") + "/config.json");
  text.replace(text.find("\"num_hidden_layers\": 3"), 22, "\"num_hidden_layers\": 2");
  write_file(config, text);
  const CommandResult run = reshard_cli({"verify", place_of("qwen3moe_scan"), "--config", config});
  EXPECT_EQ(run.exit_code, 1) << run.out << run.err;
  const CommandResult convert = reshard_cli({"convert", place_of("qwen3moe_scan"), dir_ / "out", "--to", "hf",  //
                                             "--config", config});
  EXPECT_EQ(convert.exit_code, 3) << convert.out << convert.err;
  EXPECT_THAT(convert.err, HasSubstr("says 2 (layers)"));
}

// Returns a tensor with its second axis in front of the first.
TensorValue with_second_axis_first(const TensorValue& from) {
  const std::size_t first = from.shape[0], second = from.shape[1], rest = from.bytes.size() / (first * second);
  TensorValue out = from;
  std::swap(out.shape[0], out.shape[1]);
  for (std::size_t i = 0; i < first; ++i)
    for (std::size_t k = 0; k < second; ++k)
      out.bytes.replace((k * first + i) * rest, rest, from.bytes, (i * second + k) * rest, rest);
  return out;
}

// With param_scan_axis=0, which MaxText needs for offloading, the layers are along the first axis of each tensor.
TEST_F(MaxText, AxisOfTheLayersFollowsFromTheShapes) {
  for (const Saved& saved : {kSaved[2], kSaved[4], kSaved[5]}) {
    TensorValues values = below(load_checkpoint(place_of(saved.name)), "params.");
    for (auto& [name, value] : values)
      if (name.find("layers.") != name.npos) value = with_second_axis_first(value);
    const TensorValues aux = below(load_checkpoint(place_of(saved.name)), "nnx_aux.");
    for (const auto& [name, value] : aux)
      if (name.ends_with(".gate.bias")) values.emplace("params.params." + name, value);
    TensorValues plain;
    for (const auto& [name, value] : values) plain.emplace(name.substr(std::strlen("params.params.")), value);
    const std::string first = dir_ / (saved.name + ".first"), out = dir_ / saved.name, kept = dir_ / "kept";
    const std::string config = place_of(saved.name) + "/config.json";
    write_dcp(plain, first, Mesh({{"dp_shard", 2}}));
    convert(first, out, {"--to", "hf", "--config", config}, saved.options);
    auto made = digests_of(load_checkpoint(out));
    std::erase_if(made, [](const auto& t) { return t.first.ends_with("e_score_correction_bias"); });
    EXPECT_EQ(made, read_digests(place_of(saved.name) + ".json")) << saved.name;
    convert(first, kept, {"--to", "orbax", "--config", config, "--mesh", "dp_shard=2,tp=2", "--force"});
    const TensorValues again = below(load_checkpoint(kept), "params.");
    for (const auto& [name, value] : again) EXPECT_EQ(value, values.at(name)) << saved.name << name;
    EXPECT_EQ(reshard_cli({"verify", kept}).exit_code, 0) << saved.name;
  }
}

TEST_F(MaxText, LayersAreFirstIfTheUserSaysSo) {
  for (const Saved& saved : {kSaved[2], kSaved[4], kSaved[5]}) {
    const std::string names = saved.name.starts_with("llama") ? "maxtext-interleaved" : "maxtext";
    const std::string hf = dir_ / (saved.name + ".hf");
    convert(place_of(saved.name), hf, {"--to", "hf"}, saved.options);
    for (const std::string& source : {hf, place_of(saved.name)}) {
      const std::string second = dir_ / "second", first = dir_ / "first";
      convert(source, second, {"--to", "orbax", "--names", names, "--force"});
      convert(source, first, {"--to", "orbax", "--names", names + "-layers-first", "--force"});
      const TensorValues made = load_checkpoint(first), as_usual = load_checkpoint(second);
      EXPECT_EQ(made.size(), as_usual.size());
      Index moved = 0;
      for (const auto& [name, value] : as_usual) {
        const bool is_stacked = name.find("layers.") != name.npos && !name.starts_with("nnx_aux.");
        moved += is_stacked;
        EXPECT_EQ(made.at(name), is_stacked ? with_second_axis_first(value) : value) << source << name;
      }
      EXPECT_GT(moved, 5);
      EXPECT_EQ(reshard_cli({"verify", first}).exit_code, 0) << source;
    }
  }
}

TEST_F(MaxText, AdaptersAreReported) {
  const std::string kernel = "decoder.layers.mlp.wo.kernel";
  const TensorValue matrix{DType::kFloat32, Dims({2, 3}), std::string(24, '\1')};
  write_dcp({{kernel + "_lora_a", matrix}, {kernel + "_lora_b", matrix}}, dir_ / "made", Mesh({{"dp_shard", 1}}));
  convert(dir_ / "made", dir_ / "alone", {"--to", "orbax", "--family", "none"});
  const CommandResult run = reshard_cli({"verify", dir_ / "alone"});
  EXPECT_EQ(run.exit_code, 1) << run.out;
  EXPECT_THAT(run.out, AllOf(HasSubstr(kernel + "_lora_b"), HasSubstr("not merged into the weights")));
}

TEST_F(MaxText, VocabularyOfItsHeadMayBePadded) {
  const std::string config = dir_ / "config.json", source = place_of("qwen3moe_scan");
  std::string text = read_file(source + "/config.json");
  text.replace(text.find("\"vocab_size\": 128"), 17, "\"vocab_size\": 120");
  write_file(config, text);
  const CommandResult run = reshard_cli({"verify", source, "--config", config});
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("the vocabulary padded to 128 rows"));
  text.replace(text.find("\"vocab_size\": 120"), 17, "\"vocab_size\": 130");
  write_file(config, text);
  EXPECT_EQ(reshard_cli({"verify", source, "--config", config}).exit_code, 1);
}

std::string gpt_oss(const std::string& members) {
  return R"({"model_type": "gpt_oss", "num_key_value_heads": 2, "tie_word_embeddings": false, )" + members + "}";
}

// gpt-oss: each of gate and up is every second column of a tensor. A piece for each column would take gigabytes.
TEST_F(MaxText, ColumnsThatTakeTurnsArePlannedInLittleMemory) {
  const std::string config = dir_ / "config.json", source = dir_ / "source";
  write_file(config, gpt_oss(R"("num_hidden_layers": 24, "num_local_experts": 32, "hidden_size": 2880, "head_dim": 64,
    "intermediate_size": 2880, "vocab_size": 512, "num_attention_heads": 64)"));
  for (const std::string names : {"maxtext", "maxtext-unscanned", "hf"}) {
    const std::string to = names == "hf" ? "hf" : "orbax";
    std::vector<std::string> synth = {"synth",   source, "--config",       config,    "--to", to,
                                      "--names", names,  "--headers-only", "--force", "-q"};
    if (to == "orbax") synth.insert(synth.end(), {"--mesh", "dp_shard=8,tp=2"});
    const CommandResult made = reshard_cli(synth);
    ASSERT_EQ(made.exit_code, 0) << made.err;
    std::vector<std::string> plan = {"plan", source, "--threads", "1", "--memory", "128MiB", "--to"};
    if (to == "hf")
      plan.insert(plan.end(), {"orbax", "--names", "maxtext"});
    else
      plan.emplace_back("hf");
    const CommandResult planned = reshard_cli(plan);
    EXPECT_EQ(planned.exit_code, 0) << names << planned.err;
  }
}

TEST_F(MaxText, ColumnsThatTakeTurnsAreTheEvenAndTheOddOnes) {
  constexpr std::size_t kExperts = 3, kIn = 8, kOut = 6;
  const std::string config = dir_ / "config.json", hf = dir_ / "hf", titan = dir_ / "titan";
  write_file(config, gpt_oss(R"("num_hidden_layers": 4, "num_local_experts": 3, "hidden_size": 8, "head_dim": 4,
    "intermediate_size": 6, "vocab_size": 16, "num_attention_heads": 2)"));
  for (const auto& [names, path] : {std::pair("hf", hf), std::pair("torchtitan", titan)}) {
    const CommandResult made = reshard_cli({"synth", path, "--config", config, "--to", "dcp", "--names", names,  //
                                            "--mesh", "tp=2", "--optimizer", "--dtype", "float32", "-q"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
  }
  const TensorValues stored = load_checkpoint(hf);
  for (const std::string names : {"maxtext", "maxtext-unscanned"}) {
    const std::string there = dir_ / names, again = dir_ / (names + ".again"), back = dir_ / (names + ".back");
    convert(hf, there, {"--to", "orbax", "--names", names, "--mesh", "dp_shard=2,tp=2"});
    const TensorValues made = load_checkpoint(there);
    const bool is_scanned = names == "maxtext";
    const std::string layer = is_scanned ? "decoder.layers.layers_1." : "decoder.layers_3.";
    for (const auto& [before, state, after] : {std::tuple("", "params.params.", ""),
                                               std::tuple("optimizer.state.", "opt_state.0.nu.params.", ".exp_avg_sq")})
      for (const std::size_t section : {0, 1}) {
        const std::string both = "model.layers.3.mlp.experts.gate_up_proj";
        const std::vector<float> whole = floats(stored.at(before + both + after));
        const std::vector<float> one = floats(made.at(state + layer + "GptOssMlp.wi_" + std::to_string(section)));
        ASSERT_EQ(one.size(), kExperts * kIn * kOut * (is_scanned ? 2 : 1));
        for (std::size_t x = 0; x < kExperts; ++x)
          for (std::size_t i = 0; i < kIn; ++i)
            for (std::size_t o = 0; o < kOut; ++o)
              EXPECT_EQ(one[((is_scanned ? 2 * x + 1 : x) * kIn + i) * kOut + o],
                        whole[(x * kIn + i) * 2 * kOut + 2 * o + section]);
      }
    convert(titan, again, {"--to", "orbax", "--names", names});
    EXPECT_EQ(load_checkpoint(again), made) << names;
    convert(there, back, {"--to", "dcp", "--names", "hf", "--mesh", "dp_shard=3"});
    const TensorValues again_stored = load_checkpoint(back);
    for (const auto& [name, value] : stored) EXPECT_EQ(again_stored.at(name), value) << names << ' ' << name;
    const CommandResult compared = reshard_cli({"diff", hf, there});
    EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
    for (const auto& [one, other] : {std::pair(hf, there), std::pair(there, hf)}) {
      const CommandResult merged =
          reshard_cli({"merge", one, other, dir_ / "merged", "--average", "--to", "hf", "--force", "-q"});
      ASSERT_EQ(merged.exit_code, 0) << merged.err;
      for (const auto& [name, value] : load_checkpoint(dir_ / "merged"))
        EXPECT_EQ(value, stored.at(name)) << names << ' ' << name;
    }
  }
}

// The names and shapes are those of a checkpoint that MaxText's trainer wrote of deepseek2-16b with these sizes.
TEST_F(MaxText, DeepSeekV2HasItsNames) {
  const std::string config = dir_ / "config.json", hf = dir_ / "hf", there = dir_ / "there", back = dir_ / "back";
  write_file(config, R"({"model_type": "deepseek_v2", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 128,
    "moe_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": null, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1})");
  const CommandResult made = reshard_cli({"synth", hf, "--config", config, "--to", "hf", "-q"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  convert(hf, there, {"--to", "orbax", "--names", "maxtext"});
  std::map<std::string, Dims> shapes;
  for (const auto& [name, value] : load_checkpoint(there)) shapes[name] = value.shape;
  const std::string moe = "params.params.decoder.moe_layers.", dense = "params.params.decoder.dense_layers.";
  EXPECT_EQ(shapes.size(), 27U);
  EXPECT_EQ(shapes.at(moe + "self_attention.query.kernel"), (Dims{32, 3, 4, 12}));
  EXPECT_EQ(shapes.at(dense + "self_attention.out.kernel"), (Dims{4, 1, 8, 32}));
  EXPECT_EQ(shapes.at(moe + "self_attention.wkv_a.kernel"), (Dims{32, 3, 12}));
  EXPECT_EQ(shapes.at(moe + "DeepSeekMoeBlock_0.shared_experts.wi_0.kernel"), (Dims{32, 3, 32}));
  EXPECT_EQ(shapes.at(moe + "DeepSeekMoeBlock_0.MoeBlock_0.wo"), (Dims{4, 3, 16, 32}));
  convert(there, back, {"--to", "hf", "--config", config});
  EXPECT_EQ(load_checkpoint(back), load_checkpoint(hf));
}

TEST_F(MaxText, TheManifestSaysWhatWasComputed) {
  const std::string out = dir_ / "out";
  convert(place_of("gemma2_po"), out, {"--to", "hf", "--dtype", "bfloat16"});
  const std::string manifest = read_file(out + "/reshard_manifest.json");
  EXPECT_THAT(manifest, AllOf(HasSubstr("\"arithmetic\""), HasSubstr("\"computed\": \"x + -1"),
                              HasSubstr("float32, rounded once")));
  const CommandResult verified = reshard_cli({"verify", out, "--values"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  const CommandResult compared = reshard_cli({"diff", out, place_of("gemma2_po")});
  EXPECT_EQ(compared.exit_code, 4) << compared.out << compared.err;
  EXPECT_THAT(compared.err, HasSubstr("other values of the same weights"));
}

// opt_state is a list, and its second entry None: as a string among numbers, JAX could not sort the keys.
TEST_F(MaxText, EmptyLeavesKeepTheirPlaceInTheTree) {
  const std::string saved = read_file(place_of("llama_scan") + "/items/_METADATA");
  ASSERT_THAT(saved, HasSubstr(R"X({"key": "1", "key_type": 1}], "value_metadata": {"value_type": "None")X"));
  const CommandResult run =
      reshard_cli({"convert", place_of("llama_scan"), dir_ / "out", "--to", "orbax", "--family", "none"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(read_file(dir_ / "out/_METADATA"),
              HasSubstr(R"X({"key":"1","key_type":1}],"value_metadata":{"value_type":"None")X"));
}

}  // namespace
}  // namespace reshard::maxtext_test
