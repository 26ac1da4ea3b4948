#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include "formats/colossalai/colossalai.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/torch_archive.h"
#include "formats/open.h"
#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::colossalai_reader_test {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string tree(const std::string& name) { return sample("colossalai/" + name); }

std::map<std::string, std::string> values_of(Reader& reader) {
  std::map<std::string, std::string> out;
  for (const Blob& b : reader.catalog().blobs) out[b.name] = reader.describe(b);
  return out;
}

TensorValues model_of(const TensorValues& all) {
  TensorValues out;
  for (const auto& [name, value] : all)
    if (!name.starts_with("optimizer.")) out.emplace(name, value);
  return out;
}

class ColossalaiReader : public testing::Test {
 protected:
  // Returns a copy that may be damaged.
  std::string copy(const std::string& name) {
    fs::copy(tree(name), dir_ / "copy", fs::copy_options::recursive);
    return dir_ / "copy";
  }
  std::unique_ptr<Reader> opened(const std::string& path) {
    auto open = open_checkpoint(path);
    EXPECT_TRUE(open) << open.error().message();
    if (!open) return nullptr;
    EXPECT_EQ(open->format, &kColossalaiFormat);
    return std::move(open->reader);
  }
  // Returns why a path is refused, with D for the path.
  std::string refusal(const std::string& path) {
    const auto open = open_checkpoint(path);
    if (open) return "accepted";
    return shortened(open.error().message(), path);
  }
  TempDir dir_;
};

TEST_F(ColossalaiReader, EveryHealthyTreeIsTheModelBitForBit) {
  const TensorValues full = load_checkpoint(tree("full.safetensors"));
  ASSERT_EQ(full.size(), 39u);
  for (const char* name :
       {"healthy_st/epoch-0_step-7", "healthy_st/epoch-0_step-7/modeling", "pp2_bin", "pp2_interrupted"})
    EXPECT_EQ(model_of(load_checkpoint(tree(name))), full) << name;
}

TEST_F(ColossalaiReader, OptimizerStatesHaveTheNamesOfTheirParameters) {
  const TensorValues moments = load_checkpoint(tree("full.optim.safetensors"));
  TensorValues found;
  for (const auto& [name, value] : load_checkpoint(tree("healthy_st/epoch-0_step-7")))
    if (name.starts_with("optimizer.state.")) found.emplace(name.substr(std::string("optimizer.state.").size()), value);
  EXPECT_EQ(found, moments);
}

TEST_F(ColossalaiReader, ShowsWhatStandsBesideTheTensors) {
  const auto reader = opened(tree("healthy_st/epoch-0_step-7"));
  auto values = values_of(*reader);
  EXPECT_EQ(values["train_state.step"], "7");
  EXPECT_EQ(values["train_state.sample_start_index"], "56");
  EXPECT_EQ(values["lr_scheduler.last_epoch"], "7");
  EXPECT_EQ(values["lr_scheduler.base_lrs"], "[0.0003]");
  EXPECT_EQ(values["optimizer.state.lm_head.weight.step"], "7");
  EXPECT_EQ(values["optimizer.param_groups.model.norm.weight.betas"], "(0.9, 0.95)");
  EXPECT_THAT(reader->catalog().warnings, IsEmpty());
  EXPECT_THAT(
      reader->catalog().attributes,
      ElementsAre(testing::Pair("format", "ColossalAI, safetensors, 4 model files, index, optimizer"),
                  testing::Pair("optimizer ids",
                                "39 ids in the order in which the model defines them; the shapes of 39 agree")));
  for (const Blob& blob : reader->catalog().blobs) {
    const auto bytes = reader->blob_bytes(blob);
    ASSERT_TRUE(bytes) << bytes.error().message();
    const std::string path = dir_.write("blob", *bytes);
    const auto again = torch_archive::read_object_item(*File::open(path), 0, static_cast<Index>(bytes->size()));
    ASSERT_TRUE(again) << again.error().message();
    EXPECT_EQ(pickle::print(again->root(), 2, 4), reader->describe(blob)) << blob.name;
  }
}

TEST_F(ColossalaiReader, AnInterruptedSaveThatIsWholeIsReadAndNamed) {
  const auto reader = opened(tree("pp2_interrupted"));
  EXPECT_THAT(reader->catalog().warnings,
              ElementsAre("The save was interrupted: there is no index, but tmp_index_files/ contains the indexes of "
                          "stages 1-2 with layers 0-3, and they cover the whole model. They are used."));
}

TEST_F(ColossalaiReader, AnInterruptedSaveThatIsNotWholeSaysWhatIsMissing) {
  const std::string path = copy("pp2_interrupted");
  fs::remove(path + "/tmp_index_files/pytorch_model.bin.index-stage-00002.json");
  EXPECT_EQ(refusal(path),
            "D: the save was interrupted before its index was written: tmp_index_files/ has the index of stage 1 with "
            "layers 0-1; missing: the index of stage 2, the last norm");
  fs::rename(path + "/tmp_index_files/pytorch_model.bin.index-stage-00001.json",
             path + "/tmp_index_files/pytorch_model.bin.index-stage-00003.json");
  EXPECT_THAT(refusal(path), HasSubstr("missing: the indexes of stages 1-2"));
  fs::remove(path + "/tmp_index_files/pytorch_model.bin.index-stage-00003.json");
  EXPECT_THAT(refusal(path), HasSubstr("tmp_index_files/ is empty: no stage finished"));
  fs::remove(path + "/tmp_index_files");
  EXPECT_EQ(refusal(path),
            "D: expected an index next to 4 shards: 'pytorch_model-stage-00001-shard-00001.bin', "
            "'pytorch_model-stage-00001-shard-00002.bin', 'pytorch_model-stage-00002-shard-00001.bin' and 1 more: the "
            "save was interrupted before it was written, and some shards may be missing. Open a single "
            "file to see what it contains.");
}

TEST_F(ColossalaiReader, ALayerThatNoStageHasIsMissing) {
  const std::string path = copy("pp2_interrupted");
  const std::string index = path + "/tmp_index_files/pytorch_model.bin.index-stage-00001.json";
  std::string text = read_file(index);
  for (auto at = text.find("layers.1."); at != std::string::npos; at = text.find("layers.1."))
    text.replace(at, 9, "layers.7.");
  write_file(index, text);
  EXPECT_THAT(refusal(path), HasSubstr("with layers 0, 2-3, 7; missing: layers 1, 4-6"));
}

TEST_F(ColossalaiReader, TruncatedAndPaddedVocabulariesAreReadAsTheyAre) {
  const auto truncated = opened(tree("truncated_tp8"));
  EXPECT_EQ(truncated->catalog().tensors()[*truncated->catalog().find("model.embed_tokens.weight")].shape,
            (Dims{128, 64}));
  EXPECT_THAT(truncated->catalog().notes,
              Contains(HasSubstr("there is no optimizer/: this is a final model, or its save failed there. "
                                 "ColossalAI's save of a tensor-parallel optimizer fails")));
  const auto padded = opened(tree("padded_embed"));
  EXPECT_EQ(padded->catalog().tensors()[*padded->catalog().find("model.embed_tokens.weight")].shape, (Dims{1024, 64}));
}

TEST_F(ColossalaiReader, TheIndexDecidesAndShardsItDoesNotNameAreStale) {
  const std::string path = copy("pp2_bin");
  fs::copy(path + "/pytorch_model-stage-00001-shard-00001.bin", path + "/pytorch_model-stage-00001-shard-00009.bin");
  EXPECT_THAT(opened(path)->catalog().stale_files, ElementsAre("pytorch_model-stage-00001-shard-00009.bin"));
  fs::remove(path + "/pytorch_model-stage-00002-shard-00002.bin");
  EXPECT_THAT(
      refusal(path),
      HasSubstr("D/pytorch_model-stage-00002-shard-00002.bin: cannot open: No such file or directory; affected: "));
}

TEST_F(ColossalaiReader, WhatTheIndexPromisesHasToBeThere) {
  const std::string path = copy("pp2_bin");
  const std::string index = path + "/pytorch_model.bin.index.json";
  std::string text = read_file(index);
  text.replace(text.find("model.norm.weight"), 17, "model.nora.weight");
  write_file(index, text);
  EXPECT_THAT(refusal(path), HasSubstr("expected tensor 'model.nora.weight', as the index says; it is missing"));
}

TEST_F(ColossalaiReader, ATensorInSeveralFilesHasReplicasOfOneShape) {
  const std::string path = copy("pp2_bin");
  // An expert-parallel rank repeats shared tensors in a shard that the index names for one tensor only.
  const std::string shard = path + "/pytorch_model-stage-00001-shard-00001.bin";
  fs::copy(shard, path + "/pytorch_model-stage-00001-00002-shard-00001.bin");
  const std::string index = path + "/pytorch_model.bin.index.json";
  std::string text = read_file(index);
  const auto at = text.find("pytorch_model-stage-00001-shard-00001.bin", text.find("model.embed_tokens.weight"));
  text.replace(at, 41, "pytorch_model-stage-00001-00002-shard-00001.bin");
  write_file(index, text);
  const auto reader = opened(path);
  std::size_t replicas = 0;
  for (const Tensor& t : reader->catalog().tensors()) replicas += t.replicas.size();
  EXPECT_GT(replicas, 1u);
  EXPECT_EQ(load_checkpoint(path), load_checkpoint(tree("full.safetensors")));
}

TEST_F(ColossalaiReader, ATotalSizeIsInMebibytesAndAWrongOneIsNamed) {
  const std::string path = copy("padded_embed");
  EXPECT_THAT(opened(path)->catalog().warnings, IsEmpty());
  const std::string index = path + "/pytorch_model.bin.index.json";
  Json json = *parse_json(read_file(index), index);
  json.set("metadata", Json::object().set("total_size", 0.5));
  write_file(index, to_text(json));
  EXPECT_THAT(opened(path)->catalog().warnings, ElementsAre(HasSubstr("The index gives a total_size of 0.500000 MiB")));
}

TEST_F(ColossalaiReader, APartOfTheOptimizerThatIsGoneIsAWarning) {
  const std::string path = copy("healthy_st/epoch-0_step-7");
  fs::remove(path + "/optimizer/pytorch_optim_group.bin");
  EXPECT_THAT(opened(path)->catalog().warnings, ElementsAre(HasSubstr("learning rates and other options")));
  fs::remove(path + "/optimizer/pytorch_optim-00002.bin");
  EXPECT_THAT(opened(path)->catalog().warnings,
              ElementsAre(HasSubstr("not read: 1 missing shard: 'pytorch_optim-00002.bin'")));
  EXPECT_EQ(load_checkpoint(path), load_checkpoint(tree("full.safetensors")));
}

TEST_F(ColossalaiReader, AnOptimizerAloneKeepsItsIds) {
  fs::copy(tree("healthy_st/epoch-0_step-7/optimizer"), dir_ / "optimizer");
  const auto reader = opened(dir_ / "optimizer");
  EXPECT_TRUE(reader->catalog().find("optimizer.state.38.exp_avg"));
  EXPECT_THAT(reader->catalog().warnings, ElementsAre(HasSubstr("39 ids for 0 parameters")));
}

TEST_F(ColossalaiReader, ASortedIndexOfALlamaStillTellsTheParameters) {
  const std::string path = copy("healthy_st/epoch-0_step-7");
  const std::string index = path + "/modeling/model.safetensors.index.json";
  const Json json = *parse_json(read_file(index), index);
  std::map<std::string, std::string> sorted;
  const auto members = *json.get_object("weight_map");
  for (const Json::Member& m : members) sorted[m.key] = std::string(*m.value.as_string());
  Json map = Json::object();
  for (const auto& [name, file] : sorted) map.set(name, file);
  write_file(index, to_text(Json::object().set("weight_map", std::move(map))));
  const TensorValues moments = load_checkpoint(tree("full.optim.safetensors"));
  const TensorValues all = load_checkpoint(path);
  for (const auto& [name, value] : moments) EXPECT_EQ(all.at("optimizer.state." + name), value) << name;
}

TEST_F(ColossalaiReader, TellsItsTreesFromHuggingFaces) {
  EXPECT_FALSE(recognises(kColossalaiFormat, dir_.path()));
  dir_.write("hf/model-00001-of-00002.safetensors", "");
  dir_.write("hf/model.safetensors.index.json", "{}");
  dir_.write("bin/pytorch_model-00001-of-00002.bin", "");
  dir_.write("bin/pytorch_model.bin.index.json", "{}");
  EXPECT_FALSE(recognises(kColossalaiFormat, dir_ / "hf"));
  EXPECT_FALSE(recognises(kColossalaiFormat, dir_ / "bin"));
  dir_.write("own/model-00001.safetensors", "");
  EXPECT_TRUE(recognises(kColossalaiFormat, dir_ / "own"));
}

TEST_F(ColossalaiReader, ReadsTheAsynchronousDialect) {
  const std::string path = copy("healthy_st/epoch-0_step-7");
  fs::remove_all(path + "/optimizer");
  // Two ids for the model's 39 parameters are too few to be named.
  std::vector<SafetensorsEntry> entries = {{.name = "state.0.step", .dtype = DType::kUint8, .shape = {5}},
                                           {.name = "state.0.exp_avg", .dtype = DType::kFloat32, .shape = {2}}};
  const std::string header = *safetensors_header(entries, {{"non_tensor_keys", "[\"state.0.step\"]"}}, 8);
  fs::create_directory(path + "/optimizer");
  write_file(path + "/optimizer/optimizer-00001.safetensors",
             header + std::string("\x80\x04K\x07.", 5) + std::string(8, '\1'));
  write_file(
      path + "/optimizer/optimizer.safetensors.index.json",
      R"({"metadata": {"param_groups": "pytorch_optim_group.bin"}, "weight_map": {"0": "optimizer-00001.safetensors"}})");
  const auto reader = opened(path);
  ASSERT_TRUE(reader);
  EXPECT_EQ(values_of(*reader)["optimizer.state.0.step"], "7");
}

}  // namespace
}  // namespace reshard::colossalai_reader_test
