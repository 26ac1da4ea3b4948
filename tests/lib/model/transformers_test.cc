// Compares families' tables with transformers' tiny models (tests/data/families, by tests/interop/make_families.py):
// names and shapes in the files of save_pretrained and in memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/model/architecture.h"
#include "lib/model/packing.h"
#include "lib/model/parameters.h"
#include "lib/model/parts.h"
#include "lib/model/shapes.h"
#include "lib/model/view.h"

namespace reshard::transformers_test {
namespace {

using Shapes = std::map<std::string, Dims>;

struct Sample {
  std::string name;
  ModelConfig config;
  Shapes files, memory;
};

Shapes shapes_of(const Json& json) {
  Shapes out;
  const auto members = json.as_object();
  for (const Json::Member& m : *members) {
    Dims shape;
    const auto sizes = m.value.as_array();
    for (const Json& n : *sizes) shape.push_back(*n.as_index());
    out.emplace(m.key, shape);
  }
  return out;
}

Sample read_sample(const std::string& path) {
  const auto text = read_whole_file(path, Index{1} << 20);
  EXPECT_TRUE(text) << path;
  const auto json = parse_json(*text, path);
  EXPECT_TRUE(json) << path;
  auto config = ModelConfig::parse(*json->find("config"), path);
  EXPECT_TRUE(config) << config.error().message();
  Sample out{std::filesystem::path(path).stem().string(), *config, shapes_of(*json->find("files")), {}};
  out.memory = json->contains("memory") ? shapes_of(*json->find("memory")) : out.files;
  return out;
}

std::vector<Sample> samples() {
  std::vector<Sample> out;
  for (const auto& file : std::filesystem::directory_iterator(std::string(RESHARD_TEST_DATA) + "/families"))
    out.push_back(read_sample(file.path().string()));
  return out;
}

Catalog catalog_of(const Shapes& shapes) {
  Catalog catalog;
  for (const auto& [name, shape] : shapes) {
    Tensor tensor;
    tensor.name = name;
    tensor.shape = shape;
    EXPECT_TRUE(catalog.add(std::move(tensor)));
  }
  return catalog;
}

Shapes shapes_of(const Catalog& catalog) {
  Shapes out;
  for (const Tensor& t : catalog.tensors()) out.emplace(t.name, t.shape);
  return out;
}

// The classes of a model_type that have a language model's head, in the table that is derived from transformers.
std::vector<Architecture> classes_with_head(std::string_view model_type) {
  std::vector<Architecture> out;
  const std::string start = "{\"type\":\"" + std::string(model_type) + "\",";
  for (const std::string& line : split(builtin_architectures(), '\n')) {
    if (!line.starts_with(start)) continue;
    const auto json = parse_json(line, "architectures.jsonl");
    const auto names = json->get_array("classes");
    for (const Json& name : *names)
      for (const char* end : {"ForCausalLM", "LMHeadModel", "ForConditionalGeneration"})
        if (name.as_string()->ends_with(end)) out.push_back(*find_architecture(model_type, *name.as_string()));
  }
  return out;
}

// Two descriptions of one model, made by hand and derived, must not drift apart: both are compared with the same files.
TEST(Transformers, FilesAreThoseOfTheDerivedClassesToo) {
  Index compared = 0;
  for (const Sample& sample : samples())
    for (const Architecture& architecture : classes_with_head(sample.config.model_type)) {
      const auto model = parameters_of(architecture, sample.config.file);
      if (!model) continue;  // a member for which only other values were tried
      ++compared;
      std::map<std::string, const ArchitectureParameter*> known;
      for (const ArchitectureParameter& p : model->parameters) {
        if (p.row->stands_in == NameScope::kMemory || p.row->stands_in == NameScope::kMemoryTied) continue;
        const std::string name = (p.row->is_base && architecture.has_prefix ? architecture.prefix : "") + p.name;
        known.emplace(name, &p);
        EXPECT_TRUE(!p.is_required || sample.files.contains(name)) << sample.name << " " << name;
      }
      for (const auto& [name, shape] : sample.files) {
        const auto found = known.find(name);
        ASSERT_NE(found, known.end()) << sample.name << " " << name;
        const Dims& expected = found->second->shape;
        ASSERT_EQ(shape.rank(), expected.rank()) << sample.name << " " << name;
        for (int d = 0; d < shape.rank(); ++d)
          EXPECT_TRUE(expected[d] == kAnySize || expected[d] == shape[d]) << sample.name << " " << name;
      }
    }
  EXPECT_GE(compared, 1);
}

TEST(Transformers, NoModuleIsTakenForAnAverage) {
  for (const Sample& sample : samples())
    for (const Shapes* shapes : {&sample.files, &sample.memory}) {
      Catalog catalog = catalog_of(*shapes);
      ASSERT_TRUE(find_parts(catalog)) << sample.name;
      for (const Part& part : catalog.parts) EXPECT_EQ(part.kind, StateKind::kModel) << sample.name << part.prefix;
      EXPECT_EQ(doubt_about_model(catalog), "") << sample.name;
    }
}

// Returns the shapes without the family's prefix and without a head that the config ties.
Shapes plain(const Shapes& shapes, const Family& family, const ModelConfig& config) {
  Shapes out;
  for (const auto& [name, shape] : shapes) {
    const std::string key = canonical_key(family, name);
    const auto parsed = parse_name(family, key);
    if (!parsed || parsed->rule->tied_to.empty() || !config.tie_word_embeddings()) out.emplace(key, shape);
  }
  return out;
}

TEST(Transformers, ShapesOfAModelAgreeWithEachOther) {
  for (const Sample& sample : samples()) {
    const Family* const family = family_of_model_type(sample.config.model_type, sample.config.text_model_type);
    ASSERT_TRUE(family) << sample.name;
    for (const Shapes& shapes : {sample.files, sample.memory}) {
      const Status agree = check_shapes_agree(*family, catalog_of(shapes));
      EXPECT_TRUE(agree) << sample.name << ": " << agree.error().message();
    }
  }
}

TEST(Transformers, FilesAreAsTheTablesSay) {
  for (const Sample& sample : samples()) {
    SCOPED_TRACE(sample.name);
    const Family* family = family_of_model_type(sample.config.model_type, sample.config.text_model_type);
    ASSERT_TRUE(family);
    const auto list = parameters(*family, sample.config);
    ASSERT_TRUE(list) << list.error().message();
    Shapes expected;
    for (const Parameter& p : *list)
      if (!p.is_tied) expected.emplace(p.name, p.shape);
    Shapes files = plain(sample.files, *family, sample.config);
    std::erase_if(files, [&](const auto& tensor) { return family->carries(tensor.first); });
    EXPECT_EQ(files, expected);
  }
}

// tests/data/kept_float32.json lists the tensors that save_pretrained writes in float32 for a model loaded in a
// narrower dtype.
TEST(Transformers, WhatStaysInFloat32IsWhatTheTablesSay) {
  const std::string path = std::string(RESHARD_TEST_DATA) + "/kept_float32.json";
  const Json kept = *parse_json(*read_whole_file(path, Index{1} << 20), path);
  for (Sample sample : samples()) {
    const Family& family = *family_of_model_type(sample.config.model_type, sample.config.text_model_type);
    for (const std::string dtype : {"bfloat16", "float16"}) {
      SCOPED_TRACE(sample.name + " " + dtype);
      std::set<std::string> wanted, got;
      if (const Json* names = kept.find(sample.name))
        for (const auto list = names->get_array(dtype); const Json& name : *list)
          if (const std::string key = canonical_key(family, *name.as_string()); !family.carries(key))
            wanted.insert(key);
      sample.config.dtype = dtype;
      const auto all = parameters(family, sample.config);
      ASSERT_TRUE(all) << all.error().message();
      for (const Parameter& p : *all)
        if (p.dtype == "float32") got.insert(p.name);
      EXPECT_EQ(got, wanted);
    }
  }
}

// The authors publish configs in forms that transformers rewrites when it saves a model.
TEST(Transformers, PublishedConfigsListTheirLayersOtherwise) {
  struct Published {
    std::string sample;
    std::vector<std::string> without;
    std::string with;
  };
  const auto names_of = [](const Json& json) {
    const auto config = ModelConfig::parse(json, "config.json");
    EXPECT_TRUE(config) << config.error().message();
    const auto all = parameters(*family_of_model_type(config->model_type), *config);
    EXPECT_TRUE(all) << all.error().message();
    Shapes out;
    for (const Parameter& p : *all) out.emplace(p.name, p.shape);
    return out;
  };
  for (const Published& p :
       {Published{
            "kimi_linear_biased",
            {"layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"},
            R"({"linear_attn_config": {"kda_layers": [2, 3], "full_attn_layers": [1], "head_dim": 6, "num_heads": 3,
                      "short_conv_kernel_size": 4}, "moe_layer_freq": [1, 1, 0]})"},
        Published{"mimo_v2_flash_biased_tied",
                  {"layer_types", "mlp_layer_types"},
                  R"({"hybrid_layer_pattern": [1, 0, 1], "moe_layer_freq": [1, 0, 1]})"},
        Published{
            "nemotron_h", {"layers_block_type"}, R"({"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4})"}}) {
    SCOPED_TRACE(p.sample);
    const std::string path = std::string(RESHARD_TEST_DATA) + "/families/" + p.sample + ".json";
    const Json sample = *parse_json(*read_whole_file(path, Index{1} << 20), path);
    const Json with = *parse_json(p.with, "with");
    Json published = Json::object();
    const auto members = sample.find("config")->as_object(), more = with.as_object();
    for (const Json::Member& m : *members)
      if (std::find(p.without.begin(), p.without.end(), m.key) == p.without.end()) published.set(m.key, m.value);
    for (const Json::Member& m : *more) published.set(m.key, m.value);
    EXPECT_EQ(names_of(published), names_of(*sample.find("config")));
  }
}

TEST(Transformers, WhatIsInMemoryIsWhatIsInFilesAndBack) {
  for (const Sample& sample : samples()) {
    SCOPED_TRACE(sample.name);
    const Family& family = *family_of_model_type(sample.config.model_type, sample.config.text_model_type);
    const Catalog stored = catalog_of(sample.memory);
    const auto view = canonical_view(stored, {&family, &sample.config, true, false, true}, nullptr);
    ASSERT_TRUE(view) << view.error().message();
    const Shapes files = plain(sample.files, family, sample.config);
    EXPECT_EQ(plain(shapes_of(*view), family, sample.config), files);

    std::vector<std::size_t> all(view->tensors().size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    const auto groups = pack(family, Convention::kTransformers, *view, all);
    ASSERT_TRUE(groups) << groups.error().message();
    Shapes memory;
    for (const PackedGroup& group : *groups) {
      std::vector<Dims> parts;
      for (const std::size_t part : group.parts) parts.push_back(view->tensors()[part].shape);
      memory.emplace(group.name, group.stored ? *packed_shape(*group.stored, parts, nullptr) : parts[0]);
    }
    EXPECT_EQ(plain(memory, family, sample.config), plain(sample.memory, family, sample.config));
  }
}

}  // namespace
}  // namespace reshard::transformers_test
