// Reads constructed files of Megatron's, for cases without a real one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/zip.h"
#include "formats/megatron/megatron.h"
#include "tests/formats/megatron/megatron_files.h"
#include "tests/support/pickle_values.h"
#include "tests/support/run_command.h"

namespace reshard::constructed_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class MegatronConstructed : public MegatronFiles {};

using pickled::Value;

// A torch.save file of one rank with float32 tensors that contain running numbers.
class RankFile {
 public:
  Value tensor(const Dims& shape) {
    const auto n = static_cast<std::size_t>(volume(shape));
    std::string bytes;
    for (std::size_t i = 0; i < n; ++i, next_ += 1) bytes.append(reinterpret_cast<const char*>(&next_), sizeof next_);
    storages_.push_back(std::move(bytes));
    const Value storage = [key = std::to_string(storages_.size() - 1), n](pickle::PickleWriter& w) {
      pickled::tuple({pickled::text("storage"), pickled::global("torch", "FloatStorage"), pickled::text(key),
                      pickled::text("cpu"), pickled::integer(static_cast<Index>(n))})(w);
      w.persistent_id();
    };
    const auto dims = [](const Dims& d) { return pickled::integers({d.begin(), d.end()}); };
    return pickled::call(pickled::global("torch._utils", "_rebuild_tensor_v2"),
                         {storage, pickled::integer(0), dims(shape), dims(row_major_strides(shape)),
                          pickled::boolean(false), pickled::call(pickled::global("collections", "OrderedDict"), {})});
  }
  // Sets the first of the following numbers.
  void start(float first) { next_ = first; }

  void write(const std::string& directory, const Value& value, const std::string& name = "model_optim_rng.pt") const {
    zip::Builder builder(0);
    builder.add("archive/data.pkl", pickled::bytes_of(value));
    for (std::size_t i = 0; i < storages_.size(); ++i) builder.add("archive/data/" + std::to_string(i), storages_[i]);
    fs::create_directories(directory);
    write_file(directory + "/" + name, std::move(builder).finish().before);
  }

 private:
  std::vector<std::string> storages_;
  float next_ = 0;
};

Value namespace_of(const std::map<std::string, Index>& numbers, bool swiglu = true) {
  pickled::Fields fields = {{"swiglu", pickled::boolean(swiglu)},
                            {"untie_embeddings_and_output_weights", pickled::boolean(true)}};
  for (const auto& [name, n] : numbers) fields.emplace_back(name, pickled::integer(n));
  return pickled::object(pickled::global("argparse", "Namespace"), pickled::fields_of(fields));
}

std::vector<float> numbers_of(const TensorValue& value) {
  std::vector<float> out(value.bytes.size() / sizeof(float));
  std::memcpy(out.data(), value.bytes.data(), value.bytes.size());
  return out;
}

// Two tp ranks of a model from before Megatron core, in nested dicts.
TEST_F(MegatronConstructed, NamesFromBeforeMegatronCore) {
  const std::string path = dir_ / "old/iter_0000001";
  for (int rank = 0; rank < 2; ++rank) {
    RankFile file;
    file.start(rank == 0 ? 0 : 100);
    const Value words = file.tensor({2, 2}), norm = file.tensor({2}), fc1 = file.tensor({4, 1}),
                dense = file.tensor({2, 1}), head = file.tensor({2, 2});
    using pickled::fields_of;
    file.write(
        path + "/mp_rank_0" + std::to_string(rank),
        fields_of(
            {{"args", namespace_of({{"tensor_model_parallel_size", 2}, {"num_layers", 1}})},
             {"checkpoint_version", pickled::number(3)},
             {"iteration", pickled::integer(1)},
             {"model",
              fields_of({{"language_model",
                          fields_of({{"embedding", fields_of({{"word_embeddings", fields_of({{"weight", words}})}})},
                                     {"transformer", fields_of({{"layers.0.post_attention_layernorm.weight", norm},
                                                                {"layers.0.mlp.dense_h_to_4h.weight", fc1},
                                                                {"layers.0.attention.dense.weight", dense}})},
                                     {"output_layer", fields_of({{"weight", head}})}})}})}}));
  }
  const TensorValues values = load_checkpoint(path);
  EXPECT_EQ(values.size(), 5U);
  EXPECT_EQ(numbers_of(values.at("embedding.word_embeddings.weight")),
            (std::vector<float>{0, 1, 2, 3, 100, 101, 102, 103}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.0.mlp.linear_fc1.weight")),
            (std::vector<float>{6, 7, 106, 107, 8, 9, 108, 109}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.0.self_attention.linear_proj.weight")),
            (std::vector<float>{10, 110, 11, 111}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.0.pre_mlp_layernorm.weight")), (std::vector<float>{4, 5}));
  EXPECT_TRUE(values.contains("output_layer.weight"));
  // Tensors that ranks replicate are compared.
  const CommandResult verified = reshard_cli({"verify", path, "--values"});
  EXPECT_THAT(verified.out, HasSubstr("decoder.layers.0.pre_mlp_layernorm.weight"));
}

// Stages of different sizes, with two chunks each, and a plain optimizer of two groups.
TEST_F(MegatronConstructed, ChunksOfStagesAndAPlainOptimizer) {
  const std::string path = dir_ / "iter_0000001";
  const Index layers[2][2] = {{1, 2}, {1, 1}};  // for each stage, the layers of its chunks
  for (int stage = 0; stage < 2; ++stage) {
    RankFile file;
    file.start(static_cast<float>(1000 * stage));
    pickled::Fields chunks[2];
    pickled::Entries states;
    std::vector<Dims> shapes;
    for (int chunk = 0; chunk < 2; ++chunk)
      for (Index layer = 0; layer < layers[stage][chunk]; ++layer) {
        const std::string prefix = "decoder.layers." + std::to_string(layer) + ".";
        for (const auto& [name, shape] :
             {std::pair("input_layernorm.weight", Dims{2}), std::pair("mlp.linear_fc2.weight", Dims{2, 3})}) {
          chunks[chunk].emplace_back(prefix + name, file.tensor(shape));
          shapes.push_back(shape);
        }
        chunks[chunk].emplace_back(prefix + "mlp.linear_fc2._extra_state", pickled::none());
      }
    file.start(static_cast<float>(500 + 1000 * stage));
    pickled::Values decayed, others;
    for (const int rank : {2, 1})  // matrices first
      for (const Dims& shape : shapes)
        if (shape.rank() == rank) {
          const auto id = pickled::integer(std::ssize(states));
          (rank == 2 ? decayed : others).push_back(id);
          states.emplace_back(id, pickled::fields_of({{"exp_avg", file.tensor(shape)}}));
        }
    const auto group = [](double decay, const pickled::Values& ids) {
      return pickled::fields_of({{"weight_decay", pickled::number(decay)}, {"params", pickled::list(ids)}});
    };
    file.write(
        path + "/mp_rank_00_00" + std::to_string(stage),
        pickled::fields_of(
            {{"args", namespace_of({{"pipeline_model_parallel_size", 2},
                                    {"virtual_pipeline_model_parallel_size", 2},
                                    {"num_layers", 5}})},
             {"iteration", pickled::integer(1)},
             {"model0", pickled::fields_of(chunks[0])},
             {"model1", pickled::fields_of(chunks[1])},
             {"optimizer",
              pickled::fields_of(
                  {{"optimizer", pickled::fields_of(
                                     {{"state", pickled::dict(states)},
                                      {"param_groups", pickled::list({group(0.1, decayed), group(0, others)})}})}})}}));
  }
  const TensorValues values = load_checkpoint(path);
  EXPECT_EQ(values.size(), 20U);
  const auto first = [&](const std::string& name) { return numbers_of(values.at(name)).front(); };
  const auto layer = [](int n) { return "decoder.layers." + std::to_string(n) + "."; };
  // Chunk 0 of both stages, then chunk 1 of both.
  const float weights[] = {2, 1002, 10, 18, 1010}, norms[] = {0, 1000, 8, 16, 1008};
  for (int n = 0; n < 5; ++n) {
    EXPECT_EQ(first(layer(n) + "mlp.linear_fc2.weight"), weights[n]) << n;
    EXPECT_EQ(first(layer(n) + "input_layernorm.weight"), norms[n]) << n;
  }
  EXPECT_EQ(first("optimizer.state." + layer(0) + "mlp.linear_fc2.weight.exp_avg"), 500);
  EXPECT_EQ(first("optimizer.state." + layer(3) + "mlp.linear_fc2.weight.exp_avg"), 512);
  EXPECT_EQ(first("optimizer.state." + layer(0) + "input_layernorm.weight.exp_avg"), 518);
  EXPECT_EQ(first("optimizer.state." + layer(4) + "input_layernorm.weight.exp_avg"), 1514);
}

TEST_F(MegatronConstructed, WhatCannotBeJoinedIsTold) {
  const auto write = [&](const std::string& directory, const std::map<std::string, Index>& args, double version,
                         const std::string& name) {
    RankFile file;
    file.write(dir_ / directory, pickled::fields_of({{"args", namespace_of(args)},
                                                     {"checkpoint_version", pickled::number(version)},
                                                     {"iteration", pickled::integer(1)},
                                                     {"model", pickled::fields_of({{name, file.tensor({2, 2})}})}}));
  };
  write("a/iter_0000001/mp_rank_00", {}, 1.0, "output_layer.weight");
  EXPECT_THAT(error_of(dir_ / "a/iter_0000001"), HasSubstr("checkpoint_version below 2"));
  write("b/iter_0000001/mp_rank_00", {{"num_layers", 3}}, 3.0, "decoder.layers.1.mlp.linear_fc2.weight");
  EXPECT_EQ(error_of(dir_ / "b/iter_0000001"), "D: expected 3 layers as args say, got 2 in the files of all stages");
  write("c/iter_0000001/mp_rank_00", {{"tensor_model_parallel_size", 1 << 30}}, 3.0, "output_layer.weight");
  EXPECT_THAT(error_of(dir_ / "c/iter_0000001"), HasSubstr("degrees of parallelism of at most 1,000,000"));
  write("d/iter_0000001/mp_rank_00", {{"tensor_model_parallel_size", 1'000'000}}, 3.0, "output_layer.weight");
  EXPECT_THAT(error_of(dir_ / "d/iter_0000001"), HasSubstr("no file of tp rank 1 of 1000000"));
  write("e/iter_0000001/mp_rank_00", {{"num_experts", 2}}, 3.0,
        "decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.weight");
  EXPECT_THAT(error_of(dir_ / "e/iter_0000001"), HasSubstr("expected 2 experts in a file"));
  write("f/iter_0000001/mp_rank_00", {}, 3.0, "decoder.layers.123456789.mlp.linear_fc2.weight");
  EXPECT_THAT(error_of(dir_ / "f/iter_0000001"), HasSubstr("more than 4,096 layers"));
  for (const char* rank : {"g/iter_0000001/mp_rank_00", "g/iter_0000001/mp_rank_01"})
    write(rank, {{"tensor_model_parallel_size", 2}}, 3.0, "decoder.layers.0.mixer.in_proj.weight");
  const auto unknown = open_checkpoint(dir_ / "g/iter_0000001");
  ASSERT_TRUE(unknown) << unknown.error().message();
  EXPECT_THAT(
      unknown->reader->catalog().warnings,
      testing::ElementsAre("1 tensor: 'decoder.layers.0.mixer.in_proj.weight' left out: reshard does not know how "
                           "tensor parallelism cuts tensors of such names"));
  RankFile file;
  file.write(dir_ / "h/iter_0000001/mp_rank_00", pickled::fields_of({{"model", file.tensor({2})}}));
  EXPECT_THAT(error_of(dir_ / "h/iter_0000001"), HasSubstr("args: expected Megatron's arguments, got nothing"));
}

TensorValue floats(const Dims& shape, float first) {
  TensorValue out{DType::kFloat32, shape, {}};
  for (Index i = 0; i < volume(shape); ++i, first += 1)
    out.bytes.append(reinterpret_cast<const char*>(&first), sizeof first);
  return out;
}

// Names as saved with singleton_local_shards and Transformer Engine's grouped experts. Optimizer state that belongs to
// no parameter keeps its name.
TEST_F(MegatronConstructed, ShardedNamesOfOtherSpecs) {
  const std::string path = dir_ / "iter_0000001", experts = "decoder.layers.0.mlp.experts.experts.";
  write_dcp({{experts + "1.linear_fc1.weight_w", floats({2, 2}, 0)},
             {experts + "1.linear_fc1.weight_v", floats({2, 2}, 4)},
             {experts + "1.linear_fc2.weight", floats({2, 2}, 8)},
             {experts + "linear_fc1.weight3_w", floats({1, 2}, 20)},
             {experts + "linear_fc1.weight3_v", floats({1, 2}, 22)},
             {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight", floats({2}, 30)},
             {"decoder.layers.1.mlp.linear_fc1.weight_w", floats({1, 2}, 40)},
             {"decoder.layers.1.mlp.linear_fc1.weight_v", floats({1, 2}, 42)},
             {"decoder.layers.1.mlp.linear_fc1.layer_norm_weight", floats({2}, 44)},
             {"optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc1.weight_v", floats({1, 2}, 52)},
             {"chained_1.optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc1.weight_w", floats({1, 2}, 50)},
             {"optimizer.state.exp_avg.of_nothing", floats({1}, 60)}},
            path, *Mesh::parse("dp_shard=2"));
  write_file(path + "/metadata.json", R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})");
  const TensorValues values = load_checkpoint(path);
  const auto is = [&](const std::string& name, std::vector<float> expected) {
    ASSERT_TRUE(values.contains(name)) << name;
    EXPECT_EQ(numbers_of(values.at(name)), expected) << name;
  };
  is("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", {0, 1, 2, 3, 4, 5, 6, 7});
  is("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", {8, 9, 10, 11});
  is("decoder.layers.0.mlp.experts.linear_fc1.weight3", {20, 21, 22, 23});
  is("decoder.layers.0.pre_mlp_layernorm.weight", {30, 31});
  is("decoder.layers.1.mlp.linear_fc1.weight", {40, 41, 42, 43});
  is("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", {44, 45});
  is("optimizer.state.decoder.layers.1.mlp.linear_fc1.weight.exp_avg", {50, 51, 52, 53});
  is("optimizer.state.exp_avg.of_nothing", {60});
  EXPECT_EQ(values.size(), 8U);
}

TEST_F(MegatronConstructed, NamesOfNemosWrapper) {
  const std::string path = dir_ / "weights", layers = "module.decoder.layers.";
  write_dcp({{"module.embedding.word_embeddings.weight", floats({2, 2}, 0)},
             {layers + "mlp.linear_fc1.weight", floats({2, 4, 2}, 10)},
             {layers + "mlp.linear_fc1.layer_norm_weight", floats({2, 2}, 30)},
             {"optimizer.state.exp_avg." + layers + "mlp.linear_fc1.weight", floats({2, 4, 2}, 40)}},
            path, *Mesh::parse("dp_shard=2"));
  write_file(path + "/metadata.json", R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})");
  const TensorValues values = load_checkpoint(path);
  EXPECT_EQ(numbers_of(values.at("embedding.word_embeddings.weight")), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.1.mlp.linear_fc1.weight")),
            (std::vector<float>{18, 19, 20, 21, 22, 23, 24, 25}));
  EXPECT_EQ(numbers_of(values.at("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")), (std::vector<float>{30, 31}));
  EXPECT_EQ(numbers_of(values.at("optimizer.state.decoder.layers.0.mlp.linear_fc1.weight.exp_avg")),
            (std::vector<float>{40, 41, 42, 43, 44, 45, 46, 47}));
  EXPECT_EQ(values.size(), 7U);
}

// dp_reshardable with experts: their state belongs to another optimizer, in a buffer for each ep rank. All parameters
// have 64 elements here, and each rank has written those of one.
TEST_F(MegatronConstructed, FlatBuffersOfExperts) {
  const std::string path = dir_ / "iter_0000001", layer = "decoder.layers.";
  const auto buffer = [](int optimizer, int group) {
    return "chained_" + std::to_string(optimizer) + ".optimizer.distributed.dp_group_idx_" + std::to_string(group) +
           ".gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg";
  };
  TensorValues stored = {{"embedding.word_embeddings.weight", floats({8, 8}, 0)},
                         {layer + "self_attention.linear_proj.weight", floats({1, 8, 8}, 64)},
                         {layer + "mlp.router.weight", floats({1, 8, 8}, 128)},
                         {layer + "mlp.experts.experts.linear_fc1.weight", floats({1, 4, 8, 8}, 200)},
                         {layer + "mlp.experts.experts.linear_fc2.weight", floats({1, 4, 8, 8}, 500)},
                         {"output_layer.weight", floats({8, 8}, 800)},
                         {buffer(0, 0), floats({256}, 1000)},
                         {buffer(1, 0), floats({256}, 2000)},
                         {buffer(1, 1), floats({256}, 3000)}};
  const auto write = [&](const TensorValues& tensors, const Mesh& mesh) {
    fs::remove_all(path);
    write_dcp(tensors, path, mesh);
    write_file(path + "/metadata.json", R"({"sharded_backend": "torch_dist"})");
    RankFile().write(
        path,
        pickled::fields_of(
            {{"args",
              namespace_of({{"expert_model_parallel_size", 2}, {"num_experts", 4}, {"num_layers", 1}}, false)}}),
        "common.pt");
  };
  write(stored, *Mesh::parse("dp_shard=4"));
  const TensorValues values = load_checkpoint(path);
  EXPECT_EQ(values.size(), 24U);
  const auto first = [&](const std::string& name) {
    const auto found = values.find("optimizer.state." + name + ".weight.exp_avg");
    return found == values.end() ? -1 : numbers_of(found->second).front();
  };
  const std::string mlp = "decoder.layers.0.mlp.";
  EXPECT_EQ(first("output_layer"), 1000);
  EXPECT_EQ(first(mlp + "router"), 1064);
  EXPECT_EQ(first("decoder.layers.0.self_attention.linear_proj"), 1128);
  EXPECT_EQ(first("embedding.word_embeddings"), 1192);
  EXPECT_EQ(first(mlp + "experts.local_experts.1.linear_fc2"), 2000);
  EXPECT_EQ(first(mlp + "experts.local_experts.0.linear_fc1"), 2192);
  EXPECT_EQ(first(mlp + "experts.local_experts.2.linear_fc2"), 3128);

  // If pieces begin elsewhere, a buffer is missing or one is too short, no order is accepted.
  const auto kept = [&](const TensorValues& tensors, const Mesh& mesh) {
    write(tensors, mesh);
    const auto open = open_checkpoint(path);
    if (!open) return open.error().message();
    EXPECT_TRUE(open->reader->catalog().find(buffer(0, 0)));
    for (const std::string& warning : open->reader->catalog().warnings)
      if (warning.find("dp_reshardable") != std::string::npos) return warning;
    return std::string("taken");
  };
  EXPECT_THAT(kept(stored, *Mesh::parse("dp_shard=3")), HasSubstr("fit no known order of the parameters"));
  stored[buffer(1, 1)] = floats({320}, 3000);
  EXPECT_THAT(kept(stored, *Mesh::parse("dp_shard=4")), HasSubstr("fit no known order of the parameters"));
  stored.erase(buffer(1, 1));
  EXPECT_THAT(kept(stored, *Mesh::parse("dp_shard=4")), HasSubstr("there are 2 buffers of a model on ep=2"));
}

// A stack claims more layers than its stored pieces can contain: a shape in a file must not create a million tensors.
TEST_F(MegatronConstructed, StacksAreAsLargeAsTheirPieces) {
  const std::string path = dir_ / "iter_0000001";
  write_dcp({{"decoder.layers.mlp.linear_fc2.weight", floats({5000}, 0)},
             {"decoder.layers.input.weight", floats({400, 1}, 0)}},
            path, Mesh());
  write_file(path + "/metadata.json", R"({"sharded_backend": "torch_dist"})");
  const auto open = open_checkpoint(path);
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(open->reader->catalog().tensors().size(), 2U);
  EXPECT_TRUE(open->reader->catalog().find("decoder.layers.mlp.linear_fc2.weight"));
}

}  // namespace
}  // namespace reshard::constructed_test
