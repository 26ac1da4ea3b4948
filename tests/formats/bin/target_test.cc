#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/bin/bin.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::bin_target_test {
namespace {

using testing::ElementsAre;

TargetTensor wanted(const std::string& name, const Dims& shape, DType dtype = DType::kUint8) {
  TargetTensor t;
  t.name = name;
  t.dtype = dtype;
  t.shape = shape;
  return t;
}

std::vector<std::string> paths(const Target& target) {
  std::vector<std::string> out;
  for (const CatalogFile& f : target.catalog().files) out.push_back(f.path);
  return out;
}

TEST(TorchWrite, OneFileWhenEverythingFits) {
  LayoutRequest request;
  request.tensors = {wanted("b", {3}), wanted("a", {2, 2}, DType::kBFloat16)};
  const auto target = kBinFormat.lay_out(request);
  ASSERT_TRUE(target) << target.error().message();
  EXPECT_THAT(paths(**target), ElementsAre("pytorch_model.bin"));
  EXPECT_TRUE((*target)->wants_crcs());
  EXPECT_TRUE(validate((*target)->catalog()));
}

TEST(TorchWrite, SeveralFilesHaveHuggingFacesIndexInBytes) {
  const TempDir dir;
  LayoutRequest request;
  request.tensors = {wanted("c", {6}), wanted("a", {4}), wanted("b", {9})};
  request.max_file_bytes = 10;
  const auto target = kBinFormat.lay_out(request);
  ASSERT_TRUE(target) << target.error().message();
  EXPECT_THAT(paths(**target), ElementsAre("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin",
                                           "pytorch_model.bin.index.json"));
  write_target({{"a", {DType::kUint8, {4}, "aaaa"}},
                {"b", {DType::kUint8, {9}, "bbbbbbbbb"}},
                {"c", {DType::kUint8, {6}, "cccccc"}}},
               **target, dir / "out");
  EXPECT_EQ(read_file(dir / "out/pytorch_model.bin.index.json"), R"({
  "metadata": {
    "total_size": 19
  },
  "weight_map": {
    "a": "pytorch_model-00001-of-00002.bin",
    "b": "pytorch_model-00002-of-00002.bin",
    "c": "pytorch_model-00001-of-00002.bin"
  }
}
)");
}

TEST(TorchWrite, RefusesRanks) {
  LayoutRequest request;
  request.tensors = {wanted("w", {2})};
  request.mesh = Mesh({{"tp", 2}});
  const auto target = kBinFormat.lay_out(request);
  ASSERT_FALSE(target);
  EXPECT_EQ(target.error().message(),
            "a Hugging Face model's files hold whole tensors: expected a mesh of one rank, got tp=2");
}

}  // namespace
}  // namespace reshard::bin_target_test
