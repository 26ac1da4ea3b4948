#include "formats/encoding/weight_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/temp_dir.h"

namespace reshard::weight_index_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(WeightIndex, KeepsTheOrderOfItsNames) {
  const auto index = WeightIndex::parse(
      R"({"metadata": {"total_size": 13.5, "param_groups": "g.bin"}, "weight_map": {"z": "b", "a": "a", "m": "b"}})",
      "i");
  ASSERT_TRUE(index) << index.error().message();
  ASSERT_EQ(index->entries().size(), 3u);
  EXPECT_EQ(index->entries()[0].name, "z");
  EXPECT_EQ(index->entries()[2].file, "b");
  EXPECT_THAT(index->files(), ElementsAre("a", "b"));
  EXPECT_EQ(index->find("m"), 2u);
  EXPECT_EQ(index->find("x"), std::nullopt);
  EXPECT_EQ(*index->total_size().as_double(), 13.5);
  EXPECT_EQ(index->param_groups(), "g.bin");
}

TEST(WeightIndex, RefusesFilesOutsideAndNamesThatComeTwice) {
  const auto refusal = [](std::string_view text) {
    const auto index = WeightIndex::parse(text, "i");
    return index ? "accepted" : index.error().message();
  };
  EXPECT_EQ(refusal(R"({"weight_map": {"a": "../x"}})"),
            "i: weight_map: tensor 'a': expected a file inside the directory, got '../x'");
  EXPECT_EQ(refusal(R"({"metadata": {"param_groups": "/x"}, "weight_map": {}})"),
            "i: metadata: param_groups: expected a file inside the directory, got '/x'");
  EXPECT_EQ(refusal(R"({"weight_map": {"a": 1}})"), "i: weight_map: tensor 'a': expected a string, got an integer");
  EXPECT_NE(refusal(R"({"weight_map": {"a": "x", "a": "x"}})"), "accepted");
  EXPECT_NE(refusal(R"({"metadata": {}})"), "accepted");
  EXPECT_NE(refusal("[]"), "accepted");
}

TEST(WeightIndex, RefusesOnesThatNoModelHas) {
  const TempDir dir;
  dir.write("model.safetensors.index.json", "{");
  std::filesystem::resize_file(dir / "model.safetensors.index.json", 100'000'001);
  const auto index = WeightIndex::read(dir / "model.safetensors.index.json");
  ASSERT_FALSE(index);
  EXPECT_THAT(index.error().message(), HasSubstr("100000001"));
}

}  // namespace
}  // namespace reshard::weight_index_test
