// Float8 matrices with a scale for each block or row, made bfloat16.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "formats/load.h"
#include "lib/device/convert.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::block_scales_test {
namespace {

using testing::HasSubstr;

const std::string kLayer = "model.layers.0.";

// How a model is quantized.
struct Quantization {
  std::string config;           // its quantization_config
  std::string suffix;           // of the names of scales
  Index rows = 0, columns = 0;  // of a block
  DType scales = DType::kFloat32;
};

class BlockScalesTest : public testing::Test {
 protected:
  explicit BlockScalesTest(Quantization how = {R"({"quant_method": "fp8", "weight_block_size": [5, 7],
                                                   "modules_to_not_convert": ["model.layers.0.self_attn.v_proj"]})",
                                               "_scale_inv", 5, 7})
      : how_(std::move(how)) {
    const auto plain = [&](const std::string& name, const Dims& shape) {
      values_[name] = {DType::kBFloat16, shape, std::string(static_cast<std::size_t>(2 * volume(shape)), '\x3f')};
    };
    plain("model.embed_tokens.weight", {5, 32});
    plain("lm_head.weight", {5, 32});
    plain("model.norm.weight", {32});
    for (const std::string name : {"input_layernorm", "post_attention_layernorm"})
      plain(kLayer + name + ".weight", {32});
    for (const std::string name : {"q_norm", "k_norm"}) plain(kLayer + "self_attn." + name + ".weight", {8});
    plain(kLayer + "self_attn.v_proj.weight", {16, 32});
    scaled("self_attn.q_proj", 32, 32);
    scaled("self_attn.k_proj", 16, 32);
    scaled("self_attn.o_proj", 32, 32);
    scaled("mlp.gate_proj", 24, 32);
    scaled("mlp.up_proj", 24, 32);
    scaled("mlp.down_proj", 32, 24);
  }

  // Adds a matrix with every float8 value many times, and a different scale for each block.
  void scaled(const std::string& module, Index rows, Index columns) {
    const Index down = ceil_div(rows, how_.rows), across = ceil_div(columns, how_.columns);
    std::string elements;
    for (Index i = 0; i < rows * columns; ++i)
      elements.push_back(static_cast<char>((i * 37 + std::ssize(values_)) % 256));
    std::vector<float> scale;
    for (Index i = 0; i < down * across; ++i) scale.push_back(0.3F * static_cast<float>(i + 1) - 2);
    std::string scales(static_cast<std::size_t>(down * across * byte_size(how_.scales)), '\0');
    auto* const floats = reinterpret_cast<std::byte*>(scale.data());
    auto* const stored = reinterpret_cast<std::byte*>(scales.data());
    convert(DType::kFloat32, how_.scales, floats, stored, down * across);
    convert(how_.scales, DType::kFloat32, stored, floats, down * across);
    const std::string name = kLayer + module + ".weight";
    values_[name] = {DType::kFloat8E4M3, {rows, columns}, elements};
    values_[name + how_.suffix] = {how_.scales, {down, across}, scales};
    std::string made(elements.size() * 2, '\0');
    for (Index i = 0; i < rows * columns; ++i) {
      float x = 0;
      convert(DType::kFloat8E4M3, DType::kFloat32, reinterpret_cast<const std::byte*>(elements.data() + i),
              reinterpret_cast<std::byte*>(&x), 1);
      x *= scale[static_cast<std::size_t>(i / columns / how_.rows * across + i % columns / how_.columns)];
      convert(DType::kFloat32, DType::kBFloat16, reinterpret_cast<const std::byte*>(&x),
              reinterpret_cast<std::byte*>(made.data() + 2 * i), 1);
    }
    expected_[name] = {DType::kBFloat16, {rows, columns}, made};
  }

  std::string config() const {
    return R"({"model_type": "qwen3", "vocab_size": 5, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8,
               "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "torch_dtype": "bfloat16",
               "quantization_config": )" +
           how_.config + "}";
  }

  CommandResult convert_it(std::vector<std::string> more) {
    write_dcp(values_, dir_ / "source", Mesh({{"dp_shard", 3}}));
    write_file(dir_ / "source/config.json", config());
    std::vector<std::string> all = {"convert", dir_ / "source", dir_ / "out", "-q"};
    all.insert(all.end(), more.begin(), more.end());
    return reshard_cli(all);
  }

  const Quantization how_;
  const TempDir dir_;
  TensorValues values_, expected_;  // the stored tensors, and the expected matrices after scaling
};

TEST_F(BlockScalesTest, AreAppliedElementByElement) {
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "bfloat16"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const TensorValues out = load_checkpoint(dir_ / "out");
  EXPECT_EQ(out.size(), values_.size() - expected_.size());
  for (const auto& [name, value] : values_) {
    if (name.ends_with("_scale_inv")) continue;
    const auto made = expected_.find(name);
    EXPECT_TRUE(out.at(name) == (made == expected_.end() ? value : made->second)) << name;
  }
  const std::string config = read_file(dir_ / "out/config.json");
  EXPECT_THAT(config, testing::Not(HasSubstr("quantization_config")));
  const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

TEST_F(BlockScalesTest, AreAppliedUnderOtherNamesAndCuts) {
  const CommandResult r =
      convert_it({"--to", "dcp", "--names", "torchtitan", "--dtype", "bfloat16", "--mesh", "dp_shard=2,tp=2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const TensorValues out = load_checkpoint(dir_ / "out");
  EXPECT_TRUE(out.at("layers.0.attention.wq.weight") == expected_.at(kLayer + "self_attn.q_proj.weight"));
  EXPECT_TRUE(out.at("layers.0.feed_forward.w2.weight") == expected_.at(kLayer + "mlp.down_proj.weight"));
}

TEST_F(BlockScalesTest, StayWithTheirMatricesOtherwise) {
  const CommandResult r = convert_it({"--to", "hf"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(dir_ / "out") == values_);
}

TEST_F(BlockScalesTest, AreAppliedByALoad) {
  write_dcp(values_, dir_ / "source", Mesh({{"dp_shard", 3}}));
  write_file(dir_ / "source/config.json", config());
  LoadOptions options;
  options.placement.mesh = Mesh({{"tp", 2}});
  options.rank = 1;
  options.run.threads = 2;
  options.run.memory = 16 << 20;
  options.typing.dtype = DType::kBFloat16;
  std::map<std::string, std::string> memory;
  const auto report = load(dir_ / "source", options, [&](const LoadTensor& t) -> Result<Destination> {
    EXPECT_EQ(t.dtype, DType::kBFloat16) << t.name;
    std::string& bytes = memory[t.name];
    bytes.resize(static_cast<std::size_t>(t.bytes()));
    return Destination{reinterpret_cast<std::byte*>(bytes.data()), std::nullopt};
  });
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(memory.size(), values_.size() - expected_.size());
  const std::string q = kLayer + "self_attn.q_proj.weight";  // the second half of its rows
  EXPECT_TRUE(memory.at(q) == expected_.at(q).bytes.substr(expected_.at(q).bytes.size() / 2));
}

TEST_F(BlockScalesTest, OfAnotherShapeAreNamed) {
  TensorValue& scales = values_.at(kLayer + "mlp.up_proj.weight_scale_inv");
  scales.shape = {4, 5};
  scales.bytes.resize(80);
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "bfloat16", "--allow", "config"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("mlp.up_proj.weight_scale_inv' [4, 5] of float32: expected [5, 5]"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST_F(BlockScalesTest, ThatAreMissingAreNamed) {
  values_.erase(kLayer + "mlp.up_proj.weight_scale_inv");
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "bfloat16", "--allow", "config"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("mlp.up_proj.weight' is float8, and its scales are missing"));
}

TEST_F(BlockScalesTest, OneMatrixCannotStayBesideOthers) {
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "bfloat16", "--keep-dtype", "*.q_proj.weight"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, HasSubstr("would stay float8 while other matrices do not"));
}

// compressed-tensors: a scale per row of the matrices that the producer chose, and scales for their inputs.
class RowScalesTest : public BlockScalesTest {
 protected:
  RowScalesTest()
      : BlockScalesTest({R"({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                             "config_groups": {"group_0": {"targets": ["Linear"], "weights":
                               {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": true}}}})",
                         "_scale", 1, 32, DType::kBFloat16}) {
    for (const std::string name : {"self_attn.q_proj.input_scale", "self_attn.k_scale"})
      values_[kLayer + name] = {DType::kBFloat16, {1}, std::string(2, '\x3c')};
  }
};

TEST_F(RowScalesTest, AreAppliedElementByElement) {
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "bfloat16"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const TensorValues out = load_checkpoint(dir_ / "out");
  EXPECT_EQ(out.size(), values_.size() - expected_.size() - 2);
  for (const auto& [name, value] : expected_) EXPECT_TRUE(out.at(name) == value) << name;
  EXPECT_THAT(read_file(dir_ / "out/config.json"), testing::Not(HasSubstr("quantization_config")));
  const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

// compressed-tensors multiplies in the dtype of the scales and converts the result to float32.
TEST_F(RowScalesTest, AreAppliedInTheirOwnDtype) {
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "float32"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const TensorValues out = load_checkpoint(dir_ / "out");
  for (const auto& [name, value] : expected_) {
    std::string wide(2 * value.bytes.size(), '\0');
    convert(DType::kBFloat16, DType::kFloat32, reinterpret_cast<const std::byte*>(value.bytes.data()),
            reinterpret_cast<std::byte*>(wide.data()), volume(value.shape));
    EXPECT_TRUE(out.at(name) == (TensorValue{DType::kFloat32, value.shape, wide})) << name;
  }
}

TEST_F(RowScalesTest, AreAppliedWhereNoTableDescribesTheModel) {
  write_dcp(values_, dir_ / "source", Mesh({{"dp_shard", 3}}));
  std::string other = config();
  other.replace(other.find("qwen3"), 5, "another");
  write_file(dir_ / "source/config.json", other);
  const CommandResult r = reshard_cli({"convert", dir_ / "source", dir_ / "out", "--to", "hf", "--dtype", "bfloat16"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("no family describes model_type 'another'"));
  const TensorValues out = load_checkpoint(dir_ / "out");
  EXPECT_EQ(out.size(), values_.size() - expected_.size() - 2);
  for (const auto& [name, value] : expected_) EXPECT_TRUE(out.at(name) == value) << name;
}

TEST_F(RowScalesTest, MoveWithTheirRows) {
  const CommandResult r = convert_it({"--to", "dcp", "--mesh", "tp=2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  LoadOptions options;
  options.placement.mesh = Mesh({{"tp", 2}});
  options.rank = 1;
  std::map<std::string, std::string> memory;
  const auto report = load(dir_ / "out", options, [&](const LoadTensor& t) -> Result<Destination> {
    std::string& bytes = memory[t.name];
    bytes.resize(static_cast<std::size_t>(t.bytes()));
    return Destination{reinterpret_cast<std::byte*>(bytes.data()), std::nullopt};
  });
  ASSERT_TRUE(report) << report.error().message();
  const std::string by_rows = kLayer + "mlp.up_proj.weight_scale", by_columns = kLayer + "mlp.down_proj.weight_scale";
  EXPECT_TRUE(memory.at(by_rows) == values_.at(by_rows).bytes.substr(values_.at(by_rows).bytes.size() / 2));
  EXPECT_TRUE(memory.at(by_columns) == values_.at(by_columns).bytes);
  ASSERT_EQ(reshard_cli({"convert", dir_ / "out", dir_ / "back", "--to", "hf", "-q"}).exit_code, 0);
  EXPECT_TRUE(load_checkpoint(dir_ / "back") == values_);
  EXPECT_THAT(read_file(dir_ / "back/config.json"), HasSubstr("quantization_config"));
}

// llm-compressor's mixed precision: some modules are float8, others packed integers.
TEST_F(RowScalesTest, AreAppliedNextToPackedIntegers) {
  const std::string integers = kLayer + "self_attn.v_proj.weight";
  values_[integers] = {DType::kInt8, {16, 32}, std::string(512, '\x03')};
  values_[integers + "_scale"] = {DType::kBFloat16, {16, 1}, std::string(32, '\x40')};  // 3.0039
  expected_[integers] = {DType::kBFloat16, {16, 32}, {}};
  for (int i = 0; i < 16 * 32; ++i) expected_[integers].bytes += "\x10\x41";  // 9.0
  const std::string integer_group = R"({"targets": ["re:.*v_proj"], "weights":
                                         {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": true}})";
  write_dcp(values_, dir_ / "source", Mesh({{"dp_shard", 3}}));
  for (const bool is_first : {true, false}) {
    std::string mixed = config();
    mixed.replace(mixed.find("float-quantized"), 15, "mixed-precision");
    const std::string name = is_first ? "group_0" : "group_1";
    const std::size_t at = is_first ? mixed.find("\"group_0\": ") : mixed.find("}}}}") + 2;
    mixed.insert(at, is_first ? "\"a\": " + integer_group + ", " : ", \"b\": " + integer_group);
    write_file(dir_ / "source/config.json", mixed);
    const std::string out = dir_ / ("out of " + name);
    const CommandResult r = reshard_cli({"convert", dir_ / "source", out, "--to", "hf", "--dtype", "bfloat16", "-q"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    const TensorValues got = load_checkpoint(out);
    for (const auto& [tensor, value] : expected_) EXPECT_TRUE(got.at(tensor) == value) << tensor;
    EXPECT_THAT(read_file(out + "/config.json"), testing::Not(HasSubstr("quantization_config")));
    const CommandResult verified = reshard_cli({"verify", out, "--fail-on", "warning"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
}

// SpinQuant and QuIP rotate weights, and activations the other way as the model runs: the stored weights without the
// second rotation are another model. Rotations of weights alone cancel each other.
TEST_F(RowScalesTest, AreNotAppliedWithoutTheRotationsOfActivations) {
  write_dcp(values_, dir_ / "source", Mesh({{"dp_shard", 3}}));
  const auto with = [&](const std::string& location) {
    std::string text = config();
    const std::string transforms = R"("transform_config": {"config_groups": {
        "R1": {"type": "hadamard", "apply": [{"targets": ["re:.*o_proj$"], "location": "weight_output"}]},
        "R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "weight_input"},
                                             {"targets": ["re:.*down_proj$"], "location": ")" +
                                   location + "\"}]}}}, ";
    write_file(dir_ / "source/config.json", text.insert(text.find("\"format\""), transforms));
  };
  const std::vector<std::string> dense = {"convert", dir_ / "source", dir_ / "out", "--to", "hf",
                                          "-q",      "--dtype",       "bfloat16"};
  for (const char* const location : {"input", "output", "q_attn", "k_cache"}) {
    with(location);
    const CommandResult r = reshard_cli(dense);
    EXPECT_EQ(r.exit_code, 4) << location << r.out << r.err;
    EXPECT_THAT(r.err, HasSubstr("group 'R4' of transform_config"));
  }
  EXPECT_EQ(reshard_cli({"convert", dir_ / "source", dir_ / "copy", "--to", "hf", "-q"}).exit_code, 0);
  EXPECT_THAT(read_file(dir_ / "copy/config.json"), HasSubstr("k_cache"));
  with("weight_output");
  const CommandResult r = reshard_cli(dense);
  EXPECT_EQ(r.exit_code, 0) << r.err;
}

TEST_F(RowScalesTest, HaveNoNamesAmongThoseOfTrainers) {
  const CommandResult r = convert_it({"--to", "dcp", "--names", "torchtitan"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("torchtitan names has no names for them: a loader would use one without the other"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST_F(RowScalesTest, OfAnotherShapeAreNamed) {
  TensorValue& scales = values_.at(kLayer + "mlp.up_proj.weight_scale");
  scales.shape = {24};
  const CommandResult r = convert_it({"--to", "hf", "--dtype", "bfloat16", "--allow", "config"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("mlp.up_proj.weight_scale' [24] of bfloat16: expected [24, 1], one for each 1 x 32 of"));
  const CommandResult copied = reshard_cli({"convert", dir_ / "source", dir_ / "out", "--to", "hf"});
  EXPECT_EQ(copied.exit_code, 3);
  EXPECT_THAT(copied.err,
              HasSubstr("mlp.up_proj.weight_scale': " + (dir_ / "source/config.json") + " says [24, 1], got"));
  const CommandResult verified = reshard_cli({"verify", dir_ / "source"});
  EXPECT_EQ(verified.exit_code, 1) << verified.out << verified.err;
  EXPECT_THAT(verified.out, HasSubstr("shape [24]; config.json expects [24, 1]"));
}

// Models without a table may have one scale for a matrix or for each row.
TEST(Scales, ThatNobodyKnowsToApplyAreNotLeftOut) {
  const TempDir dir;
  const TensorValue matrix = {DType::kFloat8E4M3, {4, 6}, std::string(24, '\x35')};
  for (const char* name : {"trunk.0.up.weight_scale_inv", "trunk.0.up.weight_scale", "trunk.0.up.qscale_weight"}) {
    SCOPED_TRACE(name);
    const std::string source = dir / ("ck." + std::string(name)), out = source + ".out";
    write_dcp({{"trunk.0.up.weight", matrix}, {name, {DType::kFloat32, {}, std::string(4, '\x3f')}}}, source, Mesh());
    const CommandResult r = reshard_cli({"convert", source, out, "--to", "dcp", "--dtype", "bfloat16", "-q"});
    EXPECT_EQ(r.exit_code, 4);
    EXPECT_THAT(r.err, HasSubstr("'trunk.0.up.weight' is float8_e4m3fn next to tensor '" + std::string(name) + "'"));
    EXPECT_FALSE(std::filesystem::exists(out));
    EXPECT_EQ(reshard_cli({"convert", source, out, "--to", "dcp", "-q"}).exit_code, 0);
    const CommandResult half = reshard_cli(
        {"convert", source, out, "--to", "dcp", "--dtype", "bfloat16", "-q", "--force", "--exclude", "*scale*"});
    EXPECT_EQ(half.exit_code, 2);
    EXPECT_THAT(half.err, HasSubstr("it is unusable without tensor '" + std::string(name) + "'"));
  }
}

// Ministral 3's float8 files: a scale per matrix, and one for the activations.
TEST(Scales, OfWholeMatricesStayWithThem) {
  const TempDir dir;
  TensorValues values;
  const auto plain = [&](const std::string& name, const Dims& shape) {
    values[name] = {DType::kBFloat16, shape, std::string(static_cast<std::size_t>(2 * volume(shape)), '\x3f')};
  };
  const auto scaled = [&](const std::string& module, Index rows, Index columns) {
    values[kLayer + module + ".weight"] = {
        DType::kFloat8E4M3, {rows, columns}, std::string(static_cast<std::size_t>(rows * columns), '\x35')};
    for (const char* scale : {".weight_scale_inv", ".activation_scale"})
      values[kLayer + module + scale] = {DType::kBFloat16, {}, std::string(2, '\x3c')};
  };
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"}) plain(name, {6, 32});
  plain("model.norm.weight", {32});
  for (const std::string name : {"input_layernorm", "post_attention_layernorm"}) plain(kLayer + name + ".weight", {32});
  scaled("self_attn.q_proj", 32, 32);
  scaled("self_attn.k_proj", 16, 32);
  scaled("self_attn.v_proj", 16, 32);
  scaled("self_attn.o_proj", 32, 32);
  scaled("mlp.gate_proj", 24, 32);
  scaled("mlp.up_proj", 24, 32);
  scaled("mlp.down_proj", 32, 24);
  write_dcp(values, dir / "ck", Mesh({{"dp_shard", 3}}));
  write_file(dir / "ck/config.json",
             R"({"model_type": "ministral3", "vocab_size": 6, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "dtype": "bfloat16",
                 "quantization_config": {"quant_method": "fp8", "activation_scheme": "static",
                                         "weight_block_size": null, "modules_to_not_convert": ["lm_head"]}})");
  const CommandResult r = reshard_cli({"convert", dir / "ck", dir / "model", "--to", "hf", "-q"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(load_checkpoint(dir / "model") == values);
  const CommandResult verified = reshard_cli({"verify", dir / "model", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;

  // After the scales are applied, they and quantization_config are removed.
  const CommandResult applied = reshard_cli({"convert", dir / "ck", dir / "wide", "--to", "hf", "--dtype", "bfloat16"});
  ASSERT_EQ(applied.exit_code, 0) << applied.err;
  const TensorValues wide = load_checkpoint(dir / "wide");
  EXPECT_EQ(wide.size(), 12u);
  const std::byte stored{0x35};
  float element = 0, scale = 0;
  convert(DType::kFloat8E4M3, DType::kFloat32, &stored, reinterpret_cast<std::byte*>(&element), 1);
  convert(DType::kBFloat16, DType::kFloat32, reinterpret_cast<const std::byte*>("\x3c\x3c"),
          reinterpret_cast<std::byte*>(&scale), 1);
  element *= scale;
  std::string due(2, '\0');
  convert(DType::kFloat32, DType::kBFloat16, reinterpret_cast<const std::byte*>(&element),
          reinterpret_cast<std::byte*>(due.data()), 1);
  const TensorValue& made = wide.at(kLayer + "mlp.down_proj.weight");
  EXPECT_EQ(made.dtype, DType::kBFloat16);
  for (std::size_t i = 0; i < made.bytes.size(); i += 2) ASSERT_EQ(made.bytes.substr(i, 2), due) << i;
  EXPECT_THAT(read_file(dir / "wide/config.json"), testing::Not(HasSubstr("quantization_config")));
  EXPECT_EQ(reshard_cli({"verify", dir / "wide", "--fail-on", "warning"}).exit_code, 0);
}

}  // namespace
}  // namespace reshard::block_scales_test
