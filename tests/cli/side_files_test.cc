// Tests the files next to a model's tensors: they are copied if loaders need them, otherwise reported.
#include "lib/checkpoint/side_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/must.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::side_files_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class FilesBesideAModel : public testing::Test {
 protected:
  FilesBesideAModel() { fs::copy(test_data("moe/qwen3_5_moe"), source_, fs::copy_options::recursive); }

  void write(const std::string& name, const std::string& text) {
    fs::create_directories(fs::path(source_ + "/" + name).parent_path());
    write_file(source_ + "/" + name, text);
  }
  CommandResult convert(const std::vector<std::string>& more = {}, const std::string& to = "hf") {
    std::vector<std::string> all = {"convert", source_, out_, "--to", to};
    all.insert(all.end(), more.begin(), more.end());
    return reshard_cli(all);
  }
  std::string config() const { return read_file(source_ + "/config.json"); }
  void set_in_config(const std::string& members) {
    std::string text = config();
    text.insert(text.find('{') + 1, members + ",");
    write("config.json", text);
  }

  const TempDir dir_;
  const std::string source_ = dir_ / "source", out_ = dir_ / "out";
};

// Python's json.dump writes them, and its json.load reads them.
TEST_F(FilesBesideAModel, AConfigMayHoldNumbersThatAreNotFinite) {
  set_in_config(R"("attn_logit_cap": Infinity, "list": [NaN, -Infinity])");
  ASSERT_EQ(convert().exit_code, 0);
  EXPECT_EQ(read_file(out_ + "/config.json"), config());
  const CommandResult r = convert({"--dtype", "float16", "--force"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(read_file(out_ + "/config.json"),
              AllOf(HasSubstr("\"attn_logit_cap\": Infinity,"), HasSubstr("NaN,\n"), HasSubstr("-Infinity\n")));
  EXPECT_EQ(reshard_cli({"verify", source_, "--fail-on", "warning"}).exit_code, 0);
}

// sentence-transformers' modules, and code of a model's own.
TEST_F(FilesBesideAModel, WhatLoadersWantIsCarried) {
  const std::vector<std::string> names = {"modules.json",
                                          "config_sentence_transformers.json",
                                          "sentence_bert_config.json",
                                          "1_Pooling/config.json",
                                          "2_Dense/config.json",
                                          "2_Dense/model.safetensors",
                                          "modeling_own.py",
                                          "additional_chat_templates/tools.jinja"};
  for (const std::string& name : names) write(name, "of " + name);
  set_in_config(R"("auto_map": {"AutoModel": "modeling_own.OwnModel"})");
  for (const std::string to : {"hf", "bin", "hf"}) {  // replaces the previous output
    const CommandResult r = convert({"--force"}, to);
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_THAT(r.out, Not(HasSubstr("files next to the model")));
    for (const std::string& name : names) EXPECT_EQ(read_file(out_ + "/" + name), "of " + name);
  }
}

// transformers loads the files that auto_map names, and those that they import; trainers leave scripts of their own.
TEST_F(FilesBesideAModel, OnlyCodeThatConfigsNameIsCarried) {
  set_in_config(R"("auto_map": {"AutoModel": "modeling_own.OwnModel", "AutoConfig": "a/b--configuration_far.Config"})");
  write("tokenizer_config.json", R"({"auto_map": {"AutoTokenizer": ["tokenization_own.Slow", null]}})");
  write("modules.json",
        R"([{"idx": 0, "type": "pooling_own.Pooling"}, {"idx": 1, "type": "sentence_transformers.models.Normalize"}])");
  write("modeling_own.py", "import torch\nfrom .layers import (A,\n  B)\nfrom . import ops, masks as m  # both\n");
  write("layers.py", "  from .deep.er import x\nfrom ..above import y\nimport tools\n");
  const std::vector<std::string> carried = {"modeling_own.py", "layers.py",           "deep.py",       "ops.py",
                                            "masks.py",        "tokenization_own.py", "pooling_own.py"};
  const std::vector<std::string> others = {"zero_to_fp32.py", "train.py", "configuration_far.py",        "tools.py",
                                           "above.py",        "setup.py", "sentence_transformers.py.bak"};
  for (const auto* list : {&carried, &others})
    for (const std::string& name : *list)
      if (!fs::exists(source_ + "/" + name)) write(name, "# " + name);
  const CommandResult r = convert();
  ASSERT_EQ(r.exit_code, 0) << r.err;
  for (const std::string& name : carried) EXPECT_TRUE(fs::exists(out_ + "/" + name)) << name;
  for (const std::string& name : others) EXPECT_FALSE(fs::exists(out_ + "/" + name)) << name;
  EXPECT_THAT(r.out, HasSubstr("left out: files next to the model (above.py, configuration_far.py, "));
}

TEST_F(FilesBesideAModel, WhatStaysIsTold) {
  write("training_args.bin", "12345");
  write("onnx/model.onnx", "123");
  write(".gitattributes", "1");
  write("special_tokens_map.json", "{}");
  const CommandResult r = convert();
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("left out: files next to the model (onnx/, training_args.bin; 5 B)"));
  EXPECT_FALSE(fs::exists(out_ + "/training_args.bin"));
  const Json manifest = must(parse_json(read_file(out_ + "/reshard_manifest.json"), "manifest"));
  EXPECT_THAT(to_text(*manifest.find("left_out")), HasSubstr(R"("names":["onnx/","training_args.bin"])"));
  EXPECT_THAT(convert({"--force"}, "dcp").out, Not(HasSubstr("files next to"))) << "which none of them is for";
}

TEST_F(FilesBesideAModel, WhatCannotBeCopiedIsToldBeforeAnythingIsWritten) {
  write("tokenizer.json", "");
  fs::resize_file(source_ + "/tokenizer.json", kMaxSideFile + 1);
  const CommandResult r = convert({"--dry-run"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("tokenizer.json: expected a side file of at most 268,435,456 bytes"));
}

// diffusers' config.json names the class instead of a model_type, and its loaders look for files with other names.
class AModelOfDiffusers : public FilesBesideAModel {
 protected:
  AModelOfDiffusers() {
    fs::remove_all(source_);
    write("config.json", R"({"_class_name": "UNet2DModel", "_diffusers_version": "0.30.0", "sample_size": 8})");
    const std::string header = R"({"conv_in.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
                               R"("mid_block.attn.weight":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}})";
    const std::string length = {static_cast<char>(header.size()), 0, 0, 0, 0, 0, 0, 0};
    write("diffusion_pytorch_model.safetensors", length + header + std::string(32, '\x3f'));
  }
};

TEST_F(AModelOfDiffusers, IsWrittenUnderItsLoadersNames) {
  CommandResult r = convert({"--dtype", "float16"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(read_file(out_ + "/config.json"), config());
  EXPECT_TRUE(fs::exists(out_ + "/diffusion_pytorch_model.safetensors"));
  r = convert({"--force"}, "bin");
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(fs::exists(out_ + "/diffusion_pytorch_model.bin"));
  EXPECT_EQ(load_checkpoint(out_), load_checkpoint(source_));
  r = convert({"--force", "--max-shard-size", "16"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(fs::exists(out_ + "/diffusion_pytorch_model.safetensors.index.json"));
}

TEST_F(FilesBesideAModel, AConfigThatNamesNoTypeIsCopied) {
  fs::remove_all(source_);
  write("config.json", R"({"d_model": 64})");
  fs::copy(sample("tp8") + "/hf.safetensors", source_ + "/model.safetensors");
  const CommandResult r = convert();
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.out, AllOf(HasSubstr("has no model_type, so it does not describe a model and is ignored"),
                           HasSubstr("config.json is copied unchanged"), Not(HasSubstr("left out"))));
  EXPECT_EQ(read_file(out_ + "/config.json"), config());
}

}  // namespace
}  // namespace reshard::side_files_test
