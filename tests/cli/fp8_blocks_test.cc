// Tests matrices that are quantized to float8, in blocks (--quantize fp8-block) or with one scale each (fp8-tensor).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "lib/device/convert.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::fp8_blocks_test {
namespace {

using testing::HasSubstr;

constexpr std::string_view kConfig =
    R"({"model_type": "qwen3", "vocab_size": 5, "hidden_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 48, "intermediate_size": 136, "torch_dtype": "bfloat16"})";
constexpr Index kBlock = 128;
const std::string kLayer = "model.layers.0.";

class Fp8BlocksTest : public testing::Test {
 protected:
  Fp8BlocksTest() {
    const auto plain = [&](const std::string& name, const Dims& shape) {
      values_[name] = {DType::kBFloat16, shape, std::string(static_cast<std::size_t>(2 * volume(shape)), '\x3f')};
    };
    plain("model.embed_tokens.weight", {5, 160});
    plain("lm_head.weight", {5, 160});
    plain("model.norm.weight", {160});
    for (const std::string name : {"input_layernorm", "post_attention_layernorm"})
      plain(kLayer + name + ".weight", {160});
    for (const std::string name : {"q_norm", "k_norm"}) plain(kLayer + "self_attn." + name + ".weight", {48});
    matrix("self_attn.q_proj", 192, 160);
    matrix("self_attn.k_proj", 96, 160);
    matrix("self_attn.v_proj", 96, 160);
    matrix("self_attn.o_proj", 160, 192);
    matrix("mlp.gate_proj", 136, 160);
    matrix("mlp.up_proj", 136, 160);
    matrix("mlp.down_proj", 160, 136);
  }

  // Adds a matrix with any exponents and signs. In every other matrix, the first block has only zeros, or values too
  // small for a scale of 448.
  void matrix(const std::string& module, Index rows, Index columns) {
    std::vector<float> values;
    for (Index i = 0; i < rows * columns; ++i) {
      const auto random = static_cast<std::uint32_t>(i + std::ssize(values_) * 77'777) * 2'654'435'761u;
      values.push_back(std::ldexp(static_cast<float>(random >> 8) / 16'777'216.0F - 0.5F,
                                  static_cast<int>(random % 5) - 4 * static_cast<int>(i / columns / kBlock)));
    }
    if (values_.size() % 2 == 0)
      for (Index r = 0; r < std::min(rows, kBlock); ++r)
        for (Index c = 0; c < kBlock; ++c)
          values[static_cast<std::size_t>(r * columns + c)] = values_.size() % 4 == 0 || c == 5 ? 0 : 1e-38F;
    values_[kLayer + module + ".weight"] = {
        DType::kFloat32, {rows, columns}, std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4)};
  }

  // Quantizes by the definition, block by block. A side of 0 means the whole matrix.
  TensorValues quantized(Index side = kBlock) const {
    TensorValues out;
    for (const auto& [name, value] : values_) {
      if (value.dtype != DType::kFloat32) {
        out[name] = value;
        continue;
      }
      const Index rows = value.shape[0], columns = value.shape[1];
      const Index high = side > 0 ? side : rows, wide = side > 0 ? side : columns;
      std::vector<float> x(static_cast<std::size_t>(rows * columns)), scales;
      std::memcpy(x.data(), value.bytes.data(), value.bytes.size());
      for (Index r = 0; r < rows; r += high)
        for (Index c = 0; c < columns; c += wide) {
          std::vector<float*> block;
          for (Index i = r; i < std::min(rows, r + high); ++i)
            for (Index j = c; j < std::min(columns, c + wide); ++j)
              block.push_back(&x[static_cast<std::size_t>(i * columns + j)]);
          float most = 0;
          for (const float* v : block) most = std::max(most, std::abs(*v));
          const float scale = most > 1e-36F ? 1.0F / most * 448.0F : most > 0 ? 0x1p127F : 1.0F;
          for (float* v : block) *v = std::clamp(*v * scale, -448.0F, 448.0F);
          scales.push_back(1.0F / scale);
        }
      std::string elements(x.size(), '\0');
      convert(DType::kFloat32, DType::kFloat8E4M3, reinterpret_cast<const std::byte*>(x.data()),
              reinterpret_cast<std::byte*>(elements.data()), std::ssize(x));
      out[name] = {DType::kFloat8E4M3, value.shape, elements};
      out[name + "_scale_inv"] = {DType::kFloat32,
                                  side > 0 ? Dims{ceil_div(rows, side), ceil_div(columns, side)} : Dims(),
                                  std::string(reinterpret_cast<const char*>(scales.data()), scales.size() * 4)};
    }
    return out;
  }

  CommandResult convert_it(std::vector<std::string> more, std::string_view config = kConfig,
                           const std::string& how = "fp8-block") {
    std::filesystem::remove_all(std::string(dir_ / "source"));
    write_dcp(values_, dir_ / "source", Mesh({{"dp_shard", 3}}));
    if (!config.empty()) write_file(dir_ / "source/config.json", config);
    std::vector<std::string> all = {"convert", dir_ / "source", dir_ / "out", "--quantize", how, "-q"};
    all.insert(all.end(), more.begin(), more.end());
    return reshard_cli(all);
  }

  const TempDir dir_;
  TensorValues values_;
};

TEST_F(Fp8BlocksTest, HaveTheValuesAndScalesOfTheDefinition) {
  const CommandResult r = convert_it({"--to", "hf"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const TensorValues out = load_checkpoint(dir_ / "out"), expected = quantized();
  EXPECT_EQ(out.size(), expected.size());
  for (const auto& [name, value] : expected) EXPECT_TRUE(out.at(name) == value) << name;
  const std::string config = read_file(dir_ / "out/config.json");
  EXPECT_THAT(config, HasSubstr(R"("quant_method": "fp8")"));
  EXPECT_THAT(config, HasSubstr(R"("lm_head")"));
  const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

TEST_F(Fp8BlocksTest, AreTheSameOnAMesh) {
  const CommandResult r = convert_it({"--to", "dcp", "--names", "hf", "--mesh", "dp_shard=3,tp=2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(dir_ / "out") == quantized());
}

TEST_F(Fp8BlocksTest, MayBeTheWholeMatrix) {
  for (const std::vector<std::string>& to :
       {std::vector<std::string>{"--to", "hf"}, {"--to", "dcp", "--names", "hf", "--mesh", "dp_shard=3,tp=2"}}) {
    std::filesystem::remove_all(std::string(dir_ / "out"));
    const CommandResult r = convert_it(to, kConfig, "fp8-tensor");
    ASSERT_EQ(r.exit_code, 0) << r.err;
    const TensorValues out = load_checkpoint(dir_ / "out"), expected = quantized(0);
    EXPECT_EQ(out.size(), expected.size());
    for (const auto& [name, value] : expected) EXPECT_TRUE(out.at(name) == value) << name;
    const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
}

TEST_F(Fp8BlocksTest, OfAFloatModelLeaveTheRestToDtypeAndSomeAsTheyAre) {
  const CommandResult r =
      convert_it({"--to", "hf", "--dtype", "float16", "--keep-dtype", "*.up_proj.weight", "--keep-dtype", "*norm*"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  TensorValues out = load_checkpoint(dir_ / "out"), expected = quantized();
  const std::string up = kLayer + "mlp.up_proj.weight", q = kLayer + "self_attn.q_proj.weight";
  EXPECT_TRUE(out.at(up) == values_.at(up));
  EXPECT_FALSE(out.contains(up + "_scale_inv"));
  EXPECT_TRUE(out.at(q) == expected.at(q));
  EXPECT_EQ(out.at("lm_head.weight").dtype, DType::kFloat16);
  EXPECT_EQ(out.at("model.norm.weight").dtype, DType::kBFloat16);
  EXPECT_THAT(read_file(dir_ / "out/config.json"), HasSubstr(R"("model.layers.0.mlp.up_proj")"));
}

TEST_F(Fp8BlocksTest, OfInfinitiesAreRefused) {
  const float infinity = INFINITY;
  std::memcpy(values_.at(kLayer + "mlp.up_proj.weight").bytes.data() + 4 * (130 * 160 + 140), &infinity, 4);
  const CommandResult r = convert_it({"--to", "hf"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("mlp.up_proj.weight': the block at row 128, column 128 contains infinities or NaNs"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST_F(Fp8BlocksTest, AreRefusedWhereScalesHaveNoPlace) {
  EXPECT_THAT(convert_it({"--to", "dcp", "--names", "torchtitan"}).err, HasSubstr("add --to hf or --names hf"));
  EXPECT_THAT(convert_it({"--to", "hf"}, "").err, HasSubstr("a config.json must record the quantization"));
  std::string config(kConfig);
  config.insert(1, R"("quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},)");
  EXPECT_THAT(convert_it({"--to", "hf", "--allow", "config"}, config).err, HasSubstr("already quantized (fp8)"));
  for (const std::string name : {"q_norm", "k_norm"}) values_.erase(kLayer + "self_attn." + name + ".weight");
  config = kConfig;
  config.replace(config.find("qwen3"), 5, "llama");
  EXPECT_THAT(convert_it({"--to", "hf"}, config).err,
              HasSubstr("family llama have no matrices in float8 blocks; --quantize fp8-tensor"));
  config.insert(1, R"("quantization_config": {"quant_method": "gptq", "bits": 4},)");
  for (const std::string name : {"q_proj", "k_proj", "v_proj", "o_proj"})
    values_.erase(kLayer + "self_attn." + name + ".weight");
  EXPECT_THAT(convert_it({"--to", "hf"}, config).err, HasSubstr("the model belongs to no known family"));
}

}  // namespace
}  // namespace reshard::fp8_blocks_test
