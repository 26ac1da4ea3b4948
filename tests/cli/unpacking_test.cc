// Packed weights (bitsandbytes, GPTQ, AWQ, compressed-tensors, NVFP4) made plain by --dtype. tests/data/quantized has
// what the libraries wrote and what they unpack it to (make.py there).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "formats/load.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard {
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

class UnpackingTest : public testing::TestWithParam<std::string> {
 protected:
  std::string source() const { return test_data("quantized/" + GetParam()); }
  TensorValues expected(const std::string& dtype) const {
    TensorValues out;
    for (auto& [name, value] : load_checkpoint(source() + kExpected))
      if (name.ends_with(":" + dtype)) out.emplace(name.substr(0, name.find(':')), value);
    return out;
  }

  const TempDir dir_;
};

INSTANTIATE_TEST_SUITE_P(Libraries, UnpackingTest, testing::ValuesIn(cases()),
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

// Whatever one tensor of a weight is replaced by, the answer is an error that names one of its tensors, or numbers.
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
      const CommandResult r = reshard_cli(command(source, source + ".out", "float32"));
      EXPECT_THAT(r.exit_code, testing::AnyOf(0, 3, 4)) << name << " " << i << ": " << r.err;
      if (r.exit_code != 0) {
        EXPECT_THAT(r.err, HasSubstr("layers.0.proj.")) << name << " " << i;
      }
    }
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

// As PEFT's trainer has it: base_layer in the names of the weights that the adapter changes.
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

// A quant_state is JSON that a stranger wrote.
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
  for (std::size_t i = 0; i < wrong.size(); ++i) {
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
}  // namespace reshard
