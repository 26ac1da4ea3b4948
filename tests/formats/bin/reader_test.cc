#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "formats/bin/bin.h"
#include "formats/open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::bin_reader_test {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

const std::string kData = RESHARD_TEST_DATA "/torch_save/";

std::vector<std::string> names(const Catalog& catalog) {
  std::vector<std::string> out;
  for (const Tensor& t : catalog.tensors()) out.push_back(t.name);
  return out;
}

class TorchFormat : public testing::Test {
 protected:
  std::string refusal(const std::string& path) {
    const auto open = open_checkpoint(path);
    return open ? "accepted" : open.error().message();
  }
  TempDir dir_;
};

TEST_F(TorchFormat, BothContainersHoldTheSameValues) {
  const TensorValues zip = load_checkpoint(kData + "mixed.pt");
  EXPECT_EQ(load_checkpoint(kData + "mixed_legacy.pt"), zip);
  EXPECT_EQ(zip.at("model.transposed").shape, (Dims{6, 4}));
  float second;
  std::memcpy(&second, zip.at("model.transposed").bytes.data() + 4, 4);
  EXPECT_EQ(second, 6.0f) << "row 0, column 1 of the transpose";
}

TEST_F(TorchFormat, AnUnshardedSaveIsTheModelWithItsTie) {
  TensorValues full = load_checkpoint(sample("colossalai/full.safetensors"));
  full["lm_head.weight"] = full["model.embed_tokens.weight"];
  EXPECT_EQ(load_checkpoint(sample("colossalai/unsharded_tied.bin")), full);
  EXPECT_EQ(load_checkpoint(sample("colossalai/unsharded_tied_legacy.bin")), full);
  const auto open = open_checkpoint(sample("colossalai/unsharded_tied.bin"));
  ASSERT_TRUE(open);
  EXPECT_EQ(open->format, &kBinFormat);
  EXPECT_TRUE(open->reader->catalog().shares_extents);
}

TEST_F(TorchFormat, ADirectoryIsTheOneFileInItThatHasAUsualName) {
  const std::string saved = RESHARD_TEST_DATA "/nanogpt/biased.pt";
  dir_.write("notes.txt", "hello");
  std::filesystem::copy_file(kData + "mixed.pt", dir_ / "optimizer.pt");
  EXPECT_THAT(refusal(dir_.path()), HasSubstr("unrecognised format; supported: "));
  std::filesystem::copy_file(saved, dir_ / "ckpt.pt");
  EXPECT_EQ(load_checkpoint(dir_.path()), load_checkpoint(saved));
  std::filesystem::copy_file(saved, dir_ / "epoch=3-step=10.ckpt");
  EXPECT_THAT(refusal(dir_.path()), HasSubstr("ckpt.pt"));
  EXPECT_THAT(refusal(dir_.path()), HasSubstr("epoch=3-step=10.ckpt"));
  EXPECT_THAT(refusal(dir_.path()), HasSubstr("open one of them by its path"));
  dir_.write("\x1b[31m.ckpt", "x");
  EXPECT_THAT(refusal(dir_.path()), testing::Not(HasSubstr("\x1b")));
  std::filesystem::remove(dir_ / "\x1b[31m.ckpt");
  std::filesystem::remove(dir_ / "ckpt.pt");
  EXPECT_EQ(load_checkpoint(dir_.path()), load_checkpoint(saved));
  dir_.write("epoch=3-step=10.ckpt", "of another program");
  EXPECT_THAT(refusal(dir_.path()), HasSubstr("unrecognised format; supported: "));
}

// LitGPT saves an adapter as the only file with weights. Merging it adds the model.
TEST_F(TorchFormat, AnAdapterOfLitGptIsReadIfNoModelIsNextToIt) {
  std::filesystem::copy_file(kData + "nested.pt", dir_ / "lit_model.pth.lora");
  dir_.write("model_config.yaml", "name: tiny\n");
  EXPECT_EQ(load_checkpoint(dir_.path()), load_checkpoint(kData + "nested.pt"));
  std::filesystem::copy_file(kData + "mixed.pt", dir_ / "lit_model.pth");
  EXPECT_EQ(load_checkpoint(dir_.path()), load_checkpoint(kData + "mixed.pt"));
}

TEST_F(TorchFormat, AVariantIsReadOnlyAlone) {
  std::filesystem::copy_file(kData + "nested.pt", dir_ / "pytorch_model.fp16.bin");
  EXPECT_EQ(load_checkpoint(dir_.path()), load_checkpoint(kData + "nested.pt"));
  std::filesystem::copy_file(kData + "bare.pt", dir_ / "pytorch_model.bf16.bin");
  EXPECT_THAT(refusal(dir_.path()), HasSubstr("open one of them by its path"));
  std::filesystem::copy_file(kData + "bare.pt", dir_ / "pytorch_model.bin");
  dir_.write("pytorch_model.bin.index.fp16.json", R"({"weight_map":{"w":"pytorch_model.fp16.bin"}})");
  EXPECT_EQ(load_checkpoint(dir_.path()), load_checkpoint(kData + "bare.pt"));
  EXPECT_EQ(load_checkpoint(dir_ / "pytorch_model.bin.index.fp16.json"), load_checkpoint(kData + "nested.pt"));
  dir_.write("pytorch_model.bin.index.json", R"({"weight_map":{"value":"pytorch_model.bin"}})");
  const auto open = open_checkpoint(dir_.path());
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_THAT(open->reader->catalog().stale_files, testing::IsEmpty());
}

// An argparse.Namespace has no tensors in it; a module has.
TEST_F(TorchFormat, OnlyInstancesWithTensorsAreWarnedOf) {
  const auto plain = open_checkpoint(kData + "with_args.pt");
  ASSERT_TRUE(plain) << plain.error().message();
  EXPECT_THAT(plain->reader->catalog().warnings, testing::IsEmpty());
  const auto with_module = open_checkpoint(kData + "with_module.pt");
  ASSERT_TRUE(with_module) << with_module.error().message();
  EXPECT_THAT(with_module->reader->catalog().warnings, ElementsAre(HasSubstr("not read: 1 object: 'head'.")));
  EXPECT_EQ(refusal(kData + "module.pt"), kData + "module.pt: its tensors are in instances of classes, which are not " +
                                              "read: 1 object: 'value'; save their state_dict() instead");
}

TEST_F(TorchFormat, AnIndexThatIsGoneIsAnError) {
  dir_.write("notes.txt", "hello");
  EXPECT_FALSE(open_if_known(dir_ / "pytorch_model.bin.index.json"));
}

TEST_F(TorchFormat, LeavesOutTheWordThatAllTensorsAreUnder) {
  const auto open = open_checkpoint(kData + "mixed.pt");
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_THAT(names(open->reader->catalog()), Contains("model.view")) << "not all tensors are under it";
  EXPECT_THAT(open->reader->catalog().attributes, ElementsAre(Pair("format", "torch.save, 1 file")));
  const auto nested = open_checkpoint(kData + "nested.pt");
  ASSERT_TRUE(nested) << nested.error().message();
  EXPECT_THAT(names(nested->reader->catalog()), ElementsAre("w"));
  EXPECT_THAT(nested->reader->catalog().attributes,
              Contains(Pair("names", "all tensors are under 'model', which is left out of their names")));
  ASSERT_EQ(nested->reader->catalog().blobs.size(), 1u);
  EXPECT_EQ(nested->reader->describe(nested->reader->catalog().blobs[0]), "3");
}

TEST_F(TorchFormat, ReadsHuggingFaceDirectories) {
  const std::string bytes = read_file(kData + "protocol4.pt");
  dir_.write("pytorch_model-00001-of-00001.bin", bytes);
  EXPECT_EQ(refusal(dir_.path()), "accepted") << "one of one needs no index";
  dir_.write("first/pytorch_model-00001-of-00002.bin", bytes);
  EXPECT_THAT(refusal(dir_ / "first"), HasSubstr("expected an index next to 1 file"));
  dir_.write("torchtune/model-00001-of-00001.bin", bytes);
  EXPECT_EQ(refusal(dir_ / "torchtune"), "accepted");
  const auto with = [&](const std::string& map) {
    dir_.write("pytorch_model.bin.index.json", "{\"weight_map\": " + map + "}");
    return refusal(dir_.path());
  };
  EXPECT_EQ(with(R"({"w": "pytorch_model-00001-of-00001.bin"})"), "accepted");
  EXPECT_EQ(refusal(dir_ / "pytorch_model.bin.index.json"), "accepted");
  dir_.write("other.bin.index.json", R"({"weight_map": {"w": "absent.bin"}})");
  EXPECT_THAT(refusal(dir_.path()), HasSubstr("expected one index, got 2 files"));
  EXPECT_EQ(refusal(dir_ / "pytorch_model.bin.index.json"), "accepted");
  EXPECT_THAT(refusal(dir_ / "other.bin.index.json"), HasSubstr("absent.bin: cannot open: No such file"));
  std::filesystem::remove(dir_ / "other.bin.index.json");
  EXPECT_THAT(
      with(R"({"w": "pytorch_model-00002-of-00002.bin"})"),
      HasSubstr("cannot open: No such file or directory; pytorch_model-00001-of-00001.bin, which the index does "
                "not name, has its tensors: correct the index if that file is of the same save; affected: 1 "
                "tensor: 'w'"));
  EXPECT_THAT(with(R"({"w": "pytorch_model-00001-of-00001.bin", "v": "pytorch_model-00001-of-00001.bin"})"),
              HasSubstr("expected tensor 'v'"));
  dir_.write("single/pytorch_model.bin", bytes);
  const auto single = open_checkpoint(dir_ / "single");
  ASSERT_TRUE(single) << single.error().message();
  EXPECT_EQ(single->format, &kBinFormat);
}

TEST_F(TorchFormat, IsRecognisedByItsBytes) {
  dir_.write("anything", read_file(kData + "protocol4_legacy.pt"));
  EXPECT_TRUE(recognises(kBinFormat, dir_ / "anything"));
  dir_.write("text.bin", "no such thing");
  EXPECT_FALSE(recognises(kBinFormat, dir_ / "text.bin"));
  EXPECT_FALSE(recognises(kBinFormat, dir_ / "absent"));
}

}  // namespace
}  // namespace reshard::bin_reader_test
