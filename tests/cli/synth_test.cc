// Tests what synth makes up.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <tuple>

#include "tests/support/checkpoints.h"
#include "tests/support/expect_run.h"
#include "tests/support/temp_dir.h"

namespace reshard::synth_test {
namespace {

TEST(Synth, AnOptimizerHasMadeOneNumberOfSteps) {
  const TempDir dir;
  expect_success(reshard_cli(
      {"synth", dir / "dcp", "--model", "llama3-tiny", "--layers", "1", "--mesh", "dp_shard=2", "--optimizer", "-q"}));
  int parameters = 0;
  for (const auto& [name, value] : load_checkpoint(dir / "dcp")) {
    if (!name.ends_with(".step")) continue;
    float steps = 0;
    ASSERT_EQ(value.bytes.size(), sizeof steps) << name;
    std::memcpy(&steps, value.bytes.data(), sizeof steps);
    EXPECT_EQ(steps, 1000) << name;
    ++parameters;
  }
  EXPECT_EQ(parameters, 12);
}

// DCP has no names of its own: the checkpoint has torchtitan's, or transformers' for models that torchtitan lacks.
TEST(Synth, AModelWithoutTorchtitansNamesGetsThoseOfTransformers) {
  const std::string sizes = R"("hidden_size": 16, "n_embd": 16, "num_hidden_layers": 1, "n_layer": 1, "n_head": 2,
      "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64, "n_positions": 8})";
  const std::tuple<std::string, std::string, std::string> models[] = {
      {"llama", "LlamaForCausalLM", "tok_embeddings.weight"},
      {"gpt2", "GPT2LMHeadModel", "wte.weight"},
      {"bert", "BertForMaskedLM", "bert.embeddings.word_embeddings.weight"}};
  for (const auto& [type, architecture, name] : models) {
    const TempDir dir;
    const std::string config = dir.write(
        "config.json", R"({"model_type": ")" + type + R"(", "architectures": [")" + architecture + R"("], )" + sizes);
    expect_success(reshard_cli({"synth", dir / "dcp", "--config", config, "--to", "dcp", "-q"}));
    EXPECT_TRUE(load_checkpoint(dir / "dcp").contains(name)) << type;
  }
}

}  // namespace
}  // namespace reshard::synth_test
