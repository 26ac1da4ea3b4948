// Experts in MXFP4 (gpt-oss), made bfloat16.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "lib/device/convert.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

using testing::HasSubstr;

constexpr std::string_view kConfig =
    R"({"model_type": "gpt_oss", "vocab_size": 5, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 32, "num_local_experts": 3,
        "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"]}})";
const std::string kLayer = "model.layers.0.";
const std::string kExperts = kLayer + "mlp.experts.";
constexpr Index kCount = 3;  // experts

class Mxfp4Test : public testing::Test {
 protected:
  Mxfp4Test() {
    plain("model.embed_tokens.weight", {5, 64});
    plain("lm_head.weight", {5, 64});
    for (const std::string name :
         {"model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"})
      plain(name + ".weight", {64});
    for (const auto& [name, rows] : {std::pair("q", 8), std::pair("k", 4), std::pair("v", 4)}) {
      plain(kLayer + "self_attn." + name + "_proj.weight", {rows, 64});
      plain(kLayer + "self_attn." + name + "_proj.bias", {rows});
    }
    plain(kLayer + "self_attn.o_proj.weight", {64, 8});
    plain(kLayer + "self_attn.o_proj.bias", {64});
    plain(kLayer + "self_attn.sinks", {2});
    plain(kLayer + "mlp.router.weight", {kCount, 64});
    plain(kLayer + "mlp.router.bias", {kCount});
    plain(kExperts + "gate_up_proj_bias", {kCount, 64});
    plain(kExperts + "down_proj_bias", {kCount, 64});
    packed("gate_up_proj", 64, 64);
    packed("down_proj", 32, 64);
  }

  void plain(const std::string& name, const Dims& shape) {
    values_[name] = {DType::kBFloat16, shape, std::string(static_cast<std::size_t>(2 * volume(shape)), '\x3f')};
  }

  // Every byte of values and every exponent, and what they stand for.
  void packed(const std::string& module, Index in, Index out) {
    constexpr float kMagnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    std::string blocks, scales;
    for (Index i = 0; i < kCount * out * in / 2; ++i) blocks.push_back(static_cast<char>(i * 41 % 256));
    for (Index i = 0; i < kCount * out * in / 32; ++i) scales.push_back(static_cast<char>(i * 37 % 256));
    std::vector<float> made(static_cast<std::size_t>(kCount * in * out));
    for (Index e = 0; e < kCount; ++e)
      for (Index o = 0; o < out; ++o)
        for (Index i = 0; i < in; ++i) {
          const Index place = (e * out + o) * in + i;
          const auto both = static_cast<unsigned char>(blocks[static_cast<std::size_t>(place / 2)]);
          const int value = i % 2 == 0 ? both % 16 : both / 16;
          const int exponent = static_cast<unsigned char>(scales[static_cast<std::size_t>(place / 32)]) - 127;
          const float x = std::ldexp(kMagnitudes[value % 8], exponent);
          made[static_cast<std::size_t>((e * in + i) * out + o)] = value < 8 ? x : -x;
        }
    std::string elements(2 * made.size(), '\0');
    convert(DType::kFloat32, DType::kBFloat16, reinterpret_cast<const std::byte*>(made.data()),
            reinterpret_cast<std::byte*>(elements.data()), std::ssize(made));
    values_[kExperts + module + "_blocks"] = {DType::kUint8, {kCount, out, in / 32, 16}, blocks};
    values_[kExperts + module + "_scales"] = {DType::kUint8, {kCount, out, in / 32}, scales};
    expected_[kExperts + module] = {DType::kBFloat16, {kCount, in, out}, elements};
  }

  CommandResult convert_it(std::vector<std::string> more) {
    write_dcp(values_, dir_ / "source", Mesh({{"dp_shard", 3}}));
    write_file(dir_ / "source/config.json", kConfig);
    std::vector<std::string> all = {"convert", dir_ / "source", dir_ / "out", "-q"};
    all.insert(all.end(), more.begin(), more.end());
    return reshard_cli(all);
  }

  // The model with its experts unpacked.
  TensorValues unpacked() const {
    TensorValues out = expected_;
    for (const auto& [name, value] : values_)
      if (value.dtype != DType::kUint8) out[name] = value;
    return out;
  }

  const TempDir dir_;
  TensorValues values_, expected_;
};

TEST_F(Mxfp4Test, BecomesMatricesOfBfloat16) {
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "bfloat16"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const TensorValues out = load_checkpoint(dir_ / "out");
  EXPECT_EQ(out.size(), unpacked().size());
  for (const auto& [name, value] : unpacked()) EXPECT_TRUE(out.at(name) == value) << name;
  EXPECT_THAT(read_file(dir_ / "out/config.json"), testing::Not(HasSubstr("quantization_config")));
  const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

TEST_F(Mxfp4Test, BecomesTheSameOnAMesh) {
  const CommandResult r =
      convert_it({"--to", "dcp", "--names", "hf", "--dtype", "bfloat16", "--mesh", "dp_shard=2,tp=2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(dir_ / "out") == unpacked());
}

TEST_F(Mxfp4Test, StaysAsItIsOtherwise) {
  const CommandResult r = convert_it({"--to", "hf"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(dir_ / "out") == values_);
  const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

TEST_F(Mxfp4Test, ValuesWithoutScalesAreNamed) {
  values_.erase(kExperts + "down_proj_scales");
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "bfloat16", "--allow", "config"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("down_proj_blocks' is in MXFP4, and its scales are not there"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST_F(Mxfp4Test, ScalesOfAnotherShapeAreNamed) {
  TensorValue& scales = values_.at(kExperts + "gate_up_proj_scales");
  scales.shape = {kCount, 32, 4};
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "bfloat16", "--allow", "config"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("gate_up_proj_scales' [3, 32, 4] of uint8: expected [3, 64, 2] of uint8"));
}

TEST_F(Mxfp4Test, NamesWithoutScalesAreRefused) {
  const CommandResult r = convert_it({"--to", "bin", "--names", "transformers"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("4 tensors are quantized values or their scales"));
}

}  // namespace
}  // namespace reshard
