// Tests which parameters stay in float32 when a model becomes bfloat16 or float16: those that transformers keeps when
// it loads and saves the model (tests/data/kept_float32.json, by samples/families/generate.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::kept_float32_test {
namespace {

using testing::HasSubstr;

using Names = std::set<std::string>;

Names float32_names(const std::string& checkpoint) {
  Names out;
  for (const auto& [name, value] : load_checkpoint(checkpoint))
    if (value.dtype == DType::kFloat32) out.insert(name);
  return out;
}

// Makes `dir`/model, a tiny model of tests/data/families as float32 files.
void make_model(const TempDir& dir, const std::string& family_sample, const std::string& dtype = "float32") {
  const Json sample = *parse_json(read_file(test_data("families/" + family_sample + ".json")), family_sample);
  Json config = *sample.find("config");
  config.set("dtype", "bfloat16");
  dir.write("config.json", to_text(config));
  const CommandResult r = reshard_cli(
      {"synth", dir / "model", "--config", dir / "config.json", "--to", "hf", "--dtype", dtype, "--force", "-q"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
}

Names kept_names(const std::string& sample, const std::string& dtype) {
  Names out;
  const Json json = *parse_json(read_file(test_data("kept_float32.json")), "kept");
  for (const auto names = json.find(sample)->get_array(dtype); const Json& name : *names)
    out.emplace(*name.as_string());
  return out;
}

// tests/lib/model/transformers_test.cc has the tables of all families.
TEST(KeptFloat32, IsWhatTransformersKeepsOfAFamily) {
  for (const std::string sample : sampled({"afmoe", "ernie4_5_moe", "hy_v3"}, 3)) {
    SCOPED_TRACE(sample);
    const TempDir dir;
    make_model(dir, sample);
    for (const std::string dtype : {"bfloat16", "float16"}) {
      const CommandResult r = reshard_cli({"convert", dir / "model", dir / dtype, "--to", "hf", "--dtype", dtype});
      ASSERT_EQ(r.exit_code, 0) << r.err;
      EXPECT_EQ(float32_names(dir / dtype), kept_names(sample, dtype)) << dtype;
    }
    for (const std::string model : {"float16", "model"}) {  // a model in float32 only is not mixed
      const CommandResult verified =
          reshard_cli({"verify", dir / model, "--config",
                       dir / (model == "model" ? "config.json" : model + "/config.json"), "--fail-on", "warning"});
      EXPECT_EQ(verified.exit_code, 0) << verified.out;
    }
  }
}

// Holds for every command that decides a dtype and every stored dtype.
TEST(KeptFloat32, IsTheSameWhicheverCommandDecidesTheDtype) {
  const TempDir dir;
  make_model(dir, "deepseek_v3");
  const Names wanted = {"model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.gate.weight"};
  const std::string model = dir / "model", config = dir / "config.json", narrow = dir / "narrow";
  const auto run = [&](const std::vector<std::string>& args) {
    const CommandResult r = reshard_cli(args);
    EXPECT_EQ(r.exit_code, 0) << r.err;
    return r.out + r.err;
  };
  EXPECT_THAT(
      run({"convert", model, dir / "dcp", "--to", "dcp", "--mesh", "dp_shard=2", "--dtype", "bfloat16"}),
      HasSubstr("2 tensors ('model.layers.1.mlp.gate.e_score_correction_bias', 'model.layers.1.mlp.gate.weight') "
                "keep their own dtype"));
  EXPECT_EQ(float32_names(dir / "dcp"), wanted);
  run({"convert", model, dir / "titan", "--to", "dcp", "--names", "torchtitan", "--dtype", "bfloat16"});
  EXPECT_EQ(float32_names(dir / "titan"), (Names{"layers.1.moe.expert_bias", "layers.1.moe.router.gate.weight"}));
  run({"merge", model, dir / "dcp", dir / "mean", "--average", "--to", "hf", "--dtype", "bfloat16", "--config",
       config});
  EXPECT_EQ(float32_names(dir / "mean"), wanted);
  run({"convert", model, dir / "none", "--to", "hf", "--family", "none", "--dtype", "bfloat16"});
  EXPECT_EQ(float32_names(dir / "none"), wanted);
  run({"synth", dir / "made", "--config", config, "--to", "hf", "--dtype", "bfloat16"});
  EXPECT_EQ(float32_names(dir / "made"), wanted);

  // A gate that was stored in bfloat16 also becomes float32 when transformers loads it.
  run({"convert", model, narrow, "--to", "hf", "--family", "none", "--config",
       dir.write("other.json", "{\"model_type\": \"llama\"}"), "--dtype", "bfloat16"});
  EXPECT_EQ(float32_names(narrow), Names());
  for (const std::string dtype : {"bfloat16", "float16"}) {
    run({"convert", narrow, dir / ("of_narrow_" + dtype), "--to", "hf", "--config", config, "--dtype", dtype});
    EXPECT_EQ(float32_names(dir / ("of_narrow_" + dtype)), wanted);
  }
  run({"convert", model, dir / "kept", "--to", "hf", "--dtype", "bfloat16", "--keep-dtype", "*norm*"});
  EXPECT_EQ(float32_names(dir / "kept").count("model.norm.weight"), 1u);
  const Json checked = *parse_json(
      run({"check", "--config", config, "--mesh", "dp_shard=1", "--dtype", "float16", "--tensors", "--json"}), "check");
  Names in_memory;
  for (const auto tensors = checked.get_array("tensors"); const Json& t : *tensors)
    if (*t.get_string("dtype") == "float32") in_memory.emplace(*t.get_string("name"));
  EXPECT_EQ(in_memory, wanted);
}

// Models that no family describes, under the names in their files.
TEST(KeptFloat32, IsKnownOfModelsOfNoFamily) {
  struct Case {
    std::string model_type, dtype, name;
    bool is_kept;
  };
  for (const Case& c : {Case{"t5", "float16", "encoder.block.0.layer.1.DenseReluDense.wo.weight", true},
                        Case{"t5", "bfloat16", "encoder.block.0.layer.1.DenseReluDense.wo.weight", false},
                        Case{"sarvam_moe", "bfloat16", "model.layers.1.mlp.gate.weight", true},
                        Case{"zamba", "bfloat16", "model.layers.0.mamba.A_log", true},
                        Case{"notamodel", "bfloat16", "model.layers.1.mlp.gate.weight", false}}) {
    SCOPED_TRACE(c.model_type + " " + c.dtype);
    const TempDir dir;
    write_dcp({{c.name, {DType::kFloat32, {2, 4}, std::string(32, '\x3f')}},
               {"shared.weight", {DType::kFloat32, {2, 4}, std::string(32, '\x3e')}}},
              dir / "ck", Mesh());
    dir.write("ck/config.json", R"({"model_type": ")" + c.model_type + R"(", "dtype": "bfloat16"})");
    const CommandResult r =
        reshard_cli({"convert", dir / "ck", dir / "out", "--to", "bin", "--family", "none", "--dtype", c.dtype});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(float32_names(dir / "out"), c.is_kept ? Names{c.name} : Names());
    const bool is_unknown = c.model_type == "notamodel";
    EXPECT_EQ((r.out + r.err).find("has no model_type 'notamodel'") != std::string::npos, is_unknown);
  }
}

}  // namespace
}  // namespace reshard::kept_float32_test
