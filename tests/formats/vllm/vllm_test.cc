#include "formats/vllm/vllm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::vllm_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Layers of a model with 4 query heads and 2 key-value heads of 2 rows each. Every row is filled with its number.
struct Model {
  LayoutRequest request;
  TensorValues values;
  explicit Model(int layers = 1) {
    request.heads = HeadCounts{4, 2};
    request.config = Json::object();
    add("model.embed_tokens.weight", {70, 2}, 0);
    for (int layer = 0; layer < layers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      add(prefix + "self_attn.q_proj.weight", {8, 2}, 100);
      add(prefix + "self_attn.k_proj.weight", {4, 2}, 120);
      add(prefix + "self_attn.v_proj.weight", {4, 2}, 140);
      add(prefix + "self_attn.o_proj.weight", {2, 8}, 160);
      add(prefix + "mlp.gate_proj.weight", {4, 2}, 180);
      add(prefix + "mlp.up_proj.weight", {4, 2}, 200);
      add(prefix + "input_layernorm.weight", {2}, 220 + layer);
    }
  }
  void add(const std::string& name, const Dims& shape, int first) {
    TensorValue v{DType::kInt16, shape, {}};
    const Index columns = shape.rank() > 1 ? shape[1] : 1;
    for (Index i = 0; i < volume(shape); ++i)
      v.bytes += {static_cast<char>(first + i / columns), static_cast<char>(i % columns)};
    values[name] = v;
    TargetTensor t;
    t.name = name;
    t.dtype = v.dtype;
    t.shape = shape;
    request.tensors.push_back(t);
  }
  std::string refusal() const {
    const auto target = kVllm013Format.lay_out(request);
    return target ? "accepted" : target.error().message();
  }
  // Writes the model for tp workers and returns the tensors of a worker's file.
  TensorValues worker(const TempDir& dir, Index tp, Index rank) {
    request.mesh = Mesh({{"tp", tp}});
    const auto target = kVllm013Format.lay_out(request);
    EXPECT_TRUE(target) << target.error().message();
    const std::string out = dir / ("tp" + std::to_string(tp) + "." + std::to_string(rank));
    write_target(values, **target, out);
    return load_checkpoint(out + "/model-rank-" + std::to_string(rank) + "-part-0.safetensors");
  }
};

std::vector<int> rows_of(const TensorValue& v) {
  std::vector<int> out;
  const Index columns = v.shape.rank() > 1 ? v.shape[1] : 1;
  for (Index r = 0; r < v.shape[0]; ++r)
    out.push_back(static_cast<unsigned char>(v.bytes[static_cast<std::size_t>(2 * r * columns)]));
  return out;
}

TEST(Vllm, WorkersStackTheirHeadsAndPadTheVocabulary) {
  const TempDir dir;
  Model model;
  TensorValues worker = model.worker(dir, 2, 1);
  EXPECT_THAT(rows_of(worker.at("model.layers.0.self_attn.qkv_proj.weight")),
              ElementsAre(104, 105, 106, 107, 122, 123, 142, 143));
  EXPECT_THAT(rows_of(worker.at("model.layers.0.mlp.gate_up_proj.weight")), ElementsAre(182, 183, 202, 203));
  EXPECT_EQ(worker.at("model.layers.0.self_attn.o_proj.weight").shape, (Dims{2, 4}));
  EXPECT_EQ(worker.at("model.layers.0.self_attn.o_proj.weight").bytes.substr(0, 4), std::string("\xa0\x04\xa0\x05", 4));
  EXPECT_THAT(rows_of(worker.at("model.layers.0.input_layernorm.weight")), ElementsAre(220, 221));
  // The head is the embedding, so it is not stored. 70 rows, padded to 128, are 64 for each worker.
  ASSERT_FALSE(worker.contains("model.embed_tokens.weight"));
  const TensorValue& head = worker.at("lm_head.weight");
  EXPECT_EQ(head.shape, (Dims{64, 2}));
  EXPECT_EQ(rows_of(head)[0], 64);
  EXPECT_EQ(head.bytes.substr(6 * 4), std::string(58 * 4, '\0'));
}

TEST(Vllm, MoreWorkersThanKeyValueHeadsHoldThemTogether) {
  const TempDir dir;
  Model model;
  std::vector<std::vector<int>> rows;
  for (Index rank = 0; rank < 4; ++rank)
    rows.push_back(rows_of(model.worker(dir, 4, rank).at("model.layers.0.self_attn.qkv_proj.weight")));
  EXPECT_THAT(rows[0], ElementsAre(100, 101, 120, 121, 140, 141));
  EXPECT_THAT(rows[1], ElementsAre(102, 103, 120, 121, 140, 141));
  EXPECT_THAT(rows[2], ElementsAre(104, 105, 122, 123, 142, 143));
  EXPECT_THAT(rows[3], ElementsAre(106, 107, 122, 123, 142, 143));
}

// Writes the model for tp workers, with a config.json, and returns the directory.
std::string written(const TempDir& dir, Model& model, Index tp, const std::string& config) {
  model.request.mesh = Mesh({{"tp", tp}});
  const auto target = kVllm013Format.lay_out(model.request);
  EXPECT_TRUE(target) << target.error().message();
  const std::string path = dir / ("vllm" + std::to_string(tp));
  write_target(model.values, **target, path);
  if (!config.empty()) write_file(path + "/config.json", config);
  return path;
}

std::string refusal_of(const std::string& path) {
  const auto reader = open_with(kVllmFormat, path, {});
  return reader ? "accepted" : reader.error().message();
}

const char* kConfig = R"({"model_type": "llama", "vocab_size": 70, "hidden_size": 2, "intermediate_size": 4,
  "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
  "tie_word_embeddings": true})";

TEST(Vllm, ReadsWhatItWrote) {
  for (const Index tp : {1, 2, 4})
    for (const Index part : {70, 1 << 20}) {
      const TempDir dir;
      Model model;
      model.request.max_file_bytes = part;
      const std::string path = written(dir, model, tp, kConfig);
      EXPECT_TRUE(recognises(kVllmFormat, path));
      EXPECT_TRUE(load_checkpoint(path) == model.values) << tp;
    }
}

// Five layers on three stages: two, two, one. vLLM's get_pp_indices gives the last stage at most as many as the others.
TEST(Vllm, StagesHaveTheirLayersAndATiedEmbeddingTwice) {
  for (const bool tied : {true, false}) {
    const TempDir dir;
    Model model(5);
    if (!tied) model.add("lm_head.weight", {70, 2}, 30);
    model.request.mesh = Mesh({{"pp", 3}, {"tp", 2}});
    const auto target = kVllmFormat.lay_out(model.request);
    ASSERT_TRUE(target) << target.error().message();
    const std::string path = dir / "vllm";
    write_target(model.values, **target, path);
    const auto names_of = [&](int stage) {
      std::set<std::string> names;
      for (const auto& [name, value] :
           load_checkpoint(path + "/model-pp-" + std::to_string(stage) + "-tp-1-part-0.safetensors"))
        names.insert(name.substr(0, name.find('.', name.find("layers.") == std::string::npos ? 6 : 13)));
      return names;
    };
    EXPECT_THAT(names_of(0), ElementsAre("model.embed_tokens", "model.layers.0", "model.layers.1"));
    EXPECT_THAT(names_of(1), ElementsAre("model.layers.2", "model.layers.3"));
    EXPECT_THAT(names_of(2), ElementsAre("lm_head", "model.layers.4"));
    std::string config = kConfig;
    config.replace(config.find("\"num_hidden_layers\": 1"), 22, "\"num_hidden_layers\": 5");
    if (!tied) config.replace(config.find("true"), 4, "false");
    write_file(path + "/config.json", config);
    EXPECT_TRUE(recognises(kVllmFormat, path));
    EXPECT_TRUE(load_checkpoint(path) == model.values) << tied;
    std::filesystem::remove(path + "/model-pp-1-tp-1-part-0.safetensors");
    EXPECT_THAT(refusal_of(path), HasSubstr("model-pp-1-tp-1-part-0.safetensors"));
  }
}

// vLLM demands the scales of every model since 0.14, and older versions refuse them.
TEST(Vllm, EveryLayerHasTheScalesOfItsAttention) {
  for (const Index tp : {1, 2}) {
    const TempDir dir;
    Model model;
    model.request.mesh = Mesh({{"tp", tp}});
    const auto target = kVllmFormat.lay_out(model.request);
    ASSERT_TRUE(target) << target.error().message();
    const std::string path = dir / "vllm", first = path + "/model-rank-0-part-0.safetensors";
    write_target(model.values, **target, path);
    write_file(path + "/config.json", kConfig);
    TensorValues worker = load_checkpoint(first);
    for (const char* scale : {"_k_scale", "_prob_scale", "_q_scale", "_v_scale"}) {
      const TensorValue one = {DType::kFloat32, {}, std::string("\0\0\x80\x3f", 4)};
      EXPECT_TRUE(worker["model.layers.0.self_attn.attn." + std::string(scale)] == one) << scale;
    }
    EXPECT_EQ(worker.size(), 9u);
    EXPECT_TRUE(load_checkpoint(path) == model.values) << tp;  // the source has no scales
  }
}

TEST(Vllm, ReadsOnlyWhatTheConfigDescribes) {
  const TempDir dir, another;
  Model model;
  EXPECT_THAT(refusal_of(written(dir, model, 1, "")), HasSubstr("expected a model's config.json next to"));
  std::string other = kConfig;
  other.replace(other.find("\"intermediate_size\": 4"), 22, "\"intermediate_size\": 6");
  EXPECT_THAT(refusal_of(written(dir, model, 2, other)),
              HasSubstr("gate_up_proj.weight': expected int16 [6, 2] from config.json, got int16 [4, 2]"));
  const std::string path = written(dir, model, 4, kConfig);
  write_file(path + "/model-rank-3-part-0.safetensors", read_file(path + "/model-rank-2-part-0.safetensors"));
  EXPECT_EQ(refusal_of(path), "accepted");  // equal shapes, so it cannot be detected
  std::filesystem::remove(path + "/model-rank-3-part-0.safetensors");
  EXPECT_THAT(refusal_of(path), HasSubstr("does not run this model with tp=3"));
  other.replace(other.find("llama"), 5, "gpt_x");
  EXPECT_THAT(refusal_of(written(another, model, 2, other)),
              HasSubstr("model_type 'gpt_x' belongs to no known family"));
}

TEST(Vllm, PartsAreCutBySize) {
  Model model;
  model.request.max_file_bytes = 70;
  const auto target = kVllm013Format.lay_out(model.request);
  ASSERT_TRUE(target) << target.error().message();
  std::vector<std::string> names;
  for (const CatalogFile& f : (*target)->catalog().files) names.push_back(f.path);
  EXPECT_THAT(names, ElementsAre("model-rank-0-part-0.safetensors", "model-rank-0-part-1.safetensors",
                                 "model-rank-0-part-2.safetensors"));
  EXPECT_TRUE(validate((*target)->catalog()));
}

TEST(Vllm, RefusesWhatItDoesNotKnow) {
  Model model;
  model.request.mesh = Mesh({{"tp", 3}});
  EXPECT_THAT(model.refusal(), HasSubstr("expected one that divides 4 attention heads"));
  model.request.heads.reset();
  EXPECT_THAT(model.refusal(), HasSubstr("add one with --config"));
  model.request.mesh = Mesh({{"pp", 2}});
  EXPECT_THAT(model.refusal(), HasSubstr("pp=2 exceeds the parts of the model"));
  model.request.mesh = Mesh({{"dp_shard", 2}, {"tp", 2}});
  EXPECT_THAT(model.refusal(), HasSubstr("expected a mesh of pp and tp, got dp_shard=2, tp=2"));
  Model deep(5);
  deep.request.mesh = Mesh({{"pp", 2}, {"tp", 2}});
  EXPECT_THAT(deep.refusal(), HasSubstr("vLLM before 0.32 names the files"));
  model.request.mesh = Mesh();
  EXPECT_EQ(model.refusal(), "accepted");
  model.add("model.layers.0.mlp.experts.0.w1.weight", {2, 2}, 0);
  EXPECT_EQ(
      model.refusal(),
      "tensor 'model.layers.0.mlp.experts.0.w1.weight' [2, 2]: is not a parameter of the models whose layout in vLLM "
      "is supported: llama, mistral, qwen2, qwen3");
  model.request.tensors.pop_back();
  model.request.tensors.erase(model.request.tensors.begin() + 2);
  EXPECT_THAT(model.refusal(), HasSubstr("vLLM stacks 3 tensors to model.layers.0.self_attn.qkv_proj.weight, got 2"));
}

}  // namespace
}  // namespace reshard::vllm_test
