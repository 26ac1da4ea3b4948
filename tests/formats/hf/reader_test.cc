
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "formats/encoding/safetensors_header.h"
#include "formats/hf/hf.h"
#include "formats/open.h"
#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::hf_reader_test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;

// How the error about one of several files ends.
const std::string kRest =
    ". reshard verify lists what the other files have; restore it from another copy of the checkpoint";

struct TensorSpec {
  std::string name;
  Dims shape;
  DType dtype = DType::kUint8;
};

// The bytes of a safetensors file; each data byte is `fill`.
std::string file_of(const std::vector<TensorSpec>& tensors, const SafetensorsMetadata& metadata = {}, char fill = 'x') {
  std::vector<SafetensorsEntry> entries;
  for (const TensorSpec& t : tensors) entries.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape});
  std::string bytes = *safetensors_header(entries, metadata, 8);
  const Index end = entries.empty() ? 0 : entries.back().offset + entries.back().length;
  bytes.resize(std::max(bytes.size(), static_cast<std::size_t>(end)), fill);
  return bytes;
}

SafetensorsMetadata shards(const std::string& info) {
  return {{"DCP_SHARDING_INFO", info}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
}

class SafetensorsReadTest : public testing::Test {
 protected:
  Result<std::unique_ptr<Reader>> open(const std::string& name = "", bool files_too = true) {
    return open_with(kHfFormat, name.empty() ? dir_.path() : dir_ / name, {.files_too = files_too});
  }

  // Returns why the file is refused, with D for the directory.
  std::string refusal(const std::string& name = "") {
    const auto reader = open(name);
    if (reader) return "accepted";
    code_ = reader.error().code();
    return shortened(reader.error().message(), dir_.path());
  }

  std::vector<std::string> names(const Catalog& catalog) {
    std::vector<std::string> out;
    for (const Tensor& tensor : catalog.tensors()) out.push_back(tensor.name + " " + to_string(tensor.shape));
    return out;
  }

  TempDir dir_;
  ErrorCode code_ = ErrorCode::kInternal;
};

TEST_F(SafetensorsReadTest, OpensAFileOfARealProducer) {
  const auto reader =
      open_with(kHfFormat, std::string(RESHARD_TEST_DATA) + "/safetensors/tp8.safetensors", OpenOptions{});
  ASSERT_TRUE(reader) << reader.error().message();
  Catalog& catalog = (*reader)->catalog();
  EXPECT_EQ(catalog.root, std::string(RESHARD_TEST_DATA) + "/safetensors");
  ASSERT_EQ(catalog.files.size(), 1u);
  EXPECT_EQ(catalog.files[0].path, "tp8.safetensors");
  EXPECT_EQ(catalog.files[0].size, 466248);
  EXPECT_EQ(catalog.tensors().size(), 39u);
  EXPECT_EQ(catalog.tensor_bytes(), 466248 - 4040);
  EXPECT_THAT(catalog.warnings, IsEmpty());
  EXPECT_THAT(catalog.attributes,
              ElementsAre(Pair("format", "Hugging Face safetensors, 1 file"), Pair("metadata", "format: pt")));
  const auto i = catalog.find("lm_head.weight");
  ASSERT_TRUE(i);
  const Tensor& tensor = catalog.tensors()[*i];
  EXPECT_TRUE(tensor.located);
  EXPECT_EQ(tensor.fragments.size(), 1u);
  EXPECT_EQ(tensor.fragments.extent(0), (Extent{0, 4040, 32896}));
  EXPECT_TRUE((*reader)->locate({*i}, 1, ""));
  EXPECT_FALSE((*reader)->blob_bytes({}));
}

TEST_F(SafetensorsReadTest, RecognisesNamesAndLeavesDistributedCheckpointsAlone) {
  EXPECT_FALSE(recognises(kHfFormat, dir_.path()));
  EXPECT_FALSE(recognises(kHfFormat, dir_ / "absent.safetensors"));
  dir_.write("sharded/a.safetensors", "");
  EXPECT_FALSE(recognises(kHfFormat, dir_.path()));
  EXPECT_TRUE(recognises(kHfFormat, dir_ / "sharded"));
  EXPECT_TRUE(recognises(kHfFormat, dir_ / "sharded/a.safetensors"));
  dir_.write("x.safetensors.index.json", "");
  EXPECT_TRUE(recognises(kHfFormat, dir_.path()));
  EXPECT_TRUE(recognises(kHfFormat, dir_ / "x.safetensors.index.json"));
  dir_.write(".metadata", "");
  EXPECT_FALSE(recognises(kHfFormat, dir_.path()));
}

TEST_F(SafetensorsReadTest, ADirectoryWithoutAnIndexIsAllItsFiles) {
  dir_.write("model-00001-of-00002.safetensors", file_of({{"layers.10.w", {2}}, {"layers.2.w", {3}}}));
  dir_.write("model-00002-of-00002.safetensors", file_of({{"b", {}}, {"e", {0, 4}}}));
  dir_.write("sharded/shard-00001-model-00001-of-00001.safetensors", "ignored");
  const auto reader = open();
  ASSERT_TRUE(reader) << reader.error().message();
  const Catalog& catalog = (*reader)->catalog();
  EXPECT_THAT(names(catalog), ElementsAre("b []", "e [0, 4]", "layers.2.w [3]", "layers.10.w [2]"));
  EXPECT_THAT(catalog.attributes, ElementsAre(Pair("format", "Hugging Face safetensors, 2 files")));
}

TEST_F(SafetensorsReadTest, ANumberThatIsNotThereIsAMissingFile) {
  dir_.write("model-00001-of-00003.safetensors", file_of({{"a", {2}}}));
  dir_.write("model-00003-of-00003.safetensors", file_of({{"c", {2}}}));
  EXPECT_EQ(
      refusal(),
      "D/model-00002-of-00003.safetensors: file is missing, and there is no index; open a single file to see what "
      "it contains" +
          kRest);
  dir_.write("model-00002-of-00003.safetensors", file_of({{"b", {2}}}));
  EXPECT_EQ(refusal(), "accepted");
  dir_.write("other-1-of-00002.safetensors", file_of({{"d", {2}}}));
  EXPECT_EQ(
      refusal(),
      "D/other-2-of-2.safetensors: file is missing, and there is no index; open a single file to see what it contains" +
          kRest);
  EXPECT_TRUE(open("model-00001-of-00003.safetensors"));
}

TEST_F(SafetensorsReadTest, ATensorInTwoFilesIsRefused) {
  dir_.write("a.safetensors", file_of({{"w", {2}}}));
  dir_.write("b.safetensors", file_of({{"w", {2}}}));
  EXPECT_EQ(refusal(),
            "D/b.safetensors: tensor 'w': expected it in one file, got it in D/a.safetensors too; if these are "
            "different models, open one of the files by its path");
}

TEST_F(SafetensorsReadTest, VariantsOfAModelAreNoPartOfIt) {
  dir_.write("model.safetensors", file_of({{"w", {2}}}));
  dir_.write("model.fp16.safetensors", file_of({{"w", {1}}}));
  dir_.write("model.fp32-00001-of-00002.safetensors", file_of({{"w", {3}}}));
  dir_.write("model_1.safetensors", file_of({{"v", {2}}}));
  auto reader = open();
  ASSERT_TRUE(reader) << reader.error().message();
  EXPECT_THAT(names((*reader)->catalog()), ElementsAre("v [2]", "w [2]"));
  EXPECT_THAT((*reader)->catalog().attributes.back().second, testing::HasSubstr("'model.fp16.safetensors'"));
  dir_.write("model.safetensors.index.json", R"({"metadata":{},"weight_map":{"v":"model_1.safetensors"}})");
  reader = open();
  ASSERT_TRUE(reader) << reader.error().message();
  EXPECT_THAT(names((*reader)->catalog()), ElementsAre("v [2]"));
  EXPECT_THAT((*reader)->catalog().stale_files, IsEmpty());
  EXPECT_THAT((*reader)->catalog().warnings,
              ElementsAre("model.safetensors is not named by the index next to it and is not read: transformers "
                          "loads it instead of the files of the index. Remove one of the two."));
}

// tests/data/safetensors/variants, as transformers saves a model and its variant; and the names of older programs.
TEST_F(SafetensorsReadTest, AVariantWithAnIndexIsNotTheModelBesideIt) {
  const auto tensors_and_dtype = [&](const std::string& path) {
    const auto open = open_checkpoint(path);
    if (!open) return open.error().message();
    const Catalog& catalog = open->reader->catalog();
    EXPECT_EQ(open->format, &kHfFormat) << path;
    EXPECT_THAT(catalog.warnings, IsEmpty()) << path;
    EXPECT_THAT(catalog.stale_files, IsEmpty()) << path;
    return std::to_string(catalog.tensors().size()) + " " + std::string(info(catalog.tensors()[0].dtype).torch_name);
  };
  const std::string data = RESHARD_TEST_DATA "/safetensors/variants";
  EXPECT_EQ(tensors_and_dtype(data), "16 float32");
  EXPECT_EQ(tensors_and_dtype(data + "/model.safetensors.index.json"), "16 float32");
  EXPECT_EQ(tensors_and_dtype(data + "/model.safetensors.index.fp16.json"), "16 float16");
  const std::string copy = dir_ / "copy";
  std::filesystem::copy(data, copy);
  const std::string index = copy + "/model.safetensors.index.json";
  std::filesystem::remove(index);
  std::filesystem::remove(copy + "/model-00001-of-00002.safetensors");
  std::filesystem::rename(copy + "/model-00002-of-00002.safetensors", copy + "/model.safetensors");
  EXPECT_EQ(tensors_and_dtype(copy), "4 float32") << "a model in one file";
  std::filesystem::remove(copy + "/model.safetensors");
  EXPECT_EQ(tensors_and_dtype(copy), "16 float16") << "the variant alone";
  std::filesystem::copy(copy + "/model.safetensors.index.fp16.json", copy + "/model.safetensors.index.bf16.json");
  const auto several = open_checkpoint(copy);
  ASSERT_FALSE(several);
  EXPECT_EQ(several.error().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(several.error().message(), testing::HasSubstr("model.safetensors.index.bf16.json"));
  EXPECT_THAT(several.error().message(), testing::HasSubstr("open one of them by its path"));
  dir_.write("old/m-00001-of-00001.safetensors", file_of({{"w", {2}}}));
  dir_.write("old/m-00001-of-00001.fp16.safetensors", file_of({{"w", {3}}}));
  dir_.write("old/m.safetensors.index.json", R"({"weight_map":{"w":"m-00001-of-00001.safetensors"}})");
  dir_.write("old/m.safetensors.fp16.index.json", R"({"weight_map":{"w":"m-00001-of-00001.fp16.safetensors"}})");
  EXPECT_EQ(tensors_and_dtype(dir_ / "old"), "1 uint8");
  EXPECT_THAT(names((*open("old"))->catalog()), ElementsAre("w [2]"));
  EXPECT_THAT(names((*open("old/m.safetensors.fp16.index.json"))->catalog()), ElementsAre("w [3]"));
}

// Files of an earlier save: loaders take the single file.
TEST_F(SafetensorsReadTest, NumberedFilesBesideAWholeModelAreNoPartOfIt) {
  dir_.write("model.safetensors", file_of({{"w", {2}}}));
  dir_.write("model-00001-of-00002.safetensors", file_of({{"w", {1}}}));
  dir_.write("other-00001-of-00001.safetensors", file_of({{"v", {3}}}));
  const auto reader = open();
  ASSERT_TRUE(reader) << reader.error().message();
  EXPECT_THAT(names((*reader)->catalog()), ElementsAre("v [3]", "w [2]"));
  EXPECT_THAT((*reader)->catalog().stale_files, ElementsAre("model-00001-of-00002.safetensors"));
}

TEST_F(SafetensorsReadTest, NamesThatSaveModelLeftOutAreThere) {
  dir_.write("m.safetensors", file_of({{"head", {2}}, {"pt", {1}}},
                                      {{"embedding", "head"}, {"format", "pt"}, {"gone", "absent"}, {"pt", "head"}}));
  const auto reader = open("m.safetensors");
  ASSERT_TRUE(reader) << reader.error().message();
  const Catalog& catalog = (*reader)->catalog();
  EXPECT_THAT(names(catalog), ElementsAre("embedding [2]", "head [2]", "pt [1]"));
  EXPECT_EQ(catalog.tensors()[0].fragments.extent(0), catalog.tensors()[1].fragments.extent(0));
}

TEST_F(SafetensorsReadTest, APointerOfGitLfsIsSaidToBeOne) {
  dir_.write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n");
  EXPECT_EQ(refusal(),
            "D/model.safetensors@0x0: safetensors header: expected tensors, got a pointer of Git LFS to the file that "
            "has them; git lfs pull gets it");
}

TEST_F(SafetensorsReadTest, AWebPageIsSaidToBeOne) {
  dir_.write("model.safetensors", "<!DOCTYPE html><html><body>502 Bad Gateway</body></html>");
  EXPECT_EQ(refusal(),
            "D/model.safetensors@0x0: safetensors header: expected tensors, got a web page or XML, perhaps an error of "
            "the server that the file came from; download it again");
}

// ---- The index

TEST_F(SafetensorsReadTest, TheIndexNamesTheFiles) {
  dir_.write("m1.safetensors", file_of({{"a", {2}}}));
  dir_.write("sub/m2.safetensors", file_of({{"b", {3}}}));
  dir_.write("consolidated.safetensors", file_of({{"a", {2}}}));
  dir_.write("model.safetensors.index.json",
             R"({"metadata":{"total_size":5},"weight_map":{"a":"m1.safetensors","b":"sub/m2.safetensors"}})");
  for (const std::string path : {"", "model.safetensors.index.json"}) {
    const auto reader = open(path);
    ASSERT_TRUE(reader) << reader.error().message();
    const Catalog& catalog = (*reader)->catalog();
    EXPECT_THAT(names(catalog), ElementsAre("a [2]", "b [3]"));
    EXPECT_THAT(catalog.stale_files,
                IsEmpty());  // the same model under Mistral's names is not a leftover of another save
    EXPECT_THAT(catalog.warnings, IsEmpty());
    EXPECT_THAT(catalog.attributes,
                ElementsAre(Pair("format", "Hugging Face safetensors, 2 files, index"),
                            Pair("next to it", "1 file: 'consolidated.safetensors', not part of the model")));
    EXPECT_EQ(catalog.files[1].path, "sub/m2.safetensors");
  }
}

TEST_F(SafetensorsReadTest, V9PathsThatLeaveTheDirectoryAreRefused) {
  dir_.write("outside.safetensors", file_of({{"w", {2}}}));
  for (const std::string path :
       {"../outside.safetensors", "/etc/passwd", "", "a/../../x", "..", "a\\\\b", "a\\u0000b"}) {
    dir_.write("in/model.safetensors.index.json", R"({"weight_map":{"w":")" + path + "\"}}");
    EXPECT_TRUE(
        refusal("in").starts_with("D/in/model.safetensors.index.json: weight_map: tensor 'w': expected a file "
                                  "inside the directory, got '"))
        << refusal("in");
    EXPECT_EQ(code_, ErrorCode::kCorrupt);
  }
}

TEST_F(SafetensorsReadTest, AFileThatIsNotThereIsNamedWithItsTensors) {
  dir_.write("m1.safetensors", file_of({{"a", {2}}}));
  dir_.write("model.safetensors.index.json",
             R"({"weight_map":{"a":"m1.safetensors","b.10":"m2.safetensors","b.9":"m2.safetensors"}})");
  EXPECT_EQ(refusal(),
            "D/m2.safetensors: cannot open: No such file or directory; affected: 2 tensors: 'b.9', 'b.10'" + kRest);
  EXPECT_EQ(code_, ErrorCode::kIo);
  dir_.write("m1.safetensors", "");
  EXPECT_THAT(refusal(), testing::AllOf(testing::HasSubstr("2 files cannot be read:\n  "),
                                        testing::HasSubstr("m1.safetensors@0x0: "),
                                        testing::HasSubstr("affected: 1 tensor: 'a'\n  "),
                                        testing::HasSubstr("/m2.safetensors: cannot open: ")));
}

TEST_F(SafetensorsReadTest, ATensorMustBeInTheFileTheIndexNames) {
  dir_.write("m1.safetensors", file_of({{"a", {2}}}));
  dir_.write("model.safetensors.index.json", R"({"weight_map":{"a":"m1.safetensors","b":"m1.safetensors"}})");
  EXPECT_EQ(refusal(),
            "D/m1.safetensors: expected tensor 'b', as D/model.safetensors.index.json says; it is missing (1 such "
            "tensor); affected: 1 tensor: 'b'" +
                kRest);
  dir_.write("m2.safetensors", file_of({{"b", {2}}, {"c", {1}}}));
  dir_.write("model.safetensors.index.json",
             R"({"weight_map":{"a":"m1.safetensors","b":"m1.safetensors","c":"m2.safetensors"}})");
  EXPECT_THAT(refusal(), testing::EndsWith("it is missing (1 such tensor); it is in m2.safetensors: correct the "
                                           "index, or save the model again; affected: 1 tensor: 'b'. reshard verify "
                                           "lists what the other files have"));
  const auto open = open_checkpoint(dir_.path(), {.skip_damaged = true});
  ASSERT_TRUE(open) << "verify reports it and checks the others";
  ASSERT_EQ(open->reader->catalog().unread_files.size(), 1U);
  EXPECT_THAT(open->reader->catalog().unread_files[0].tensors, ElementsAre("b"));
}

TEST_F(SafetensorsReadTest, WhatTheIndexDoesNotSayIsToldInWarnings) {
  dir_.write("m1.safetensors", file_of({{"a", {2}}, {"extra", {1}}}));
  dir_.write("m2.safetensors", file_of({{"a", {2}}, {"b", {3}}}));
  dir_.write("model.safetensors.index.json",
             R"({"metadata":{"total_size":0.5},"weight_map":{"a":"m1.safetensors","b":"m2.safetensors"}})");
  const auto reader = open();
  ASSERT_TRUE(reader) << reader.error().message();
  EXPECT_THAT(names((*reader)->catalog()), ElementsAre("a [2]", "b [3]", "extra [1]"));
  EXPECT_THAT(
      (*reader)->catalog().warnings,
      ElementsAre("In the files but not in the index: 1 tensor: 'extra'. They are read.",
                  "In a file other than the index says: 1 tensor: 'a'. Only the copy that the index names is read.",
                  "The index gives a total_size of 0.5; the tensors have 6 bytes."));
}

TEST_F(SafetensorsReadTest, ABrokenIndexIsRefused) {
  const auto with = [&](const std::string& text) {
    dir_.write("model.safetensors.index.json", text);
    return refusal();
  };
  EXPECT_EQ(with("{}"), "D/model.safetensors.index.json: weight_map: expected an object, got nothing");
  EXPECT_EQ(with(R"({"weight_map":[]})"),
            "D/model.safetensors.index.json: weight_map: expected an object, got an array");
  EXPECT_EQ(with(R"({"weight_map":{"w":1}})"),
            "D/model.safetensors.index.json: weight_map: tensor 'w': expected a string, got an integer");
  EXPECT_EQ(with(R"({"weight_map":{"w":"a","w":"b"}})"), "D/model.safetensors.index.json@0x19: duplicate key 'w'");
  EXPECT_EQ(with(R"({"weight_map":{}})"), "accepted");
}

TEST_F(SafetensorsReadTest, OfSeveralIndexesTheUsualOneCounts) {
  dir_.write("m.safetensors", file_of({{"a", {2}}}));
  dir_.write("x.safetensors.index.json", R"({"weight_map":{"a":"m.safetensors"}})");
  EXPECT_EQ(refusal(), "accepted");
  dir_.write("y.safetensors.index.json", "broken");
  EXPECT_EQ(refusal(),
            "D: expected one index, got 2 files: 'x.safetensors.index.json', 'y.safetensors.index.json'; open one of "
            "them by its "
            "path");
  EXPECT_EQ(refusal("x.safetensors.index.json"), "accepted");
  dir_.write("model.safetensors.index.json", R"({"weight_map":{}})");
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(SafetensorsReadTest, HeadersSufficeWhenTheFilesAreNotAskedFor) {
  const std::string bytes = file_of({{"a", {100}}});
  dir_.write("m.safetensors", bytes.substr(0, bytes.size() - 50));
  EXPECT_TRUE(refusal().ends_with("tensor data: expected 100 bytes, got 50 before the end: the file is truncated"));
  const auto reader = open("", false);
  ASSERT_TRUE(reader) << reader.error().message();
  EXPECT_THAT(names((*reader)->catalog()), ElementsAre("a [100]"));
}

// ---- Shards of Distributed Checkpoint

TEST_F(SafetensorsReadTest, JoinsTheShardsOfDistributedCheckpoint) {
  dir_.write("shard-00001-model-00001-of-00001.safetensors",
             file_of({{"w", {2, 3}, DType::kFloat32}, {"whole", {5}}},
                     shards(R"({"w":{"saved_offsets":[0,0]},"whole":{"saved_offsets":[0]}})")));
  dir_.write("shard-00003-model-00001-of-00001.safetensors",
             file_of({{"w", {1, 3}, DType::kFloat32}, {"s", {}}}, shards(R"({"w":{"saved_offsets":[2,0]}})")));
  const auto reader = open();
  ASSERT_TRUE(reader) << reader.error().message();
  Catalog& catalog = (*reader)->catalog();
  EXPECT_THAT(names(catalog), ElementsAre("s []", "w [3, 3]", "whole [5]"));
  const Tensor& w = catalog.tensors()[*catalog.find("w")];
  ASSERT_EQ(w.fragments.size(), 2u);
  EXPECT_EQ(w.fragments.box(1), (Box{{2, 0}, {1, 3}}));
  EXPECT_EQ(w.fragments.extent(1).file, 1u);
  EXPECT_EQ(w.fragments.extent(1).length, 12);
  EXPECT_THAT(catalog.warnings,
              ElementsAre("These shards do not record the shapes of whole tensors: if the last shard of a tensor is "
                          "missing, the tensor looks smaller, and the files do not show it."));
  EXPECT_THAT(catalog.attributes,
              ElementsAre(Pair("format", "Hugging Face safetensors, 2 files, Distributed Checkpoint shards"),
                          Pair("metadata", "DCP_VERSION: 1.0, format: pt")));
}

TEST_F(SafetensorsReadTest, LogicalNamesJoinBoxesOfOneFile) {
  dir_.write("shard-00001-model-00001-of-00001.safetensors",
             file_of({{"w#0", {2}}, {"w#1", {3}}}, shards(R"({"w#0":{"saved_offsets":[3],"logical_fqn":"w"},)"
                                                          R"("w#1":{"saved_offsets":[0],"logical_fqn":"w"}})")));
  const auto reader = open();
  ASSERT_TRUE(reader) << reader.error().message();
  EXPECT_THAT(names((*reader)->catalog()), ElementsAre("w [5]"));
}

TEST_F(SafetensorsReadTest, ShardsThatDoNotFitTogetherAreRefused) {
  const auto with = [&](TensorSpec tensor, const std::string& info) {
    dir_.write("shard-00001.safetensors", file_of({{"w", {2, 3}}}, shards(R"({"w":{"saved_offsets":[0,0]}})")));
    dir_.write("shard-00002.safetensors", file_of({std::move(tensor)}, shards(info)));
    return refusal();
  };
  EXPECT_EQ(with({"w", {2, 3}}, R"({"w":{"saved_offsets":[4,0]}})"),
            "D: tensor 'w' [6, 3]: 6 of 18 elements are missing, the first in [2:4, 0:3]");
  EXPECT_EQ(with({"w", {2, 3}}, R"({"w":{"saved_offsets":[1,0]}})"),
            "D: tensor 'w' [0:2, 0:3] overlaps [1:3, 0:3]: every element must be stored once");
  EXPECT_EQ(with({"w", {2, 3}, DType::kInt8}, R"({"w":{"saved_offsets":[2,0]}})"),
            "D/shard-00002.safetensors: tensor 'w': expected U8 as in D/shard-00001.safetensors, got I8");
  EXPECT_EQ(with({"w", {6}}, R"({"w":{"saved_offsets":[2]}})"),
            "D/shard-00002.safetensors: tensor 'w': expected 2 dimensions as in D/shard-00001.safetensors, got 1");
  EXPECT_EQ(with({"w", {2, 3}}, R"({"w":{"saved_offsets":[2]}})"),
            "D/shard-00002.safetensors: tensor 'w': saved_offsets: expected 2 numbers for shape [2, 3], got 1");
  EXPECT_EQ(with({"w", {2, 3}}, R"({"w":{"saved_offsets":[-2,0]}})"),
            "D/shard-00002.safetensors: tensor 'w': saved_offsets: -2 is out of range");
  EXPECT_EQ(with({"w", {2, 3}}, R"({"w":{"saved_offsets":[9223372036854775807,0]}})"),
            "D/shard-00002.safetensors: tensor 'w': saved_offsets: 9223372036854775807 is out of range");
  EXPECT_EQ(with({"w", {2, 3}}, R"({"w":{"saved_offsets":[4611686018427387904,0]}})"),
            "D: tensor 'w': the size of [4611686018427387906, 3] is 2^63 bytes or more");
  EXPECT_EQ(with({"w", {2, 3}}, R"({"w":{}})"),
            "D/shard-00002.safetensors: tensor 'w': saved_offsets: expected an array, got nothing");
  EXPECT_EQ(
      with({"v", {2, 3}}, R"({"w":{"saved_offsets":[2,0]}})"),
      "D/shard-00002.safetensors: DCP_SHARDING_INFO: expected entries for tensors of this file, got 1 other entry");
  EXPECT_EQ(with({"w", {2, 3}}, "[]"),
            "D/shard-00002.safetensors: DCP_SHARDING_INFO: expected an object, got an array" + kRest);
  EXPECT_EQ(
      with({"w", {2, 3}}, "{"),
      "D/shard-00002.safetensors: DCP_SHARDING_INFO@0x1: syntax error while parsing object key - unexpected end of "
      "input; expected string literal" +
          kRest);
  EXPECT_EQ(with({"w", {2, 3}}, R"({"w":{"saved_offsets":[2,0]}})"), "accepted");
}

}  // namespace
}  // namespace reshard::hf_reader_test
