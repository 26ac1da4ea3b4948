// Tests that every command treats the tensors of a packed weight as one weight, in every packing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "formats/open.h"
#include "lib/convert/weights/packed_matrix.h"
#include "tests/support/checkpoints.h"
#include "tests/support/must.h"
#include "tests/support/packed_modules.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::packed_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Returns values that are finite in any dtype and differ between names.
TensorValue value_of(const std::string& name, DType dtype, const Dims& shape) {
  std::string bytes(static_cast<std::size_t>(volume(shape) * byte_size(dtype)), '\0');
  std::minstd_rand random(static_cast<unsigned>(std::hash<std::string>()(name)));
  for (char& byte : bytes) byte = static_cast<char>(random() % 61 + 1);
  return {dtype, shape, bytes};
}

// A model with one layer for each packing, and ordinary tensors around it. Float8 is not included, because --dtype
// applies its scales or refuses (block_scales_test.cc).
class PackedTest : public testing::Test {
 protected:
  PackedTest() {
    for (const PackedModule& module : packed_modules()) {
      if (module.packing == Packing::kFloat8) continue;
      modules_.push_back(module);
      const std::string prefix = module_name(modules_.size() - 1);
      for (const PackedModule::Part& part : module.parts) add(prefix + part.name, part.dtype, part.shape);
      add(prefix + "bias", DType::kFloat32, {64});
    }
    add("model.embed_tokens.weight", DType::kFloat32, {96, 64});
  }

  void add(const std::string& name, DType dtype, const Dims& shape) { values_[name] = value_of(name, dtype, shape); }
  static std::string module_name(std::size_t layer) {
    return "model.layers." + std::to_string(layer) + ".mlp.up_proj.";
  }
  static bool is_ordinary(const std::string& name) {
    return name.ends_with(".bias") || name.ends_with("tokens.weight");
  }

  CommandResult run(const std::string& command, std::vector<std::string> more, const std::string& wrapper = "") {
    const std::string source = dir_ / "source";
    std::filesystem::remove_all(source);
    std::filesystem::remove_all(std::string(dir_ / "out"));
    TensorValues wrapped;
    for (const auto& [name, value] : values_) wrapped[wrapper + name] = value;
    write_dcp(wrapped, source, Mesh({{"dp_shard", 2}}));
    std::vector<std::string> all = {command, source};
    if (command == "merge") all.push_back(source);
    if (command == "convert" || command == "merge") all.push_back(dir_ / "out");
    all.insert(all.end(), more.begin(), more.end());
    return reshard_cli(all);
  }

  const TempDir dir_;
  std::vector<PackedModule> modules_;
  TensorValues values_;
};

// Covers the packings that --dtype does not unpack (unpacking_test.cc has the others).
TEST_F(PackedTest, DtypeLeavesEveryTensorOfThemAlone) {
  for (std::size_t layer = 0; layer < modules_.size(); ++layer)
    if (can_unpack(modules_[layer].packing))
      for (const PackedModule::Part& part : modules_[layer].parts) values_.erase(module_name(layer) + part.name);
  struct Case {
    std::vector<std::string> options;
    std::string wrapper;
  };
  const std::vector<Case> cases = {{{"--to", "hf", "--family", "none"}, ""},
                                   {{"--to", "hf"}, ""},
                                   {{"--to", "dcp", "--mesh", "tp=2"}, ""},
                                   {{"--to", "hf"}, "module."}};
  for (const auto& [options, wrapper] : cases) {
    std::vector<std::string> all = {"--dtype", "bfloat16"};
    all.insert(all.end(), options.begin(), options.end());
    const CommandResult r = run("convert", all, wrapper);
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_THAT(r.out, AllOf(HasSubstr("1 as HQQ"), HasSubstr("--dtype does not apply to their tensors")));
    const TensorValues out = load_checkpoint(dir_ / "out");
    ASSERT_EQ(out.size(), values_.size());
    for (const auto& [name, value] : values_) {
      const auto found = out.find(name);
      ASSERT_NE(found, out.end()) << name;
      if (is_ordinary(name))
        EXPECT_EQ(found->second.dtype, DType::kBFloat16) << name;
      else
        EXPECT_EQ(found->second, value) << name;
    }
  }
}

// ModelOpt's pre_quant_scale multiplies the inputs of a weight, so the unpacked weight alone would be another one.
TEST_F(PackedTest, AreNotUnpackedNextToWhatIsNotUnderstood) {
  const std::vector<std::string> unknown = {"pre_quant_scale", "smooth_factor", "perm"};
  for (std::size_t layer = 0; layer < modules_.size(); ++layer) {
    if (!can_unpack(modules_[layer].packing)) continue;
    const std::string& beside = unknown[layer % unknown.size()];
    values_.clear();
    for (const PackedModule::Part& part : modules_[layer].parts)
      add(module_name(layer) + part.name, part.dtype, part.shape);
    add(module_name(layer) + beside, DType::kFloat32, {64});
    const CommandResult r = run("convert", {"--to", "hf", "--family", "none", "--dtype", "bfloat16"});
    EXPECT_EQ(r.exit_code, 4) << modules_[layer].title << r.out;
    EXPECT_THAT(r.err, AllOf(HasSubstr(beside), HasSubstr("next to a packed weight")));
  }
}

TEST_F(PackedTest, AreNotMerged) {
  for (std::vector<std::string> options : std::vector<std::vector<std::string>>{
           {"--average"}, {"--average", "--others-from", "s1"}, {"--expression", "s1 + 0.5*(s2 - s1)"}}) {
    options.insert(options.end(), {"--to", "hf", "--family", "none"});
    const CommandResult r = run("merge", options);
    EXPECT_EQ(r.exit_code, 4) << r.out;
    EXPECT_THAT(r.err, AllOf(HasSubstr("1 as GPTQ"), HasSubstr("packed values and scales cannot be merged")));
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
  }
  const CommandResult r = run("merge", {"--average", "--exclude", "*.mlp.up_proj.*", "--to", "hf", "--family", "none"});
  EXPECT_EQ(r.exit_code, 0) << r.err;  // the remaining tensors are ordinary ones
}

TEST_F(PackedTest, AreSelectedWholeOrNotAtAll) {
  const TensorValues all = values_;
  const auto step = static_cast<std::size_t>(every_nth(4));
  for (std::size_t layer = 0; layer < modules_.size(); layer += step) {
    values_ = {{"model.embed_tokens.weight", all.at("model.embed_tokens.weight")}};
    for (const auto& [name, value] : all)
      if (name.starts_with(module_name(layer))) values_[name] = value;
    const std::string last = module_name(layer) + modules_[layer].parts.back().name;
    CommandResult r = run("convert", {"--to", "hf", "--family", "none", "--exclude", last});
    EXPECT_EQ(r.exit_code, 2) << modules_[layer].title;
    EXPECT_THAT(r.err, AllOf(HasSubstr("it is unusable without tensor '" + last), HasSubstr("--include or --exclude")));
    r = run("convert", {"--to", "hf", "--family", "none", "--exclude", module_name(layer) + "*"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
  }
}

TEST_F(PackedTest, AreRenamedByModuleAlone) {
  const TensorValues all = values_;
  const auto step = static_cast<std::size_t>(every_nth(4));
  for (std::size_t layer = 0; layer < modules_.size(); layer += step) {
    values_ = {{"model.embed_tokens.weight", all.at("model.embed_tokens.weight")}};
    for (const auto& [name, value] : all)
      if (name.starts_with(module_name(layer))) values_[name] = value;
    const std::string& part = modules_[layer].parts.back().name;
    CommandResult r = run(
        "convert", {"--to", "hf", "--family", "none", "--rename", "up_proj." + part + "=up_proj." + part + "_of_mine"});
    EXPECT_EQ(r.exit_code, 2) << modules_[layer].title << r.out;
    EXPECT_THAT(r.err, HasSubstr("--rename separates the parts of '" + module_name(layer))) << modules_[layer].title;
    r = run("convert", {"--to", "hf", "--family", "none", "--rename", "up_proj=w1"});
    EXPECT_EQ(r.exit_code, 0) << modules_[layer].title << r.err;
  }
}

TEST_F(PackedTest, AreHeldWholeByEveryRank) {
  const CommandResult r = run("convert", {"--to", "dcp", "--mesh", "tp=2,dp_shard=2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const CommandResult checked = reshard_cli({"verify", dir_ / "out", "--mesh", "tp=2,dp_shard=2"});
  EXPECT_EQ(checked.exit_code, 0) << checked.out;
  const OpenCheckpoint out = must(open_checkpoint(dir_ / "out"));
  for (const Tensor& t : out.reader->catalog().tensors())
    if (!is_ordinary(t.name)) {
      EXPECT_EQ(t.fragments.size(), t.elements() > 0 ? 1U : 0U) << t.name;
    }
}

TEST_F(PackedTest, VerifyFindsNothingWrong) {
  const CommandResult r = run("verify", {});
  EXPECT_EQ(r.exit_code, 0) << r.out;
  EXPECT_THAT(r.out, AllOf(HasSubstr("1 as GPTQ, 1 as AWQ"), HasSubstr("0 errors, 0 warnings, 0 notes")));
}

TEST_F(PackedTest, VerifyFindsWhatIsMissing) {
  for (std::size_t layer = 0; layer < modules_.size(); ++layer)
    if (modules_[layer].title == "gptq") {
      values_.erase(module_name(layer) + "qzeros");
      const CommandResult r = run("verify", {});
      EXPECT_EQ(r.exit_code, 1) << r.out;
      EXPECT_THAT(r.out, AllOf(HasSubstr(module_name(layer) + "qzeros"), HasSubstr("is missing"),
                               HasSubstr("weight, packed as GPTQ, lacks")));
    }
}

TEST_F(PackedTest, VerifyFindsShapesThatDisagree) {
  for (std::size_t layer = 0; layer < modules_.size(); ++layer)
    if (modules_[layer].title == "gptq") {
      add(module_name(layer) + "scales", DType::kFloat16, {2, 32});
      const CommandResult r = run("verify", {});
      EXPECT_EQ(r.exit_code, 1) << r.out;
      EXPECT_THAT(r.out, HasSubstr("its shapes disagree: qweight [8, 64], qzeros [2, 8], scales [2, 32]"));
    }
}

TEST_F(PackedTest, InspectCountsThem) {
  EXPECT_THAT(run("inspect", {}).out, AllOf(HasSubstr("packed"), HasSubstr("as GPTQ"), HasSubstr(" stored elements ")));
  // Where shapes tell the size of the unpacked weights, those are the parameters.
  const auto parameters = [](const std::string& path) {
    const Json json = must(parse_json(reshard_cli({"inspect", path, "--json"}).out, path));
    const Json* const model = json.find("state")->find("model");
    return model->find("parameters")->is_null() ? std::nullopt : std::optional(must(model->get_index("parameters")));
  };
  constexpr std::string_view kExpected = ".expected.safetensors";
  Index known = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test_data("quantized"))) {
    const std::string path = entry.path().string();
    if (!std::filesystem::exists(path + std::string(kExpected))) continue;
    const auto count = parameters(path);
    // The expected file has the weights in three dtypes and lacks the norm's 8 elements.
    if (!count) continue;
    EXPECT_EQ(3 * (*count - 8), *parameters(path + std::string(kExpected))) << path;
    ++known;
  }
  EXPECT_GT(known, 20);
}

}  // namespace
}  // namespace reshard::packed_test
