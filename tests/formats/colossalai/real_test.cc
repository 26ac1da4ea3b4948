// Tests real saves of ColossalAI 0.5.0 (tests/data/colossalai_real) against digests of the tensors that its ranks held.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "formats/colossalai/colossalai.h"
#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/torch_archive.h"
#include "formats/open.h"
#include "lib/base/json.h"
#include "lib/base/syscalls.h"
#include "lib/device/crc32.h"
#include "tests/support/checkpoints.h"
#include "tests/support/pickle_values.h"
#include "tests/support/run_command.h"
#include "tests/support/sha256.h"
#include "tests/support/temp_dir.h"

namespace reshard::real_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

const std::string kData = RESHARD_TEST_DATA "/colossalai_real/";

std::map<std::string, std::string> digests(const std::string& name) {
  std::map<std::string, std::string> out;
  const Json json = *parse_json(read_file(kData + name + ".sha256.json"), name);
  const auto members = *json.as_object();
  for (const Json::Member& m : members) out[m.key] = std::string(*m.value.as_string());
  return out;
}

std::map<std::string, std::string> digests(const TensorValues& values) {
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : values) out[name] = sha256_hex(value.bytes);
  return out;
}

// Returns a torch.save file of these tensors.
std::string torch_file(const TensorValues& values) {
  std::vector<torch_archive::NamedTensor> tensors;
  for (const auto& [name, value] : values)
    tensors.push_back({name, value.dtype, value.shape, crc32(0, std::as_bytes(std::span(value.bytes)))});
  const auto sizes = torch_archive::around_tensors(tensors);
  std::string out = sizes.before;
  std::size_t i = 0;
  for (const auto& [name, value] : values) {
    out += value.bytes;
    out += sizes.after[i++];
  }
  return out;
}

TensorValue floats(const Dims& shape, char byte = '\1') {
  return {DType::kFloat32, shape, std::string(static_cast<std::size_t>(4 * volume(shape)), byte)};
}

class RealColossalai : public testing::Test {
 protected:
  // Returns a copy that may be changed.
  std::string copy(const std::string& name, const std::string& as = "copy") {
    fs::copy(kData + name, dir_ / as, fs::copy_options::recursive);
    return dir_ / as;
  }
  std::unique_ptr<Reader> opened(const std::string& path) {
    auto open = open_checkpoint(path);
    EXPECT_TRUE(open) << open.error().message();
    if (!open) return nullptr;
    EXPECT_EQ(open->format, &kColossalaiFormat) << path;
    return std::move(open->reader);
  }
  std::string refusal(const std::string& path) {
    const auto open = open_checkpoint(path);
    return open ? "accepted" : open.error().message();
  }
  static Json index_of(const std::string& path) { return *parse_json(read_file(path), path); }
  static double total_size(const Json& index) { return *index.find("metadata")->find("total_size")->as_double(); }
  static void set_total_size(Json& index, double mebibytes) {
    Json metadata = *index.find("metadata");
    metadata.set("total_size", mebibytes);
    index.set("metadata", std::move(metadata));
  }
  static std::string evidence(const Reader& reader) {
    for (const auto& [label, text] : reader.catalog().attributes)
      if (label == "optimizer ids") return text;
    return "";
  }
  static std::map<std::string, std::string> values_of(Reader& reader) {
    std::map<std::string, std::string> out;
    for (const Blob& b : reader.catalog().blobs) out[b.name] = reader.describe(b);
    return out;
  }
  TempDir dir_;
};

// With two pipeline stages, the embedding is the head of the second stage, has one id, and both stages store its state.
TEST_F(RealColossalai, ATiedModelOnStagesHasOneStateForEmbeddingAndHead) {
  const auto reader = opened(kData + "tied_pp2");
  ASSERT_TRUE(reader);
  EXPECT_THAT(reader->catalog().warnings, IsEmpty());
  EXPECT_THAT(reader->catalog().stale_files, IsEmpty());
  EXPECT_EQ(evidence(*reader),
            "29 ids in the order in which the model defines them; the shapes of 29 agree; lm_head.weight is tied to "
            "model.embed_tokens.weight");
  std::vector<std::string> replicated;
  for (const Tensor& t : reader->catalog().tensors())
    if (!t.replicas.empty()) replicated.push_back(t.name);
  EXPECT_THAT(replicated, ElementsAre("optimizer.state.model.embed_tokens.weight.exp_avg",
                                      "optimizer.state.model.embed_tokens.weight.exp_avg_sq"));
  auto found = digests(load_checkpoint(kData + "tied_pp2"));
  EXPECT_EQ(found.extract("lm_head.weight").mapped(), found["model.embed_tokens.weight"]);
  EXPECT_EQ(found, digests("tied_pp2"));
  const CommandResult verified = reshard_cli({"verify", kData + "tied_pp2", "--replicas", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
}

// A shard that only repeats indexed tensors is not a leftover if total_size counts it.
TEST_F(RealColossalai, AShardThatTheIndexCountsAndDoesNotNameIsAReplica) {
  const std::string path = copy("tied_pp2");
  const TensorValues all = load_checkpoint(path);
  const std::string state = "optimizer.state.model.embed_tokens.weight.";
  const std::string shard = "optimizer/pytorch_optim-stage-00002-shard-00003.bin";
  write_file(path + "/" + shard,
             torch_file({{"0.exp_avg", all.at(state + "exp_avg")}, {"0.exp_avg_sq", all.at(state + "exp_avg_sq")}}));
  EXPECT_THAT(opened(path)->catalog().stale_files, ElementsAre(shard));
  const std::string index = path + "/optimizer/pytorch_optim.bin.index.json";
  Json json = index_of(index);
  set_total_size(json, total_size(json) + 2 * 512 * 48 * 4 / 1048576.0);
  write_file(index, to_text(json));
  const auto reader = opened(path);
  EXPECT_THAT(reader->catalog().stale_files, IsEmpty());
  EXPECT_THAT(reader->catalog().warnings, IsEmpty());
  EXPECT_EQ(reader->catalog().tensors()[*reader->catalog().find(state + "exp_avg")].replicas.size(), 2u);
}

// A shard that the index does not name and that cannot be opened for want of memory or descriptors may count.
TEST_F(RealColossalai, AShardThatCannotBeOpenedIsNotTakenForAStaleOne) {
  static const std::string kShard = "pytorch_model-stage-00001-00002-shard-00001.bin";
  static int error = 0;
  const std::string path = copy("mixtral_ep2") + "/modeling";
  const auto real = sys().open;
  static decltype(real) open_file = real;
  Syscalls calls = sys();
  calls.open = [](const char* name, int flags, mode_t mode) {
    if (error == 0 || !std::string(name).ends_with(kShard)) return open_file(name, flags, mode);
    errno = error;
    return -1;
  };
  const ScopedSyscalls scoped(calls);
  const auto expect_refused = [&](const OpenOptions& options) {
    for (const auto& [code, text] : {std::pair(EMFILE, "Too many open files"), {ENOMEM, "Cannot allocate memory"}}) {
      error = code;
      const auto open = open_checkpoint(path, options);
      error = 0;
      ASSERT_FALSE(open);
      EXPECT_EQ(open.error().code(), ErrorCode::kIo);
      EXPECT_THAT(open.error().message(), AllOf(HasSubstr(kShard + ": cannot open: " + text), Not(HasSubstr("index"))));
    }
  };
  expect_refused({});
  expect_refused({.skip_damaged = true});
  // A total_size that the named shards have shows that this one does not count, unless it is whole.
  const std::string index = path + "/pytorch_model.bin.index.json";
  const Json whole = index_of(index);
  Json smaller = whole;
  set_total_size(smaller, total_size(whole) / 2);
  write_file(index, to_text(smaller));
  expect_refused({.skip_damaged = true});
  // Without an index, the shards tell which save it was.
  fs::remove(index);
  expect_refused({});
  EXPECT_THAT(refusal(path), HasSubstr("expected an index next to"));
}

TEST_F(RealColossalai, ExpertsOfTwoRanksAndWhatBothWroteAreOneModel) {
  const std::string modeling = kData + "mixtral_ep2/modeling";
  const auto reader = opened(modeling);
  ASSERT_TRUE(reader);
  EXPECT_THAT(reader->catalog().warnings, IsEmpty());
  EXPECT_THAT(reader->catalog().stale_files, IsEmpty());
  EXPECT_EQ(reader->catalog().files.size(), 6u);
  const CommandResult hf = reshard_cli({"convert", modeling, dir_ / "hf", "--to", "hf"});
  EXPECT_EQ(hf.exit_code, 0) << hf.err;
  EXPECT_THAT(hf.out, HasSubstr("derived tensors or the trainer's own (model.rotary_emb.inv_freq)"));
  EXPECT_EQ(digests(load_checkpoint(dir_ / "hf")), digests("mixtral_ep2"));
  const CommandResult verified = reshard_cli({"verify", modeling, "--replicas", "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
}

// The index names one file for each tensor, but total_size counts all shards.
TEST_F(RealColossalai, ADamagedShardOfCopiesIsNotTakenForAStaleOne) {
  const std::string path = copy("mixtral_ep2") + "/modeling";
  const std::string copies = path + "/pytorch_model-stage-00001-00002-shard-00001.bin", bytes = read_file(copies);
  write_file(path + "/pytorch_model-stage-00001-00003-shard-00001.bin", "left by another save");
  const CommandResult stale = reshard_cli({"verify", path, "--fail-on", "error"});
  EXPECT_EQ(stale.exit_code, 0) << stale.out;
  EXPECT_THAT(stale.out, HasSubstr("1 file in the directory belongs to no tensor or object"));
  fs::remove(path + "/pytorch_model-stage-00001-00003-shard-00001.bin");
  write_file(copies, bytes.substr(0, bytes.size() / 2));
  const CommandResult damaged = reshard_cli({"verify", path});
  EXPECT_EQ(damaged.exit_code, 1) << damaged.out;
  EXPECT_THAT(damaged.out, HasSubstr("pytorch_model-stage-00001-00002-shard-00001.bin@"));
  EXPECT_THAT(damaged.out, Not(HasSubstr("belong")));
}

// The ids are those of the whole model, and the moments of an expert are flat.
TEST_F(RealColossalai, ExpertsAreInNumericOrderAndTheirMomentsGetTheirShape) {
  const std::string path = copy("mixtral_ep2");
  const std::string index = path + "/optimizer/pytorch_optim.bin.index.json";
  const Json json = index_of(index);
  std::map<std::string, TensorValues> shards;
  const auto members = *json.get_object("weight_map");
  constexpr Index kHidden = 48, kInner = 32, kVocabulary = 512, kKeyValue = 16;
  std::vector<Dims> shapes = {{kVocabulary, kHidden}};
  for (int layer = 0; layer < 2; ++layer) {
    for (const Index rows : {kHidden, kKeyValue, kKeyValue, kHidden, Index{4}}) shapes.push_back({rows, kHidden});
    for (int i = 0; i < 12; ++i) shapes.push_back({kInner * kHidden});
    for (int i = 0; i < 2; ++i) shapes.push_back({kHidden});
  }
  shapes.push_back({kHidden});
  shapes.push_back({kVocabulary, kHidden});
  ASSERT_EQ(members.size(), shapes.size());
  for (const Json::Member& m : members) {
    const auto id = static_cast<std::size_t>(std::stoi(m.key));
    shards[std::string(*m.value.as_string())][m.key + ".exp_avg"] = floats(shapes[id], static_cast<char>(id));
  }
  for (const auto& [name, states] : shards) write_file(path + "/optimizer/" + name, torch_file(states));
  const TensorValues all = load_checkpoint(path);
  const std::string layer = "optimizer.state.model.layers.0.block_sparse_moe.";
  EXPECT_EQ(all.at(layer + "gate.weight.exp_avg"), floats({4, kHidden}, 5));
  EXPECT_EQ(all.at(layer + "experts.0.w1.weight.exp_avg"), floats({kInner, kHidden}, 6));
  EXPECT_EQ(all.at(layer + "experts.1.w2.weight.exp_avg"), floats({kHidden, kInner}, 10));
  EXPECT_EQ(all.at(layer + "experts.3.w3.weight.exp_avg"), floats({kInner, kHidden}, 17));
  EXPECT_EQ(all.at("optimizer.state.model.layers.0.input_layernorm.weight.exp_avg"), floats({kHidden}, 18));
  EXPECT_EQ(all.at("optimizer.state.lm_head.weight.exp_avg"), floats({kVocabulary, kHidden}, 40));
}

TEST_F(RealColossalai, AnOptimizerThatHasNotStepped) {
  const std::string path = copy("tied_pp2");
  for (const auto& e : fs::directory_iterator(path + "/optimizer"))
    if (e.path().filename().string().find("shard") != std::string::npos) fs::remove(e.path());
  write_file(path + "/optimizer/pytorch_optim.bin.index.json",
             R"({"metadata": {"param_groups": "pytorch_optim_group.bin", "total_size": 0.0}, "weight_map": {}})");
  write_file(path + "/optimizer/pytorch_optim-00001.bin", torch_file({}));
  const auto reader = opened(path);
  EXPECT_THAT(reader->catalog().warnings, IsEmpty());
  EXPECT_THAT(reader->catalog().stale_files, IsEmpty());
  EXPECT_THAT(reader->catalog().notes, Contains(HasSubstr("The optimizer has no state yet")));
  EXPECT_EQ(values_of(*reader)["optimizer.param_groups.model.norm.weight.betas"], "(0.9, 0.95)");
}

// Release 0.4.7 does not list the pickled objects; its data begins where the pickle ends.
TEST_F(RealColossalai, AStepOfTheFirstAsynchronousReleaseIsAPickle) {
  const std::string header =
      R"({"__metadata__": {"format": "pt"}, "state.0.step": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}, )"
      R"("state.0.exp_avg": {"dtype": "F32", "shape": [2], "data_offsets": [5, 13]}, )"
      R"("state.0.bytes": {"dtype": "U8", "shape": [5], "data_offsets": [13, 18]}}  )";
  std::string file(8, '\0');
  file[0] = static_cast<char>(header.size() % 256);
  file[1] = static_cast<char>(header.size() / 256);
  file += header + std::string("\x80\x04K\x02.", 5) + std::string(8, '\1') + std::string("\x80\x04\xff\x02.", 5);
  const auto reader = opened(dir_.write("optim.safetensors", file));
  EXPECT_EQ(values_of(*reader), (std::map<std::string, std::string>{{"optimizer.state.0.step", "2"}}));
  EXPECT_TRUE(reader->catalog().find("optimizer.state.0.bytes"));  // not a pickle, although it begins and ends like one
  EXPECT_EQ(load_values(*reader)->at("optimizer.state.0.exp_avg"), floats({2}));
}

TEST_F(RealColossalai, AnUnshardedOptimizerIsOneAndHasTheParametersOfTheModelBesideIt) {
  const auto reader = opened(kData + "unsharded/optim.bin");
  ASSERT_TRUE(reader);
  EXPECT_THAT(reader->catalog().warnings, IsEmpty());
  EXPECT_THAT(evidence(*reader),
              HasSubstr("4 ids in the order in which the model defines them; the shapes of 4 agree"));
  EXPECT_EQ(reader->catalog().tensors()[*reader->catalog().find("optimizer.state.b.weight.exp_avg")].shape,
            (Dims{5, 3}));
  EXPECT_EQ(values_of(*reader)["optimizer.param_groups.a.bias.lr"], "0.01");
  EXPECT_EQ(open_checkpoint(kData + "unsharded/model.bin")->format->name, "bin");
  const std::string alone = dir_.write("optim.bin", read_file(kData + "unsharded/optim.bin"));
  EXPECT_TRUE(opened(alone)->catalog().find("optimizer.state.2.exp_avg"));
}

TEST_F(RealColossalai, AnOptimizerDirectoryHasTheParametersOfModelingBesideIt) {
  const std::string path = copy("tied_pp2");
  const auto reader = opened(path + "/optimizer");
  EXPECT_THAT(evidence(*reader), HasSubstr("lm_head.weight is tied to model.embed_tokens.weight; the model is "));
  EXPECT_THAT(reader->catalog().warnings, IsEmpty());
  const std::string config = path + "/modeling/config.json";
  const CommandResult verified =
      reshard_cli({"verify", path + "/optimizer", "--config", config, "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  EXPECT_THAT(verified.out, HasSubstr("there is optimizer state and no model"));
  fs::rename(path + "/modeling", dir_ / "elsewhere");
  EXPECT_THAT(opened(path + "/optimizer")->catalog().warnings, ElementsAre(HasSubstr("29 ids for 0 parameters")));
}

TEST_F(RealColossalai, MomentsOfFusedLayersMayBePermuted) {
  const TensorValues model = {{"transformer.h.0.attn.c_attn.weight", floats({4, 12})},
                              {"transformer.wte.weight", floats({9, 4})}};
  const std::string path = dir_ / "tree";
  dir_.write("tree/modeling/pytorch_model.bin", torch_file(model));
  dir_.write("tree/optimizer/pytorch_optim.bin",
             torch_file({{"0.exp_avg", floats({4, 12})}, {"1.exp_avg", floats({9, 4})}}));
  const auto reader = opened(path);
  ASSERT_TRUE(reader->catalog().find("optimizer.state.transformer.h.0.attn.c_attn.weight.exp_avg"));
  EXPECT_THAT(reader->catalog().notes, Contains(HasSubstr("the moments of fused layers are ordered differently")));
  const std::string text = reshard_cli({"plan", path, dir_ / "o", "--to", "dcp", "--names", "keep"}).out;
  EXPECT_THAT(text, HasSubstr("If the run was tensor-parallel"));
  EXPECT_THAT(reshard_cli({"plan", path, dir_ / "o", "--to", "hf", "--names", "keep"}).out,
              Not(HasSubstr("If the run was tensor-parallel")));
}

TEST_F(RealColossalai, OnlyAnApplicationsStepNeedsItsRunningStates) {
  EXPECT_THAT(opened(kData + "tied_pp2")->catalog().notes, ElementsAre(HasSubstr("running_states.json is missing")));
  const std::string step = copy("tied_pp2", "epoch-0_step-2");
  EXPECT_THAT(opened(step)->catalog().warnings, ElementsAre(HasSubstr("so this save did not finish")));
  fs::remove_all(step + "/optimizer");
  EXPECT_THAT(opened(step)->catalog().warnings, ElementsAre(HasSubstr("there is no optimizer/")));
  EXPECT_TRUE(opened(step + "/modeling")->catalog().lacks_optimizer);
  fs::rename(step, dir_ / "final");
  EXPECT_THAT(opened(dir_ / "final")->catalog().warnings, IsEmpty());
  EXPECT_THAT(opened(dir_ / "final")->catalog().notes, ElementsAre(HasSubstr("there is no optimizer/")));
  EXPECT_FALSE(opened(dir_ / "final/modeling")->catalog().lacks_optimizer);
}

// The assertion of a tensor-parallel save ends the stages that have the vocabulary; the others write their shards.
TEST_F(RealColossalai, AnOptimizerOfSomeStagesNamesTheAssertion) {
  const std::string path = copy("tied_pp2");
  fs::remove(path + "/optimizer/pytorch_optim.bin.index.json");
  fs::remove(path + "/optimizer/pytorch_optim-stage-00001-shard-00001.bin");
  EXPECT_THAT(opened(path)->catalog().warnings, Contains(HasSubstr("The parameter isn't evenly distributed")));
}

TEST_F(RealColossalai, ShardsWithoutIndexAndHeadNameWhyTheHeadIsMissing) {
  const TensorValues shard = {{"model.embed_tokens.weight", floats({1301, 2})},
                              {"model.layers.0.mlp.up_proj.weight", floats({4, 2})}};
  dir_.write("m/pytorch_model-00001.bin", torch_file(shard));
  EXPECT_THAT(refusal(dir_ / "m"), HasSubstr("1,301 rows and no head"));
  EXPECT_THAT(refusal(dir_ / "m"), HasSubstr("ColossalAI#6253"));
  dir_.write("m/pytorch_model-00002.bin", torch_file({{"lm_head.weight", floats({1301, 2})}}));
  EXPECT_THAT(refusal(dir_ / "m"), HasSubstr("the save was interrupted before it was written"));
}

// Each group has a list of its ids. A list that groups share would name every parameter many times.
TEST_F(RealColossalai, GroupsThatShareTheirIdsAreRefused) {
  using namespace pickled;
  const std::string path = copy("tied_pp2");
  const std::string groups = path + "/optimizer/pytorch_optim_group.bin";
  const Value group = dict({{text("params"), list({integer(0), integer(1)})}, {text("lr"), number(0.1)}});
  write_file(groups, torch_archive::object_item(bytes_of(list({group, group}))));
  EXPECT_THAT(refusal(path), HasSubstr("expected an id of one group"));
}

}  // namespace
}  // namespace reshard::real_test
