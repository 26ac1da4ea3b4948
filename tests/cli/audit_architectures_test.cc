// Tests models that transformers has and no family describes: verify compares every name and shape with the table made
// from transformers (lib/model/architecture.h). transformers built the models with other configs than those of the
// table (tests/data/architectures.jsonl, made by samples/families/generate.py samples; the last two have fewer
// layers than their kinds repeat after, and a list of attention layers). The files have their full length without
// data.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/layout/box.h"
#include "lib/model/architecture.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::audit_architectures_test {
namespace {

using testing::AnyOf;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

using Shapes = std::map<std::string, Dims>;

struct Sample {
  std::string title, config;
  Shapes shapes;
};

void PrintTo(const Sample& s, std::ostream* out) { *out << s.title; }

std::vector<Sample> samples() {
  std::vector<Sample> out;
  const std::string text = read_file(test_data("architectures.jsonl"));
  for (const std::string& line : split(text, '\n')) {
    const auto json = parse_json(line, "architectures.jsonl");
    if (!json) continue;
    Sample s{std::string(*json->get_string("class")), to_text(*json->find("config")), {}};
    const auto files = json->find("files")->as_object();
    for (const Json::Member& file : *files) {
      const auto sizes = file.value.as_array();
      Dims shape;
      for (const Json& size : *sizes) shape.push_back(*size.as_index());
      s.shapes[file.key] = shape;
    }
    out.push_back(std::move(s));
  }
  return out;
}

// Writes a safetensors file with tensors of these shapes: a header, and a hole instead of data.
void write_model(const TempDir& dir, const Shapes& shapes) {
  Json header = Json::object();
  Index end = 0;
  for (const auto& [name, shape] : shapes) {
    Json dims = Json::array();
    for (const Index size : shape) dims.push_back(size);
    const Index begin = std::exchange(end, end + 2 * volume(shape));
    header.set(name, Json::object()
                         .set("dtype", "BF16")
                         .set("shape", std::move(dims))
                         .set("data_offsets", Json::array().push_back(begin).push_back(end)));
  }
  std::string text = to_text(header), length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i));
  const std::string path = dir.write("m/model.safetensors", length + text);
  std::filesystem::resize_file(path, 8 + text.size() + static_cast<std::size_t>(end));
}

struct Verified {
  int exit_code = 0;
  std::vector<std::string> ids;
  std::string row, text;
};

Verified verify(const Shapes& shapes, const std::string& config) {
  const TempDir dir;
  write_model(dir, shapes);
  const std::string path = dir.write("m/config.json", config);
  const CommandResult r = reshard_cli({"verify", dir / "m", "--config", path, "--json"});
  Verified out{r.exit_code, {}, "", r.out + r.err};
  const auto json = parse_json(r.out, "verify");
  if (!json) return out;
  const auto findings = json->find("findings")->as_array();
  for (const Json& f : *findings) out.ids.emplace_back(*f.get_string("id"));
  out.row = std::string(*json->find("facts")->get_string("config"));
  return out;
}

// Returns the name of the largest matrix with two unequal dimensions inside a numbered module.
std::string a_matrix(const Shapes& shapes) {
  std::string best;
  for (const auto& [name, shape] : shapes)
    if (shape.rank() == 2 && shape[0] != shape[1] && shape[0] % 2 == 0 && name.find(".0.") != std::string::npos &&
        (best.empty() || volume(shape) > volume(shapes.at(best))))
      best = name;
  return best;
}

class Architectures : public testing::TestWithParam<Sample> {};

TEST_P(Architectures, AHealthyModelHasNoFinding) {
  const Sample& s = GetParam();
  const Verified v = verify(s.shapes, s.config);
  EXPECT_EQ(v.exit_code, 0) << v.text;
  EXPECT_THAT(v.row, HasSubstr(s.title + " of transformers"));
  EXPECT_THAT(v.row, Not(HasSubstr("not checked")));
}

TEST_P(Architectures, DamageIsFound) {
  const Sample& s = GetParam();
  const std::string name = a_matrix(s.shapes);
  Shapes cut = s.shapes, turned = s.shapes, less = s.shapes;
  if (!name.empty()) {
    cut[name][0] /= 2;
    EXPECT_THAT(verify(cut, s.config).ids, Contains("shape-part")) << name;
    std::swap(turned[name][0], turned[name][1]);
    EXPECT_THAT(verify(turned, s.config).ids, Contains("shape-transposed")) << name;
  }
  const std::string lost = name.empty() ? s.shapes.begin()->first : name;
  less.erase(lost);
  EXPECT_THAT(verify(less, s.config).ids, Contains(HasSubstr("missing-"))) << lost;
}

std::string title(const testing::TestParamInfo<Sample>& param) { return param.param.title; }
INSTANTIATE_TEST_SUITE_P(OfTransformers, Architectures, testing::ValuesIn(sampled(samples(), 4)), title);

const Sample& sample_of(const std::string& name) {
  static const auto* const all = new std::vector<Sample>(samples());
  return *std::find_if(all->begin(), all->end(), [&](const Sample& s) { return s.title == name; });
}

// Returns the shapes without the module of the highest number in a list of modules.
Shapes without_last(const Shapes& shapes, const std::string& list) {
  Index last = 0;
  for (const auto& [name, shape] : shapes)
    if (name.starts_with(list)) last = std::max(last, *parse_number(split(name.substr(list.size()), '.')[0]));
  Shapes out = shapes;
  std::erase_if(out, [&](const auto& tensor) { return tensor.first.starts_with(list + std::to_string(last) + "."); });
  EXPECT_LT(out.size(), shapes.size()) << list;
  return out;
}

TEST(Stages, ALayerLessIsFoundInEach) {
  for (const auto& [title, lists] : std::map<std::string, std::vector<std::string>>{
           {"ConvNextModel", {"encoder.stages.0.layers.", "encoder.stages.2.layers.", "encoder.stages.3.layers."}},
           {"SwinModel", {"encoder.layers.0.blocks.", "encoder.layers.2.blocks.", "encoder.layers.3.blocks."}},
           {"RegNetModel", {"encoder.stages.0.layers.", "encoder.stages.2.layers."}},
           {"LevitModel", {"encoder.stages.0.layers.", "encoder.stages.1.layers.", "encoder.stages.2.layers."}},
           {"FalconH1ForCausalLM", {"model.layers."}}})
    for (const std::string& list : lists) {
      const Sample& s = sample_of(title);
      EXPECT_THAT(verify(without_last(s.shapes, list), s.config).ids, Contains(HasSubstr("missing"))) << list;
    }
}

// Without the layer that has a bias more, the names are also those of GPT-NeoX without "gpt_neox.".
TEST(Stages, AreCountedInAModelWhoseOtherNamesAreAFamilys) {
  Shapes shapes = {{"embed_in.weight", {512, 64}}, {"final_layer_norm.bias", {64}}, {"final_layer_norm.weight", {64}}};
  for (const auto& [name, shape] : Shapes{{"attention.dense.weight", {64, 64}},
                                          {"attention.query_key_value.weight", {192, 64}},
                                          {"input_layernorm.bias", {64}},
                                          {"input_layernorm.weight", {64}},
                                          {"mlp.dense_4h_to_h.weight", {64, 256}},
                                          {"mlp.dense_h_to_4h.weight", {256, 64}},
                                          {"post_attention_layernorm.bias", {64}},
                                          {"post_attention_layernorm.weight", {64}}})
    shapes["layers.0." + name] = shape;
  const Verified v = verify(shapes, R"({"model_type": "gpt_neox_japanese", "architectures": ["GPTNeoXJapaneseModel"],
      "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})");
  EXPECT_THAT(v.row, Not(HasSubstr("not checked")));
  EXPECT_THAT(v.ids, Contains(HasSubstr("missing")));
}

// Every class is found, and a config with only defaults gives every shape of nearly all classes.
TEST(ArchitectureTable, IsReadWhole) {
  EXPECT_LT(compressed_architectures().frame.size(), std::size_t{1} << 20);
  Index classes = 0, whole = 0;
  for (const std::string& line : split(builtin_architectures(), '\n')) {
    if (line.empty()) continue;
    const auto json = parse_json(line, "architectures.jsonl");
    ASSERT_TRUE(json) << json.error().message();
    const auto names = json->get_array("classes");
    for (const Json& name : *names) {
      const auto found = find_architecture(*json->get_string("type"), *name.as_string());
      ASSERT_TRUE(found) << *name.as_string();
      const auto model = parameters_of(*found, Json::object());
      ASSERT_TRUE(model) << model.error().message();
      whole += model->not_derived == 0;
      EXPECT_FALSE(model->parameters.empty()) << found->name;
      ++classes;
    }
  }
  EXPECT_GT(classes, 200);
  EXPECT_GT(4 * whole, 3 * classes);
}

// Returns the config with one member replaced.
std::string with(const std::string& config, const std::string& member, Json value) {
  return to_text(parse_json(config, "config.json")->set(member, std::move(value)));
}

// A rank's part is smaller in one dimension. A kernel of another size differs in two.
TEST(Explanations, ATensorThatIsSmallerInTwoDimensionsIsNoRanksPart) {
  const Sample& vit = sample_of("ViTModel");
  Shapes shapes = vit.shapes;
  Dims& kernel = shapes.at("embeddings.patch_embeddings.projection.weight");
  kernel[2] /= 2;
  kernel[3] /= 2;
  const Verified v = verify(shapes, vit.config);
  EXPECT_THAT(v.ids, Contains("shape-other"));
  EXPECT_THAT(v.text, Not(HasSubstr("tensor-parallel")));
}

// The table's formulas apply "^" to the product before, and have alternatives for members that a config lacks.
TEST(Explanations, ShowTheFormulaThatWasUsedInUsualNotation) {
  const Sample& vit = sample_of("ViTModel");
  Shapes shapes = vit.shapes;
  ++shapes.at("embeddings.position_embeddings")[1];
  EXPECT_THAT(verify(shapes, vit.config).text, HasSubstr("dim 1: (image_size/patch_size)^2+1 = "));
  const Sample& deberta = sample_of("DebertaV2Model");
  shapes = deberta.shapes;
  ++shapes.at("embeddings.word_embeddings.weight")[1];
  const std::string text = verify(shapes, deberta.config).text;
  EXPECT_THAT(text, HasSubstr("dim 1: hidden_size = "));
}

// The table is derived with the default type of each part: BLIP-2's text model may be OPT or T5.
TEST(FixedMembers, APartOfAnotherTypeIsSaid) {
  const Shapes shapes = {{"query_tokens", {1, 32, 768}},
                         {"language_model.encoder.block.0.layer.0.SelfAttention.q.weight", {64, 64}}};
  const Verified v = verify(shapes, R"({"model_type": "blip-2", "architectures": ["Blip2ForConditionalGeneration"],
                                        "text_config": {"model_type": "t5", "d_model": 64}})");
  EXPECT_THAT(v.row, HasSubstr("text_config.model_type is not \"opt\""));
  EXPECT_THAT(v.ids, Not(Contains(HasSubstr("missing"))));
}

// The table holds for the default number of stages, and for no layers that are named in a list.
TEST(FixedMembers, AListOfAnotherLengthIsSaid) {
  const Shapes swin = {{"swin.encoder.layers.0.blocks.0.attention.self.relative_position_bias_table", {529, 4}},
                       {"swin.layernorm.bias", {512}}};
  const std::string swin_config = R"({"model_type": "swin", "architectures": ["SwinForImageClassification"],
      "embed_dim": 128, "depths": [2, 2, 18], "num_heads": [4, 8, 16, 32], "window_size": 12, "num_labels": 2})";
  const Verified v = verify(swin, swin_config);
  EXPECT_THAT(v.row, HasSubstr("depths has not 4 entries"));
  EXPECT_THAT(v.ids, Not(Contains(HasSubstr("shape"))));
  EXPECT_THAT(v.ids, Not(Contains(HasSubstr("missing"))));
  const Shapes text = {{"embed_tokens.weight", {151936, 2048}}};
  const std::string config = R"({"model_type": "qwen3_vl_moe_text", "architectures": ["Qwen3VLMoeTextModel"],
      "hidden_size": 2048, "mlp_only_layers": [1]})";
  EXPECT_THAT(verify(text, config).row, HasSubstr("mlp_only_layers has not 0 entries"));
}

TEST(FixedMembers, AFixedMemberOfAnotherValueIsSaid) {
  const Sample& audio = sample_of("Wav2Vec2Model");
  const Verified v = verify(audio.shapes, with(audio.config, "num_feat_extract_layers", 8));
  EXPECT_THAT(v.row, HasSubstr("not checked: other names and shapes, as num_feat_extract_layers is not 7"));
  EXPECT_THAT(v.ids, IsEmpty());
}

// The table gives no sizes for such a config, but its names are the class's.
TEST(FixedMembers, TheNamesOfTheClassAreConverted) {
  const Sample& audio = sample_of("Wav2Vec2Model");
  const TempDir dir;
  const std::string config = dir.write("config.json", audio.config), made = dir / "dcp";
  ASSERT_EQ(reshard_cli({"synth", made, "--config", config, "--to", "dcp", "--headers-only"}).exit_code, 0);
  dir.write("config.json", with(with(audio.config, "num_feat_extract_layers", 8), "hidden_size", 1));
  const CommandResult whole = reshard_cli({"plan", made, "--to", "hf", "--config", config});
  EXPECT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_THAT(whole.out, HasSubstr("as num_feat_extract_layers is not 7"));
  const CommandResult other = reshard_cli({"plan", made, "--to", "hf", "--config", config, "--rename=encoder=decoder"});
  EXPECT_EQ(other.exit_code, 4) << other.out << other.err;
}

// A class that is not in the table is compared with the rows that its type's classes share; none of them is required.
TEST(OtherClasses, AClassWithoutALineIsComparedByItsType) {
  const Sample& bert = sample_of("BertModel");
  const std::string config = with(bert.config, "architectures", Json::array().push_back("BertForSomethingElse"));
  Shapes shapes = bert.shapes;
  shapes["something.weight"] = {3, 5};
  shapes.erase("pooler.dense.bias");
  EXPECT_THAT(verify(shapes, config).ids, IsEmpty());
  const std::string name = a_matrix(shapes);
  std::swap(shapes[name][0], shapes[name][1]);
  EXPECT_THAT(verify(shapes, config).ids, Contains("shape-transposed"));
}

// The number of labels follows from id2label, num_labels or the default of two.
TEST(Labels, AreCounted) {
  const Sample& vit = sample_of("ViTForImageClassification");
  Shapes shapes = vit.shapes;
  shapes["classifier.weight"][0] = shapes["classifier.bias"][0] = 3;
  EXPECT_THAT(verify(shapes, vit.config).ids, Contains("shape-other"));
  Json labels = Json::object();
  labels.set("0", "cat").set("1", "dog").set("2", "owl");
  EXPECT_THAT(verify(shapes, with(vit.config, "id2label", std::move(labels))).ids, IsEmpty());
}

// `check` and `synth` use the class of a model that no family describes.
TEST(ClassFamily, ModelsWithoutAFamilyAreMadeAndChecked) {
  const TempDir dir;
  for (const std::string name : {"BertModel", "T5Model", "MambaForCausalLM"}) {
    const std::string config = dir.write(name + "/config.json", sample_of(name).config);
    EXPECT_EQ(
        reshard_cli({"synth", dir / ("of-" + name), "--config", config, "--to", "hf", "--headers-only"}).exit_code, 0);
    EXPECT_EQ(reshard_cli({"verify", dir / ("of-" + name), "--config", config}).exit_code, 0) << name;
    EXPECT_EQ(reshard_cli({"check", "--config", config, "--mesh", "dp_replicate=2"}).exit_code, 0) << name;
  }
  const CommandResult cut = reshard_cli({"check", "--config", dir / "BertModel/config.json", "--mesh", "tp=2"});
  EXPECT_EQ(cut.exit_code, 4);
  EXPECT_THAT(cut.err, HasSubstr("no family describes how tp=2 cuts a BertModel; use dp_shard, dp_replicate or cp"));
}

// A model whose table lists exactly its tensors is a model's to `convert`, whatever its config calls its numbers.
TEST(ClassFamily, ModelsOfATableAreConverted) {
  const TempDir dir;
  const std::vector<Sample> all = samples();
  std::size_t tried = 0, converted = 0;
  for (std::size_t i = 0; i < all.size(); i += soak_is_asked() ? 1 : 5, ++tried) {
    const Sample& s = all[i];
    const std::string config = dir.write(s.title + "/config.json", s.config), made = dir / (s.title + "/dcp");
    const CommandResult synth = reshard_cli({"synth", made, "--config", config, "--to", "dcp", "--headers-only"});
    if (synth.exit_code == 4) {
      EXPECT_THAT(synth.err, AnyOf(HasSubstr("no formula gives the shape"), HasSubstr("is a scalar"))) << s.title;
      continue;
    }
    ASSERT_EQ(synth.exit_code, 0) << synth.err;
    ++converted;
    const CommandResult plan = reshard_cli({"plan", made, "--to", "hf", "--config", config});
    EXPECT_EQ(plan.exit_code, 0) << s.title << plan.err;
  }
  EXPECT_GT(2 * converted, tried);
}

}  // namespace
}  // namespace reshard::audit_architectures_test
