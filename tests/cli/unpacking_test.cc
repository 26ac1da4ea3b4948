// Tests --dtype on packed weights (bitsandbytes, GPTQ, AWQ, compressed-tensors, NVFP4). tests/data/quantized contains
// the libraries' files and their own unpacked values (see make.py there).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "formats/load.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::unpacking_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

const std::string kExpected = ".expected.safetensors";

std::vector<std::string> cases() {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(test_data("quantized")))
    if (const std::string name = entry.path().filename(); name.ends_with(kExpected))
      out.push_back(name.substr(0, name.size() - kExpected.size()));
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<std::string> command(const std::string& source, const std::string& out, const std::string& dtype) {
  return {"convert", source, out, "--to", "hf", "--family", "none", "-q", "--dtype", dtype};
}

// Returns the values to which the case's library unpacks it.
TensorValues expected_values(const std::string& name, const std::string& dtype) {
  TensorValues out;
  for (auto& [tensor, value] : load_checkpoint(test_data("quantized/" + name) + kExpected))
    if (tensor.ends_with(":" + dtype)) out.emplace(tensor.substr(0, tensor.find(':')), value);
  return out;
}

TensorValue transposed(const TensorValue& matrix) {
  const Index rows = matrix.shape[0], columns = matrix.shape[1], width = byte_size(matrix.dtype);
  TensorValue out{matrix.dtype, {columns, rows}, {}};
  for (Index c = 0; c < columns; ++c)
    for (Index r = 0; r < rows; ++r)
      out.bytes +=
          matrix.bytes.substr(static_cast<std::size_t>((r * columns + c) * width), static_cast<std::size_t>(width));
  return out;
}

// Loads all tensors of a checkpoint as float32.
Status unpack(const std::string& source) {
  LoadOptions options;
  options.model = {.detect = false};
  options.run.threads = 2;
  options.run.memory = 64 << 20;
  options.typing.dtype = DType::kFloat32;
  std::list<std::string> memory;
  TRY(load(source, std::move(options), [&](const LoadTensor& t) -> Result<Destination> {
    std::string& bytes = memory.emplace_back(static_cast<std::size_t>(t.bytes()), '\0');
    return Destination{reinterpret_cast<std::byte*>(bytes.data()), std::nullopt};
  }));
  return {};
}

class UnpackingTest : public testing::TestWithParam<std::string> {
 protected:
  std::string source() const { return test_data("quantized/" + GetParam()); }
  TensorValues expected(const std::string& dtype) const { return expected_values(GetParam(), dtype); }

  const TempDir dir_;
};

INSTANTIATE_TEST_SUITE_P(Libraries, UnpackingTest, testing::ValuesIn(sampled(cases(), 4)),
                         [](const auto& library) { return library.param; });

TEST_P(UnpackingTest, GivesTheLibrarysBitsInEachDtype) {
  for (const std::string dtype : {"bfloat16", "float16", "float32"}) {
    const std::string out = dir_ / dtype;
    const CommandResult r = reshard_cli(command(source(), out, dtype));
    ASSERT_EQ(r.exit_code, 0) << r.err;
    TensorValues got = load_checkpoint(out);
    EXPECT_EQ(got.erase("norm.weight"), 1U);
    EXPECT_EQ(got, expected(dtype)) << dtype;
    const std::string config = read_file(out + "/config.json");
    EXPECT_THAT(config, Not(HasSubstr("quantization_config")));
    EXPECT_THAT(config, HasSubstr("\"dtype\": \"" + dtype + "\""));
  }
}

TEST_P(UnpackingTest, GivesThemFromShardsAndToShards) {
  write_dcp(load_checkpoint(source()), dir_ / "dcp", Mesh({{"dp_shard", 3}}));
  fs::copy_file(source() + "/config.json", dir_ / "dcp/config.json");
  const CommandResult r = reshard_cli({"convert", dir_ / "dcp", dir_ / "out", "--to", "dcp", "--mesh", "dp_shard=2",
                                       "--family", "none", "-q", "--dtype", "bfloat16"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  TensorValues got = load_checkpoint(dir_ / "out");
  EXPECT_EQ(got.erase("norm.weight"), 1U);
  EXPECT_EQ(got, expected("bfloat16"));
}

// If a tensor of a packed weight is replaced by any other one, the result is numbers or an error that names one of its
// tensors.
TEST_P(UnpackingTest, SurvivesTensorsOfOtherShapesAndValues) {
  const TensorValues stored = load_checkpoint(source());
  const auto replaced = [](const TensorValue& value, Dims shape, char fill) {
    shape = volume(shape) > 0 ? shape : Dims{1};
    return TensorValue{value.dtype, shape,
                       std::string(static_cast<std::size_t>(volume(shape) * byte_size(value.dtype)), fill)};
  };
  const std::vector<std::function<TensorValue(const TensorValue&)>> changes = {
      [&](const TensorValue& v) { return replaced(v, v.shape, '\x7f'); },
      [&](const TensorValue& v) { return replaced(v, v.shape, '\xff'); },
      [&](const TensorValue& v) {
        return replaced(v, {7, 3}, '\0');
      },
      [&](const TensorValue& v) { return replaced(v, {volume(v.shape) + 1}, '\x01'); },
      [&](const TensorValue& v) { return replaced(v, {}, '\x01'); },
  };
  for (const auto& [name, value] : stored) {
    if (!name.starts_with("layers.0.")) continue;
    for (std::size_t i = 0; i < changes.size(); ++i) {
      const std::string source = dir_ / (std::to_string(i) + name);
      TensorValues changed = stored;
      changed[name] = changes[i](value);
      write_dcp(changed, source, Mesh());
      fs::copy_file(this->source() + "/config.json", source + "/config.json");
      const Status status = unpack(source);
      if (status) continue;
      EXPECT_THAT(status.error().code(), testing::AnyOf(ErrorCode::kCorrupt, ErrorCode::kUnsupported))
          << name << " " << i << ": " << status.error().message();
      EXPECT_THAT(status.error().message(), HasSubstr("layers.0.proj.")) << name << " " << i;
    }
  }
}

// Libraries pack the weight of GPT-2's Conv1D, [in, out], as that of a linear module, [out, in]. With --family none
// too, the output is the model of its config.
TEST_P(UnpackingTest, GivesConv1dWeightsAsTheModelsClassStoresThem) {
  const std::vector<std::string> modules = {"h.0.attn.c_proj.", "h.0.mlp.c_fc.", "h.0.mlp.c_proj."};
  const auto renamed = [&](const TensorValues& values) {
    TensorValues out;
    for (const auto& [name, value] : values)
      out[name.starts_with("layers.") ? modules[static_cast<std::size_t>(name[7] - '0')] + name.substr(14) : name] =
          value;
    return out;
  };
  write_dcp(renamed(load_checkpoint(source())), dir_ / "source", Mesh());
  const CommandResult open = reshard_cli(command(dir_ / "source", dir_ / "open", "float32"));
  EXPECT_EQ(open.exit_code, 2) << open.err;
  EXPECT_THAT(open.err, HasSubstr("--config"));
  for (const std::string type : {"gpt2", "gpt_bigcode"}) {
    std::string config = read_file(source() + "/config.json");
    config.replace(config.find("packed_test"), 11,
                   type + R"(", "n_embd": 64, "n_head": 2, "n_layer": 1, "vocab_size": 16, "_": ")");
    write_file(dir_ / "source/config.json", config);
    const CommandResult r = reshard_cli(command(dir_ / "source", dir_ / type, "float32"));
    ASSERT_EQ(r.exit_code, 0) << r.err;
    TensorValues got = load_checkpoint(dir_ / type), wanted = renamed(expected("float32"));
    got.erase("norm.weight");
    if (type == "gpt2")
      for (auto& [name, value] : wanted) value = transposed(value);
    EXPECT_EQ(got, wanted) << type;
  }
}

// ---- GPTQ's formats

struct GptqFormat {
  std::string data, of, to;  // the case; in its config.json, `of` is replaced by `to`
  int exit_code = 0;
  std::string expected;  // the case with the values of the output, or words of the error
};

TEST(GptqFormats, AreUnpackedOrRefused) {
  const std::string method = R"("quant_method": "gptq")", format = R"("checkpoint_format": "gptq")",
                    packing = R"("packing_format": "auto_round")", auto_round = R"("quant_method": "auto-round")";
  const std::vector<GptqFormat> formats = {
      {"gptq_4bit", format, R"("_": 0)", 0, "gptq_4bit"},
      {"gptq_4bit", format, R"("format": "gptq")", 0, "gptq_4bit"},
      {"gptq_4bit", R"("sym": false)", R"("sym": true)", 0, "gptq_4bit"},
      {"gptq_4bit", R"("bits": 4)", R"("bits": 8)", 3, "8 bits do not fill"},
      {"gptq_4bit", R"("group_size": 32)", R"("group_size": -1)", 0, "gptq_4bit"},
      {"gptq_4bit_v2", R"("checkpoint_format": "gptq_v2")", R"("format": "gptq_v2")", 0, "gptq_4bit_v2"},
      {"gptq_4bit", format, R"("checkpoint_format": "gptq_p")", 4, "expected gptq or gptq_v2"},
      {"gptq_4bit", format, R"("checkpoint_format": "marlin")", 4, "expected gptq or gptq_v2"},
      {"gptq_4bit", format, R"("checkpoint_format": "bitblas")", 4, "expected gptq or gptq_v2"},
      {"gptq_4bit", R"("quantization_config")", R"("_")", 2, "no quantization_config says"},
      {"gptq_without_g_idx", R"("desc_act": false)", R"("desc_act": true)", 3, "g_idx"},
      {"auto_round_4bit", auto_round, R"("quant_method": "intel/auto-round")", 0, "auto_round_4bit"},
      {"auto_round_4bit", packing, R"("_": 0)", 4, "packing_format"},
      {"auto_round_4bit", packing, R"("packing_format": "auto_round:fake")", 4, "packing_format"},
      {"auto_round_4bit", packing, R"("packing_format": "auto_round:gptqmodel")", 0, "auto_round_4bit"},
      {"auto_round_4bit_auto_gptq", auto_round, method, 0, "auto_round_4bit_auto_gptq"},
      {"auto_round_5bit", auto_round, method, 4, "5 bits each"},
      {"auto_round_6bit", auto_round, method, 4, "6 bits each"},
      {"auto_round_7bit", auto_round, method, 4, "7 bits each"},
  };
  const TempDir dir;
  for (std::size_t i = 0; i < formats.size(); ++i) {
    const GptqFormat& f = formats[i];
    const std::string source = dir / ("source" + std::to_string(i)), out = source + ".out";
    fs::copy(test_data("quantized/" + f.data), source);
    std::string config = read_file(source + "/config.json");
    ASSERT_NE(config.find(f.of), std::string::npos) << i;
    write_file(source + "/config.json", config.replace(config.find(f.of), f.of.size(), f.to));
    const CommandResult r = reshard_cli(command(source, out, "float32"));
    EXPECT_EQ(r.exit_code, f.exit_code) << i << ": " << r.err;
    if (f.exit_code != 0) {
      EXPECT_THAT(r.err, HasSubstr(f.expected)) << i;
      continue;
    }
    TensorValues got = load_checkpoint(out);
    got.erase("norm.weight");
    EXPECT_EQ(got, expected_values(f.expected, "float32")) << i;
  }
}

// ---- a model that transformers quantized with bitsandbytes

class PackedLlamaTest : public testing::Test {
 protected:
  CommandResult convert(const std::string& source, const std::string& out, std::vector<std::string> more) {
    std::vector<std::string> all = {"convert", source, dir_ / out, "-q"};
    all.insert(all.end(), more.begin(), more.end());
    return reshard_cli(all);
  }

  const std::string source_ = test_data("quantized/llama");
  const TempDir dir_;
};

TEST_F(PackedLlamaTest, BecomesThePlainModelOfItsConfig) {
  const CommandResult r = convert(source_, "out", {"--to", "hf", "--dtype", "bfloat16"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const CommandResult verified = reshard_cli({"verify", dir_ / "out", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  EXPECT_THAT(verified.out, HasSubstr("Llama, 12 tensors"));
}

TEST_F(PackedLlamaTest, BecomesOtherNamesRowsAndCuts) {
  ASSERT_EQ(convert(source_, "plain", {"--to", "hf", "--dtype", "bfloat16"}).exit_code, 0);
  for (const std::vector<std::string>& target :
       {std::vector<std::string>{"--to", "dcp", "--names", "torchtitan", "--mesh", "dp_shard=2,tp=2"},
        {"--to", "megatron", "--mesh", "tp=2"},
        {"--to", "ranks", "--mesh", "tp=2"}}) {
    const std::string name = target[1];
    ASSERT_EQ(convert(dir_ / "plain", "of_plain_" + name, target).exit_code, 0) << name;
    std::vector<std::string> with_dtype = target;
    with_dtype.insert(with_dtype.end(), {"--dtype", "bfloat16"});
    const CommandResult r = convert(source_, "of_packed_" + name, with_dtype);
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(load_checkpoint(dir_ / ("of_packed_" + name)), load_checkpoint(dir_ / ("of_plain_" + name))) << name;
  }
}

TEST_F(PackedLlamaTest, GetsAnAdapterAsPeftMergesIt) {
  const std::vector<std::string> merge = {"--to", "hf", "--merge-adapter", "--adapter",
                                          test_data("quantized/llama.adapter")};
  std::vector<std::string> with_dtype = merge;
  with_dtype.insert(with_dtype.end(), {"--dtype", "bfloat16"});
  const CommandResult r = convert(source_, "out", with_dtype);
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(load_checkpoint(dir_ / "out"), load_checkpoint(test_data("quantized/llama.merged.safetensors")));
  const CommandResult refused = convert(source_, "packed", merge);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--dtype"));
}

TEST_F(PackedLlamaTest, IsFoundInsideWrappers) {
  const TensorValues stored = load_checkpoint(source_);
  ASSERT_EQ(convert(source_, "plain", {"--to", "hf", "--dtype", "bfloat16"}).exit_code, 0);
  for (const std::string wrapper : {"app.model.", "model.", "module."}) {
    TensorValues wrapped;
    for (const auto& [name, value] : stored) wrapped[wrapper + name] = value;
    const std::string source = dir_ / (wrapper + "source");
    write_dcp(wrapped, source, Mesh({{"dp_shard", 2}}));
    fs::copy_file(source_ + "/config.json", source + "/config.json");
    const CommandResult r = convert(source, wrapper, {"--to", "hf", "--dtype", "bfloat16"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(load_checkpoint(dir_ / wrapper), load_checkpoint(dir_ / "plain")) << wrapper;
  }
}

// PEFT's trainer puts base_layer into the names of the weights that the adapter changes.
TEST_F(PackedLlamaTest, IsMergedWithTheAdapterNextToIt) {
  TensorValues trained;
  for (const auto& [name, value] : load_checkpoint(source_)) {
    std::string key = "base_model.model." + name;
    for (const std::string module : {".q_proj.", ".down_proj."})
      if (const std::size_t at = key.find(module); at != std::string::npos)
        key.insert(at + module.size(), "base_layer.");
    trained[key] = value;
  }
  for (const auto& [name, value] : load_checkpoint(test_data("quantized/llama.adapter")))
    trained[std::string(name).replace(name.rfind(".weight"), 0, ".default")] = value;
  write_dcp(trained, dir_ / "source", Mesh({{"dp_shard", 2}}));
  fs::copy_file(source_ + "/config.json", dir_ / "source/config.json");
  fs::copy_file(test_data("quantized/llama.adapter/adapter_config.json"), dir_ / "source/adapter_config.json");
  const CommandResult r = convert(dir_ / "source", "out", {"--to", "hf", "--dtype", "bfloat16", "--merge-adapter"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(load_checkpoint(dir_ / "out"), load_checkpoint(test_data("quantized/llama.merged.safetensors")));
}

TEST_F(PackedLlamaTest, IsUnpackedByALoad) {
  ASSERT_EQ(convert(source_, "plain", {"--to", "hf", "--dtype", "bfloat16"}).exit_code, 0);
  const TensorValues plain = load_checkpoint(dir_ / "plain");
  LoadOptions options;
  options.run.threads = 2;
  options.run.memory = 16 << 20;
  options.typing.dtype = DType::kBFloat16;
  std::map<std::string, std::string> memory;
  const auto report = load(source_, options, [&](const LoadTensor& t) -> Result<Destination> {
    std::string& bytes = memory[t.name];
    bytes.resize(static_cast<std::size_t>(t.bytes()));
    return Destination{reinterpret_cast<std::byte*>(bytes.data()), std::nullopt};
  });
  ASSERT_TRUE(report) << report.error().message();
  ASSERT_EQ(memory.size(), plain.size());
  for (const auto& [name, bytes] : memory) EXPECT_TRUE(bytes == plain.at(name).bytes) << name;
}

TEST_F(PackedLlamaTest, IsNotHalfUnpacked) {
  const CommandResult r = convert(source_, "out", {"--to", "hf", "--dtype", "bfloat16", "--keep-dtype", "*q_proj*"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, HasSubstr("would stay packed"));
}

// A quant_state is JSON from an untrusted file.
TEST_F(PackedLlamaTest, RefusesAQuantStateThatIsWrong) {
  const std::string weight = "model.layers.0.self_attn.q_proj.weight", name = weight + ".quant_state.bitsandbytes__nf4";
  const TensorValues stored = load_checkpoint(source_);
  const auto state = [](const std::string& changed) {
    return R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64], "nested_blocksize": 256,
               "nested_dtype": "float32", "nested_offset": 0.01)" +
           changed + "}";
  };
  const auto with = [&](const std::string& member, const std::string& value) {
    std::string text = state("");
    const std::size_t at = text.find("\"" + member + "\": ") + member.size() + 4;
    const std::size_t end = text[at] == '[' ? text.find(']', at) + 1 : text.find_first_of(",}", at);
    return text.replace(at, end - at, value);
  };
  const std::vector<std::string> wrong = {"",
                                          "{",
                                          "[]",
                                          "{}",
                                          "\xff\xfe",
                                          with("shape", "[64, 65]"),
                                          with("shape", "[-64, -64]"),
                                          with("shape", "[4611686018427387904, 4]"),
                                          with("shape", "[1, 1, 1, 1, 1, 1, 1, 64, 64]"),
                                          with("shape", "null"),
                                          with("shape", "[\"64\", 64]"),
                                          with("blocksize", "0"),
                                          with("blocksize", "-64"),
                                          with("blocksize", "63"),
                                          with("blocksize", "128"),
                                          with("quant_type", "\"nf5\""),
                                          with("dtype", "\"int8\""),
                                          with("dtype", "1"),
                                          with("nested_blocksize", "0"),
                                          with("nested_blocksize", "1"),
                                          with("nested_offset", "\"0\"")};
  for (std::size_t i = 0; i < wrong.size(); i += static_cast<std::size_t>(every_nth(4))) {
    TensorValues changed = stored;
    changed[name] = {DType::kUint8, {std::ssize(wrong[i])}, wrong[i]};
    const std::string source = dir_ / ("source" + std::to_string(i));
    write_dcp(changed, source, Mesh());
    fs::copy_file(source_ + "/config.json", source + "/config.json");
    const CommandResult r = convert(source, "out", {"--to", "hf", "--dtype", "bfloat16"});
    EXPECT_EQ(r.exit_code, 3) << wrong[i] << ": " << r.err;
    EXPECT_THAT(r.err, HasSubstr(weight)) << wrong[i];
  }
}

}  // namespace
}  // namespace reshard::unpacking_test
