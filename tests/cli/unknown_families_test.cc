// Models of no family that reshard knows: verify and convert say the same of their config.json, and neither is silent.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string text_of(const CommandResult& r) {
  std::string out = r.out + r.err;
  for (std::size_t at; (at = out.find("\n          ")) != std::string::npos;) out.replace(at, 11, " ");
  return out;
}

// A small BERT of 60 words, 16 wide, of 3 layers.
void write_bert(const TempDir& dir, const std::string& wrapper) {
  TensorValues values;
  const auto add = [&](const std::string& name, Dims shape) {
    values[wrapper + name] = {DType::kFloat32, shape, std::string(static_cast<std::size_t>(4 * volume(shape)), 'v')};
  };
  add("embeddings.word_embeddings.weight", {60, 16});
  add("embeddings.position_embeddings.weight", {8, 16});
  for (const char* layer : {"0", "1", "2"})
    add("encoder.layer." + std::string(layer) + ".attention.self.query.weight", {16, 16});
  add("pooler.dense.weight", {16, 16});
  write_dcp(values, dir / "ck", Mesh({{"dp_shard", 2}}));
}

std::string config(const std::string& words, const std::string& layers) {
  return R"({"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 16, "vocab_size": )" + words +
         R"(, "num_hidden_layers": )" + layers + R"(, "num_attention_heads": 4, "torch_dtype": "float32"})";
}

TEST(UnknownFamilies, VerifyIsNeverSilentAboutTheConfig) {
  const std::string rows = "has 60 rows where", layers = "encoder.layer has 3 layers where";
  for (const char* wrapper : {"", "model."})
    for (const auto& [words, depth, is_fine, told, not_told] :
         {std::tuple("60", "3", true, std::string(), rows), std::tuple("67", "3", false, rows, layers),
          std::tuple("60", "12", false, layers, rows), std::tuple("50", "3", true, std::string(), rows)}) {
      const TempDir dir;
      write_bert(dir, wrapper);
      dir.write("ck/config.json", config(words, depth));
      const std::string model = dir / "ck";
      for (const std::vector<std::string>& more :
           {std::vector<std::string>(), std::vector<std::string>{"--config", model + "/config.json"}}) {
        const CommandResult r = reshard_cli({"verify", model, "--fail-on", "warning"}, more);
        EXPECT_EQ(r.exit_code, is_fine ? 0 : 1) << text_of(r);
        EXPECT_THAT(text_of(r), HasSubstr("not checked: no family describes model_type 'bert'"));
        EXPECT_THAT(text_of(r), HasSubstr(told));
        EXPECT_THAT(text_of(r), Not(HasSubstr(not_told)));
      }
      const CommandResult converted = reshard_cli({"convert", model, dir / "out", "--to", "hf", "--family", "none"});
      EXPECT_EQ(converted.exit_code, 0) << text_of(converted);
      EXPECT_THAT(text_of(converted), HasSubstr(told));
      EXPECT_THAT(text_of(converted), Not(HasSubstr(not_told)));
    }
}

}  // namespace
}  // namespace reshard
