// Tests experts in MXFP4 (gpt-oss): converted to bfloat16, and quantized from it (--quantize mxfp4).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "lib/device/convert.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::mxfp4_test {
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

  // Writes every byte of values with every exponent, and the numbers that they encode.
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

  CommandResult convert_it(std::vector<std::string> more) { return convert_it(values_, kConfig, std::move(more)); }

  CommandResult convert_it(const TensorValues& values, std::string_view config, std::vector<std::string> more) {
    std::filesystem::remove_all(std::string(dir_ / "source"));
    write_dcp(values, dir_ / "source", Mesh({{"dp_shard", 3}}));
    write_file(dir_ / "source/config.json", config);
    std::vector<std::string> all = {"convert", dir_ / "source", dir_ / "out", "-q"};
    all.insert(all.end(), more.begin(), more.end());
    return reshard_cli(all);
  }

  // Returns the config of the model in bfloat16.
  static std::string plain_config() {
    std::string out(kConfig);
    const std::size_t quantization = out.find(R"(, "quantization_config")");
    return out.substr(0, quantization) + "}";
  }

  // Returns the model with its experts unpacked.
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

// MaxText stores gate and up, alternating columns of one matrix, as two tensors.
TEST_F(Mxfp4Test, BecomesTensorsOfItsColumns) {
  const std::vector<std::string> names = {"--to", "orbax", "--names", "maxtext"};
  for (const std::vector<std::string>& mesh : {std::vector<std::string>(), {"--mesh", "dp_shard=2,tp=2"}}) {
    std::vector<std::string> options = names;
    options.insert(options.end(), mesh.begin(), mesh.end());
    std::vector<std::string> unpacking = options;
    unpacking.insert(unpacking.end(), {"--dtype", "bfloat16", "--force"});
    const CommandResult at_once = convert_it(unpacking);
    ASSERT_EQ(at_once.exit_code, 0) << at_once.err;
    const TensorValues got = load_checkpoint(dir_ / "out");
    options.emplace_back("--force");
    const CommandResult of_plain = convert_it(unpacked(), plain_config(), options);
    ASSERT_EQ(of_plain.exit_code, 0) << of_plain.err;
    EXPECT_EQ(load_checkpoint(dir_ / "out"), got);
  }
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
  EXPECT_THAT(r.err, HasSubstr("down_proj_blocks' is in MXFP4, and its scales are missing"));
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

// Bfloat16 matrices with any exponents and signs, and some zeros.
class Mxfp4PackingTest : public Mxfp4Test {
 protected:
  Mxfp4PackingTest() : floats_(unpacked()) {
    for (const std::string module : {"gate_up_proj", "down_proj"}) {
      TensorValue& matrix = floats_.at(kExperts + module);
      std::vector<float> values(static_cast<std::size_t>(volume(matrix.shape)));
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint32_t random = (static_cast<std::uint32_t>(i) + 77) * 2'654'435'761u;
        values[i] = i / 64 % 5 == 3 ? 0
                                    : std::ldexp(static_cast<float>(random >> 8) / 16'777'216.0F - 0.5F,
                                                 static_cast<int>(random % 7) - 3 * static_cast<int>(i / 700));
      }
      convert(DType::kFloat32, DType::kBFloat16, reinterpret_cast<const std::byte*>(values.data()),
              reinterpret_cast<std::byte*>(matrix.bytes.data()), std::ssize(values));
    }
  }

  // Quantizes by the definition: the smallest power of two that brings the largest magnitude to at most 6, and for each
  // element the nearest value, or the larger of two equally near.
  static TensorValues packed(const TensorValues& floats) {
    constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    TensorValues out;
    for (const auto& [name, value] : floats) {
      if (value.shape.rank() != 3) {
        out[name] = value;
        continue;
      }
      const Index experts = value.shape[0], in = value.shape[1], columns = value.shape[2];
      std::vector<float> x(static_cast<std::size_t>(volume(value.shape)));
      convert(DType::kBFloat16, DType::kFloat32, reinterpret_cast<const std::byte*>(value.bytes.data()),
              reinterpret_cast<std::byte*>(x.data()), std::ssize(x));
      std::string blocks, scales;
      for (Index e = 0; e < experts; ++e)
        for (Index o = 0; o < columns; ++o)
          for (Index g = 0; g < in; g += 32) {
            const auto at = [&](Index i) -> double {
              return x[static_cast<std::size_t>((e * in + g + i) * columns + o)];
            };
            double most = 0;
            for (Index i = 0; i < 32; ++i) most = std::max(most, std::abs(at(i)));
            int exponent = -127;
            while (std::ldexp(6, exponent) < most) ++exponent;
            scales.push_back(static_cast<char>(exponent + 127));
            for (Index i = 0; i < 32; ++i) {
              const double wanted = std::ldexp(std::abs(at(i)), -exponent);
              int nearest = 0;
              for (int v = 1; v < 8; ++v)
                if (std::abs(kMagnitudes[v] - wanted) <= std::abs(kMagnitudes[nearest] - wanted)) nearest = v;
              const int code = nearest + (std::signbit(at(i)) ? 8 : 0);
              if (i % 2 == 0)
                blocks.push_back(static_cast<char>(code));
              else
                blocks.back() = static_cast<char>(static_cast<unsigned char>(blocks.back()) | code << 4);
            }
          }
      out[name + "_blocks"] = {DType::kUint8, {experts, columns, in / 32, 16}, blocks};
      out[name + "_scales"] = {DType::kUint8, {experts, columns, in / 32}, scales};
    }
    return out;
  }

  TensorValues floats_;
};

TEST_F(Mxfp4PackingTest, HasTheValuesAndScalesOfTheDefinition) {
  const CommandResult r = convert_it(floats_, plain_config(), {"--to", "hf", "--quantize", "mxfp4"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const TensorValues out = load_checkpoint(dir_ / "out"), expected = packed(floats_);
  EXPECT_EQ(out.size(), expected.size());
  for (const auto& [name, value] : expected) EXPECT_TRUE(out.at(name) == value) << name;
  EXPECT_THAT(read_file(dir_ / "out/config.json"), HasSubstr(R"("quant_method": "mxfp4")"));
  const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

TEST_F(Mxfp4PackingTest, IsTheSameOfTensorsOfItsColumns) {
  const CommandResult stored = convert_it(floats_, plain_config(), {"--to", "orbax", "--names", "maxtext"});
  ASSERT_EQ(stored.exit_code, 0) << stored.err;
  const CommandResult r =
      reshard_cli({"convert", dir_ / "out", dir_ / "packed", "--to", "hf", "--quantize", "mxfp4", "-q"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const TensorValues out = load_checkpoint(dir_ / "packed");
  for (const auto& [name, value] : packed(floats_)) EXPECT_TRUE(out.at(name) == value) << name;
}

TEST_F(Mxfp4PackingTest, IsTheSameOnAMesh) {
  const CommandResult r = convert_it(
      floats_, plain_config(), {"--to", "dcp", "--names", "hf", "--quantize", "mxfp4", "--mesh", "dp_shard=3,tp=2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(dir_ / "out") == packed(floats_));
}

TEST_F(Mxfp4PackingTest, GivesWhatWasUnpackedItsValuesAgain) {
  ASSERT_EQ(convert_it(packed(floats_), kConfig, {"--to", "hf", "--dtype", "bfloat16"}).exit_code, 0);
  const TensorValues values = load_checkpoint(dir_ / "out");
  for (const auto& [name, value] : floats_) EXPECT_EQ(values.at(name).shape, value.shape) << name;
  const auto there_and_back = [&] {
    for (const auto& [to, option, what] :
         {std::tuple("packed", "--quantize", "mxfp4"), {"back", "--dtype", "bfloat16"}}) {
      const CommandResult r = reshard_cli({"convert", dir_ / (to == std::string("packed") ? "out" : "packed"),
                                           dir_ / to, "--to", "hf", option, what, "-q"});
      ASSERT_EQ(r.exit_code, 0) << r.err;
    }
  };
  there_and_back();
  EXPECT_TRUE(load_checkpoint(dir_ / "back") == values);
}

TEST_F(Mxfp4PackingTest, RefusesWhatCannotBePacked) {
  const auto refused = [&](const TensorValues& values, int code, const std::string& why) {
    const CommandResult r =
        convert_it(values, plain_config(), {"--to", "hf", "--quantize", "mxfp4", "--allow", "config"});
    EXPECT_EQ(r.exit_code, code) << r.err;
    EXPECT_THAT(r.err, HasSubstr(why));
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
  };
  TensorValues values = floats_;
  values.at(kExperts + "down_proj").bytes.replace(2 * ((32 + 7) * 64 + 5), 2, "\x80\x7f");  // infinity
  refused(values, 3, "down_proj': expert 1 contains infinities or NaNs in rows 0 to 31 of column 5");
  values = floats_;
  values.at(kExperts + "down_proj").shape = {kCount, 64, 32};
  values.at(kExperts + "gate_up_proj").shape = {4, 48, 64};
  refused(values, 4, "gate_up_proj' [4, 48, 64]: expected a multiple of 32 inputs");
  const CommandResult r = convert_it(values_, kConfig, {"--to", "hf", "--quantize", "mxfp4"});
  EXPECT_THAT(r.err, HasSubstr("already quantized (mxfp4)"));
}

}  // namespace
}  // namespace reshard::mxfp4_test
