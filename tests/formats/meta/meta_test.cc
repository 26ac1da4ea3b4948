#include "formats/meta/meta.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "formats/open.h"
#include "formats/tensor_files/target.h"
#include "lib/model/config.h"
#include "tests/support/checkpoints.h"
#include "tests/support/digests.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::meta_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Two ranks of a Llama 2, written as Meta's code does: the embedding is cut by columns, the vocabulary is -1, and
// rope.freqs is stored.
const std::string kLlama2 = "meta/llama2-tp2";

class Meta : public testing::Test {
 protected:
  // Returns the directory of a copy.
  std::string copy() {
    const std::string path = dir_ / "meta";
    fs::copy(test_data(kLlama2), path);
    return path;
  }
  // Writes one rank's torch.save file.
  static void write_rank(const std::string& path, const TensorValues& values, Index rank) {
    TensorFilesTarget target;
    std::vector<TargetTensor> tensors;
    for (const auto& [name, value] : values) tensors.push_back({name, value.dtype, value.shape, {name}, {}});
    char file[32];
    std::snprintf(file, sizeof file, "consolidated.%02d.pth", static_cast<int>(rank));
    ASSERT_TRUE(target.add_whole(file, Container::kTorchSave, tensors));
    write_target(values, target, path + ".made");
    fs::create_directories(path);
    fs::rename(path + ".made/" + file, path + "/" + file);
    fs::remove_all(path + ".made");
  }

  const TempDir dir_;
};

TEST_F(Meta, BecomesTheModelWithAConfigOfItsOwn) {
  const std::string out = dir_ / "hf";
  const CommandResult r = reshard_cli({"convert", test_data(kLlama2), out, "--to", "hf", "-q"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(digests_of(load_checkpoint(out)), read_digests(test_data(kLlama2 + ".hf.json")));
  const auto config = read_config(out + "/config.json");
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->architecture, "LlamaForCausalLM");
  EXPECT_EQ(config->vocab_size(), 258);  // params.json has -1
  EXPECT_EQ(config->number("intermediate_size"), 176);
  EXPECT_EQ(config->num_key_value_heads(), 8);
  EXPECT_EQ(config->dtype, "bfloat16");
  EXPECT_FALSE(config->tie_word_embeddings());
  const CommandResult verified = reshard_cli({"verify", out, "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
}

TEST_F(Meta, TheConfigThatIsMadeCountsForEveryCommand) {
  const CommandResult verified = reshard_cli({"verify", test_data(kLlama2), "--fail-on", "warning"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
  EXPECT_THAT(verified.out, HasSubstr("Llama, 21 tensors, 133,696 parameters"));
  const std::string out = dir_ / "dcp";
  ASSERT_EQ(reshard_cli({"convert", test_data(kLlama2), out, "--to", "dcp", "--mesh", "tp=4", "-q"}).exit_code, 0);
  fs::remove(out + "/config.json");
  const CommandResult compared = reshard_cli({"diff", test_data(kLlama2), out});
  EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
  // A config.json next to the files takes precedence.
  const std::string path = copy();
  write_file(path + "/config.json", R"({"model_type": "llama", "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 8})");
  EXPECT_EQ(reshard_cli({"verify", path}).exit_code, 1);
}

TEST_F(Meta, AFileOfARankStandsForAll) {
  const auto open = open_checkpoint(test_data(kLlama2) + "/consolidated.01.pth");
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(open->format, &kMetaFormat);
  EXPECT_EQ(open->reader->catalog().files.size(), 2u);
  EXPECT_EQ(open->reader->catalog().metadata_files, std::vector<std::string>{"params.json"});
}

TEST_F(Meta, MissingAndDamagedFilesAreNamed) {
  std::string path = copy();
  fs::remove(path + "/consolidated.01.pth");
  EXPECT_EQ(error_of_opening(path),
            "D: expected the files of 2 ranks, as 'attention.wo' should have 64 columns; got 1 file with "
            "32");
  fs::copy(path + "/consolidated.00.pth", path + "/consolidated.02.pth");
  EXPECT_THAT(error_of_opening(path), HasSubstr("D: the file of rank 1 is missing"));
  fs::remove(path + "/consolidated.00.pth");
  EXPECT_THAT(error_of_opening(path),
              HasSubstr("D: the files of ranks 0, 1 are missing; got 1 file, of ranks up to 2"));

  const std::string whole = read_file(test_data(kLlama2) + "/consolidated.01.pth");
  fs::remove(path + "/consolidated.02.pth");
  fs::copy(test_data(kLlama2) + "/consolidated.00.pth", path + "/consolidated.00.pth");
  for (const std::size_t length : {std::size_t{0}, std::size_t{1000}, whole.size() - 1}) {
    write_file(path + "/consolidated.01.pth", std::string_view(whole).substr(0, length));
    EXPECT_THAT(error_of_opening(path), HasSubstr("D/consolidated.01.pth")) << length;
  }
  // The archive's checksums reveal a flipped byte of a tensor.
  std::string damaged = whole;
  damaged[whole.size() / 2] = static_cast<char>(damaged[whole.size() / 2] ^ 1);
  write_file(path + "/consolidated.01.pth", damaged);
  EXPECT_EQ(error_of_opening(path), "");
  EXPECT_EQ(reshard_cli({"verify", path}).exit_code, 1);
}

TEST_F(Meta, ParamsThatMakeNoModelAreSaid) {
  const std::string path = copy();
  const auto converted = [&](const std::string& params) {
    write_file(path + "/params.json", params);
    const CommandResult r = reshard_cli({"convert", path, dir_ / "out", "--to", "hf", "-q"});
    EXPECT_NE(r.exit_code, 0) << params;
    return r.err;
  };
  EXPECT_THAT(converted("{"), HasSubstr("params.json"));
  EXPECT_THAT(converted("[]"), HasSubstr("params.json: dim"));
  EXPECT_THAT(converted(R"({"dim": 64, "n_layers": 2})"), HasSubstr("params.json: n_heads"));
  EXPECT_THAT(converted(R"({"dim": "64", "n_heads": 8, "n_layers": 2})"), HasSubstr("params.json: dim"));
  EXPECT_THAT(converted(R"({"dim": 64, "n_heads": 8, "n_layers": 2})"), HasSubstr("params.json: multiple_of"));
  EXPECT_THAT(converted(R"({"dim": 64, "n_heads": 8, "n_layers": 2, "multiple_of": 1000000000000000000})"),
              HasSubstr("params.json: multiple_of"));
  EXPECT_THAT(converted(R"({"dim": 64, "n_heads": 8, "n_layers": 2, "multiple_of": 8, "ffn_dim_multiplier": 1e300})"),
              HasSubstr("params.json: ffn_dim_multiplier"));
  // The params.json of another model.
  EXPECT_THAT(converted(R"({"dim": 64, "n_heads": 8, "n_layers": 3, "multiple_of": 8})"), HasSubstr("missing"));
  EXPECT_THAT(converted(R"({"dim": 64, "n_heads": 8, "n_layers": 2, "multiple_of": 256})"), HasSubstr("[256, 64]"));
}

TEST_F(Meta, Llama3CutsTheEmbeddingByRows) {
  const auto value = [](const Dims& shape, char first) {
    TensorValue v{DType::kUint8, shape, std::string(static_cast<std::size_t>(volume(shape)), '\0')};
    for (std::size_t i = 0; i < v.bytes.size(); ++i) v.bytes[i] = static_cast<char>(first + static_cast<char>(i));
    return v;
  };
  const std::string path = dir_ / "llama3";
  const TensorValue norm = value({4}, 0);
  write_rank(path, {{"tok_embeddings.weight", value({3, 4}, 0)}, {"norm.weight", norm}}, 0);
  write_rank(path, {{"tok_embeddings.weight", value({3, 4}, 12)}, {"norm.weight", norm}}, 1);
  EXPECT_EQ(load_checkpoint(path), (TensorValues{{"tok_embeddings.weight", value({6, 4}, 0)}, {"norm.weight", norm}}));
  // Cut neither by rows nor by columns.
  write_rank(path, {{"tok_embeddings.weight", value({3, 3}, 0)}, {"norm.weight", norm}}, 0);
  write_rank(path, {{"tok_embeddings.weight", value({3, 3}, 0)}, {"norm.weight", norm}}, 1);
  EXPECT_THAT(error_of_opening(path),
              HasSubstr("tensor 'tok_embeddings.weight': expected rows of 4 columns, or 4/2 columns"));
  // A tensor of no known module.
  write_rank(path, {{"vision.weight", value({3, 3}, 0)}}, 0);
  write_rank(path, {{"vision.weight", value({3, 3}, 0)}}, 1);
  EXPECT_THAT(error_of_opening(path),
              HasSubstr("tensor 'vision.weight': is in the files of 2 ranks, and is not a tensor of Llama"));
  // A tensor that one rank lacks, or has in another shape.
  write_rank(path, {{"norm.weight", norm}, {"output.weight", value({2, 4}, 0)}}, 0);
  write_rank(path, {{"norm.weight", norm}}, 1);
  EXPECT_EQ(error_of_opening(path),
            "D/consolidated.01.pth: expected tensor 'output.weight', as consolidated.00.pth has it; it is missing");
  write_rank(path, {{"norm.weight", norm}, {"output.weight", value({2, 5}, 0)}}, 1);
  EXPECT_EQ(error_of_opening(path),
            "D/consolidated.01.pth: tensor 'output.weight': expected uint8 [2, 4] as in consolidated.00.pth, got uint8 "
            "[2, 5]");
}

// ---- Mistral's

class Mistral : public Meta {
 protected:
  // Makes Hugging Face's files of the model, and Mistral's.
  void SetUp() override {
    const std::string own = dir_ / "own";
    ASSERT_EQ(reshard_cli({"convert", test_data(kLlama2), hf_, "--to", "hf", "-q"}).exit_code, 0);
    ASSERT_EQ(reshard_cli({"convert", hf_, own, "--to", "hf", "--names", "torchtitan", "-q"}).exit_code, 0);
    fs::create_directory(path_);
    fs::rename(own + "/model.safetensors", path_ + "/consolidated.safetensors");
    write_file(path_ + "/params.json", R"({"dim": 64, "n_layers": 2, "head_dim": 8, "hidden_dim": 176, "n_heads": 8,
      "n_kv_heads": 8, "norm_eps": 1e-06, "vocab_size": 258, "rope_theta": 1000000.0})");
  }
  const std::string hf_ = dir_ / "hf", path_ = dir_ / "mistral";
};

TEST_F(Mistral, ConsolidatedBecomesTheModel) {
  const std::string out = dir_ / "out";
  const CommandResult r = reshard_cli({"convert", path_, out, "--to", "hf", "-q"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(load_checkpoint(out), load_checkpoint(hf_));
  const auto config = read_config(out + "/config.json");
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->architecture, "MistralForCausalLM");
  EXPECT_EQ(config->number("intermediate_size"), 176);
  EXPECT_THAT(read_file(out + "/config.json"), HasSubstr("\"sliding_window\": null"));
}

TEST_F(Mistral, SeveralFilesNeedTheirIndex) {
  fs::rename(path_ + "/consolidated.safetensors", path_ + "/consolidated-00001-of-00002.safetensors");
  fs::copy(path_ + "/consolidated-00001-of-00002.safetensors", path_ + "/consolidated-00002-of-00002.safetensors");
  EXPECT_THAT(error_of_opening(path_), HasSubstr("consolidated.safetensors.index.json"));
  const TensorValues model = load_checkpoint(path_ + "/consolidated-00001-of-00002.safetensors");
  std::string map;
  for (const auto& [name, value] : model)
    map += (map.empty() ? "\"" : ", \"") + name + "\": \"consolidated-00001-of-00002.safetensors\"";
  write_file(path_ + "/consolidated.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
  EXPECT_EQ(load_checkpoint(path_), model);
}

// A directory as mistralai publishes it.
TEST_F(Mistral, BesideHuggingFacesFilesItIsNoPartOfTheModel) {
  fs::copy(path_ + "/consolidated.safetensors", hf_ + "/consolidated.safetensors");
  fs::copy(path_ + "/params.json", hf_ + "/params.json");
  fs::copy(path_ + "/consolidated.safetensors", hf_ + "/adapter_model.safetensors");
  const auto open = open_checkpoint(hf_);
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(open->format->name, "hf");
  EXPECT_EQ(open->reader->catalog().files.size(), 1u);
  EXPECT_EQ(open->reader->catalog().stale_files, std::vector<std::string>());
  EXPECT_EQ(reshard_cli({"verify", hf_, "--fail-on", "warning"}).exit_code, 0);
  EXPECT_THAT(reshard_cli({"inspect", hf_}).out, testing::Not(HasSubstr("torchtitan")));
  // If its path is given it is opened, and is the same model.
  const CommandResult r = reshard_cli({"diff", hf_, hf_ + "/consolidated.safetensors"});
  EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
  // The same with an index.
  write_file(hf_ + "/model.safetensors.index.json", [&] {
    std::string map;
    for (const auto& [name, value] : load_checkpoint(hf_ + "/model.safetensors"))
      map += (map.empty() ? "\"" : ", \"") + name + "\": \"model.safetensors\"";
    return "{\"weight_map\": {" + map + "}}";
  }());
  const auto indexed = open_checkpoint(hf_);
  ASSERT_TRUE(indexed) << indexed.error().message();
  EXPECT_EQ(indexed->reader->catalog().stale_files, std::vector<std::string>());
}

TEST_F(Mistral, ModelsThatAreThereTwiceAreOneFindingThatNamesTheFiles) {
  fs::copy(path_ + "/consolidated.safetensors", hf_ + "/more.safetensors");
  fs::remove(hf_ + "/reshard_manifest.json");
  const CommandResult verified = reshard_cli({"verify", hf_});
  EXPECT_THAT(verified.out, HasSubstr("1 error, 0 warnings"));
  EXPECT_THAT(verified.out, HasSubstr("21 parameters, each stored under two names"));
  EXPECT_THAT(verified.out, HasSubstr("more.safetensors"));
  const CommandResult r = reshard_cli({"convert", hf_, dir_ / "out", "--to", "hf", "-q"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_THAT(r.err, HasSubstr("21 tensors are stored twice, under two names; add --exclude to leave one of them out"));
  EXPECT_THAT(r.err, HasSubstr("model.layers.0.input_layernorm.weight of more.safetensors and of model.safetensors"));
  EXPECT_THAT(r.err, HasSubstr("and 17 more"));
}

}  // namespace
}  // namespace reshard::meta_test
