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
    for (const char* names : {"maxtext", "maxtext-unscanned", "maxtext-interleaved", "maxtext-interleaved-unscanned"}) {
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
  for (const auto& [name, value] : written) {
    if (!name.starts_with("opt_state.0.mu") || name.find("query") != name.npos) continue;
    EXPECT_EQ(value, saved.at(name)) << name;
  }
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

// gpt-oss: each of gate and up is every second column of a tensor, and each column of each chunk is a piece.
TEST_F(MaxText, ColumnsThatTakeTurnsStayWithinTheMemoryGranted) {
  const std::string config = dir_ / "config.json", source = dir_ / "source";
  write_file(config, R"({"model_type": "gpt_oss", "num_hidden_layers": 8, "num_local_experts": 16, "hidden_size": 2880,
    "intermediate_size": 2880, "vocab_size": 512, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": false})");
  for (const char* names : {"maxtext", "hf"}) {
    const std::string to = names == std::string("hf") ? "hf" : "orbax";
    const CommandResult made = reshard_cli(
        {"synth", source, "--config", config, "--to", to, "--names", names, "--headers-only", "--force", "-q"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
    const std::vector<std::string> other = to == "hf" ? std::vector<std::string>{"--to", "orbax", "--names", "maxtext"}
                                                      : std::vector<std::string>{"--to", "hf"};
    for (const auto& [memory, exit_code] : {std::pair("64MiB", 2), std::pair("1GiB", 0)}) {
      std::vector<std::string> args = {"plan", source, "--threads", "1", "--memory", memory};
      args.insert(args.end(), other.begin(), other.end());
      const CommandResult plan = reshard_cli(args);
      EXPECT_EQ(plan.exit_code, exit_code) << to << memory << plan.err;
      if (exit_code == 2) {
        EXPECT_THAT(plan.err,
                    AllOf(HasSubstr("columns alternate with another's"), HasSubstr("--memory 67.1 MB is too small")));
      }
    }
  }
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
